"""The whet command from outside: every command and flag, files from and for NumPy, edge cases, faults.

WHET_BUILD names the build whose bin/whet is tested.
"""

import json
import os
import subprocess

import numpy as np
import pytest
from command import FIELDS, PAPER, WHET, beta_of, compute, entropy_of, field, logits, names, ok, plain, refused, run, softmax


# ---- help, version, info, bench


def test_version():
    assert ok("--version") == "whet 0.1.0\n"


def test_help_teaches():
    text = ok("--help")
    for word in ["softmax", "sharpen", "info", "bench", "whet softmax logits.npy", "none", "paper", "fixed:B",
                 "log-length:N0[,S]", "ssmax:S", "log-power:D,B,G", "llama4:N0[,S]", "target-entropy:H", "target-peak:W",
                 "polynomial:FILE",
                 "whet-foo", "WHET_THREADS", "WHET_TARGET"]:
        assert word in text
    assert text.count("  whet softmax ") >= 2
    assert ok("-h") == text


@pytest.mark.parametrize("command", ["softmax", "sharpen"])
def test_help_of_row_commands(command):
    text = ok(command, "--help")
    for word in ["Example:", f"whet {command} ", "target-peak:W", "polynomial:FILE", "--rule", "--stats", "--axis",
                 "--mask", "--lengths", "--threads", ", ".join(FIELDS[:5])]:
        assert word in text


def test_help_of_info_and_bench():
    assert "Example" in ok("info", "--help")
    text = ok("bench", "--help")
    for benchmark in ["rows", "attention"]:
        assert benchmark in text
        assert "--quick" in ok("bench", benchmark, "--help")
        refused(2, "bench", benchmark, "--threads", "0", saying="--threads")


def test_bench_rows():
    report = json.loads(ok("bench", "rows", "--quick", "--json", "--threads", "2"))
    assert report["benchmark"] == "rows" and report["threads"] == 2
    (shape,) = report["shapes"]
    assert shape["mean_beta"] > 1.2
    for times in shape["ns_per_element"].values():
        assert 0 < times["lower_quartile"] <= times["median"] <= times["upper_quartile"]
    assert "4096 x 1024" in ok("bench", "rows", "--quick")


def test_bench_attention():
    report = json.loads(ok("bench", "attention", "--quick", "--json", "--threads", "2"))
    assert report["benchmark"] == "attention" and report["threads"] == 2
    for part, rate, rules in [("shapes", "gflops", ["none", "paper", "target-entropy:0.2"]),
                              ("decode", "gigabytes_per_second", ["none", "paper", "paper, bf16"])]:
        (shape,) = report[part]
        assert shape["mean_beta"] > 1.2
        assert list(shape["ns"]) == list(shape[rate]) == rules
        for rule in rules:
            times = shape["ns"][rule]
            assert 0 < times["lower_quartile"] <= times["median"] <= times["upper_quartile"]
            assert shape[rate][rule] > 0
    text = ok("bench", "attention", "--quick")
    assert "8 x 512, d 64 " in text and "9/3 x 1 x 8192, d 64 " in text


def test_info():
    lines = dict(line.split(maxsplit=1) for line in ok("info").splitlines())
    assert lines["version"] == "0.1.0"
    assert lines["target"] in lines["targets"].split()
    assert int(lines["threads"]) >= 1
    assert lines["caches"].startswith("L1d ")
    assert lines["compiler"].split()[0] in ("gcc", "clang")
    assert lines["mpi"] == "not built" or float(lines["mpi"]) >= 2


def test_info_json():
    info = json.loads(ok("info", "--json"))
    assert list(info) == ["version", "targets", "target", "threads", "cache_bytes", "compiler", "mpi"]
    assert info["version"] == "0.1.0" and info["target"] in info["targets"]
    assert list(info["cache_bytes"]) == ["L1d", "L2", "L3"]


def test_info_follows_the_environment():
    targets = json.loads(ok("info", "--json"))["targets"]
    for target in targets:
        environment = {**os.environ, "WHET_TARGET": target, "WHET_THREADS": "3"}
        info = json.loads(ok("info", "--json", env=environment))
        assert info["target"] == target and info["threads"] == 3
    refused(2, "info", env={**os.environ, "WHET_TARGET": "Z80"}, saying="WHET_TARGET is 'Z80'")
    refused(2, "info", env={**os.environ, "WHET_THREADS": "many"}, saying="WHET_THREADS is 'many'")


def test_standard_output_full():
    with open("/dev/full", "w") as full:
        result = subprocess.run([WHET, "info"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "whet info: cannot write to standard output\n"


# ---- wrong use


def test_wrong_use(here):
    np.save("in.npy", logits(2, 3))
    refused(2, saying="a command is missing. See 'whet --help'.")
    refused(2, "--", saying="a command is missing")
    refused(2, "--nonsense", saying="--nonsense")
    refused(2, "softmax", saying="IN is required")
    refused(2, "softmax", "in.npy", saying="OUT is required")
    refused(2, "softmax", "in.npy", "out.npy", "more.npy", saying="more.npy")
    refused(2, "softmax", "in.npy", "out.npy", "--nonsense", saying="whet softmax --help")
    refused(2, "softmax", "in.npy", "out.npy", "--rule", saying="--rule")
    refused(2, "softmax", "in.npy", "out.npy", "--axis", "first", saying="--axis")
    refused(2, "softmax", "in.npy", "out.npy", "--threads", "-1", saying="threads is -1")
    refused(2, "softmax", "in.npy", "out.npy", "--threads", "1025", saying="threads is 1025")
    refused(2, "softmax", "in.npy", "out.npy", "--threads", "two", saying="--threads")
    refused(2, "info", "extra", saying="extra")
    assert names(here) == ["in.npy"]


@pytest.mark.parametrize("rule", ["", "sharp", "fixed", "fixed:", "fixed:x", "fixed:0", "fixed:nan", "none:1",
                                  "log-length:1", "ssmax:-1", "log-power:0,0,1", "llama4:0", "target-entropy:0", "target-peak:1",
                                  "polynomial:", "polynomial:missing.txt", "polynomial:1:gate", "paper\nnone"])
def test_wrong_rules(here, rule):
    np.save("in.npy", logits(2, 3))
    refused(2, "softmax", "in.npy", "out.npy", "--rule", rule, saying="whet softmax: ")
    assert names(here) == ["in.npy"]


def test_files_may_be_named_like_commands(here):
    np.save("info", logits(2, 3))
    os.rename("info.npy", "info")
    ok("softmax", "info", "bench")
    np.testing.assert_allclose(np.load("bench"), softmax(np.load("info")), rtol=2e-6)


def test_dispatch_runs_programs_from_path(here):
    program = here / "whet-foo"
    program.write_text('#!/bin/sh\necho "$0|$1|$2|$#"\nexit 7\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}"}
    result = run("foo", "a b", "--help", env=environment)
    assert result.returncode == 7
    assert result.stdout == f"{program}|a b|--help|2\n"


def test_dispatch_without_a_program(here):
    assert refused(2, "foo") == "whet: 'foo' is not a whet command. See 'whet --help'.\n"
    assert refused(2, "sofmax").endswith("See 'whet --help'. Did you mean 'softmax'?\n")
    assert refused(2, "inof").endswith("Did you mean 'info'?\n")
    refused(2, "", saying="'' is not a whet command")
    nowhere = {**os.environ, "PATH": str(here)}
    assert refused(1, "probe", env=nowhere) == ("whet: whet probe is part of the Python package: pip install 'whet[probe]', and "
                                                "have its whet-probe in PATH.\n")
    refused(1, "tune", env=nowhere, saying="'whet[probe]'")
    refused(1, "clrs", "--help", env=nowhere, saying="'whet[clrs]'")
    (here / "whet-x").write_text("no program")
    refused(2, "../x", saying="not a whet command")
    refused(2, "a\nb\x1b[2J", saying="'a\\x0ab\\x1b[2J' is not")
    refused(1, "x", env={**os.environ, "PATH": str(here)}, saying="cannot run whet-x: Permission denied")


# ---- values


@pytest.mark.parametrize("rule", ["none", "paper", "fixed:1.5", "fixed:0.25", "log-length:16", "log-length:4,0.9",
                                  "ssmax:0.4", "log-power:0.5,0.2,1.5", "llama4:128", "llama4:16,0.7"])
@pytest.mark.parametrize("dtype,tolerance", [(np.float32, 1e-4), (np.float64, 1e-11)])
def test_rules(here, rule, dtype, tolerance):
    x = logits(5, 300, dtype=dtype)
    weights, stats = compute(x, "--rule", rule)
    assert weights.dtype == dtype and weights.shape == x.shape and weights.flags.c_contiguous
    np.testing.assert_allclose(weights, softmax(x, rule), rtol=tolerance, atol=1e-30)
    np.testing.assert_allclose(field(stats, "beta"), [beta_of(rule, row.astype(float)) for row in x], rtol=1e-5)


def test_rule_by_default_is_none(here):
    x = logits(3, 7)
    np.save("in.npy", x)
    ok("softmax", "in.npy", "a.npy")
    ok("softmax", "in.npy", "b.npy", "--rule", "none")
    assert open("a.npy", "rb").read() == open("b.npy", "rb").read()


def test_target_rules(here):
    x = logits(6, 500)
    weights, stats = compute(x, "--rule", "target-entropy:0.2")
    np.testing.assert_allclose([entropy_of(w.astype(float)) for w in weights], 0.2, atol=1e-5)
    np.testing.assert_allclose(field(stats, "sharp_entropy"), 0.2, atol=1e-5)
    weights, stats = compute(x, "--rule", "target-peak:0.9")
    np.testing.assert_allclose(weights.max(axis=-1), 0.9, atol=1e-5)
    assert (field(stats, "beta") >= 1).all()


def test_polynomial_from_the_line_and_from_a_file(here):
    x = logits(4, 100)
    expected, _ = compute(x, "--rule", "paper")
    line = "polynomial:" + ",".join(map(str, PAPER))
    (here / "fit.txt").write_text(f"# the published fit\n{line}\n")
    for rule in (line, "polynomial:fit.txt"):
        weights, _ = compute(x, "--rule", rule)
        assert weights.tobytes() == expected.tobytes()


def test_rule_files_are_regular_and_small(here):
    np.save("in.npy", logits(4, 100))
    os.mkfifo("fifo")
    for name in ("fifo", "/dev/zero", "."):
        refused(2, "softmax", "in.npy", "out.npy", "--rule", f"polynomial:{name}",
                saying=f"rule: the file '{name}' isn't a regular file")
    (here / "large").write_bytes(bytes(65537))
    refused(2, "softmax", "in.npy", "out.npy", "--rule", "polynomial:large", saying="rule: the file 'large' has more than 65536 bytes")
    assert names(here) == ["fifo", "in.npy", "large"]


def test_stats_fields(here):
    x = logits(3, 4, 50)
    _, stats = compute(x, "--rule", "fixed:2")
    assert stats.dtype == np.float64 and stats.shape == (3, 4, 12) and stats.flags.c_contiguous
    for index in np.ndindex(3, 4):
        row = x[index].astype(np.float64)
        p, q = plain(row), plain(2 * row)
        entropy = entropy_of(p)
        expected = [50, row.max(), np.log(np.exp(row - row.max()).sum()) + row.max(), entropy,
                    (p * (np.log(p) + entropy) ** 2).sum(), row.max() - row.min(), p.max(), 2, entropy_of(q), q.max(),
                    50, -np.inf]
        np.testing.assert_allclose(stats[index], expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_axis(here, axis):
    x = logits(4, 5, 6)
    weights, stats = compute(x, "--axis", axis, "--rule", "paper")
    np.testing.assert_allclose(weights, softmax(x, "paper", axis), rtol=1e-5)
    assert stats.shape == (*np.delete(x.shape, axis), 12)


def test_axis_out_of_range(here):
    np.save("in.npy", logits(4, 5))
    for axis in (2, -3, 2147483647):
        refused(2, "softmax", "in.npy", "out.npy", "--axis", axis, saying="in.npy: has shape (4, 5); --axis is")


def test_one_axis(here):
    x = logits(9)
    weights, stats = compute(x)
    np.testing.assert_allclose(weights, softmax(x), rtol=2e-6)
    assert stats.shape == (12,)


def test_eight_axes(here):
    x = logits(2, 1, 3, 1, 2, 1, 2, 4)
    weights, stats = compute(x, "--axis", 2)
    np.testing.assert_allclose(weights, softmax(x, axis=2), rtol=2e-6)
    assert stats.shape == (2, 1, 1, 2, 1, 2, 4, 12)


def test_threads_do_not_change_bits(here):
    x = logits(64, 3000)
    one = [a.tobytes() for a in compute(x, "--rule", "paper", "--threads", 1)]
    for threads in (0, 2, 3, 16):
        assert [a.tobytes() for a in compute(x, "--rule", "paper", "--threads", threads)] == one


def test_sharpen(here):
    x = logits(4, 60)
    p = softmax(x).astype(np.float32)
    weights, stats = compute(p, "--rule", "fixed:2", command="sharpen")
    np.testing.assert_allclose(weights, p.astype(float) ** 2 / (p.astype(float) ** 2).sum(-1, keepdims=True), rtol=1e-4)
    np.testing.assert_allclose(field(stats, "entropy"), [entropy_of(row.astype(float)) for row in p], rtol=1e-4)
    p[1, 3] = -0.5
    weights, _ = compute(p, "--rule", "fixed:2", command="sharpen")
    assert np.isnan(weights[1]).all() and np.isfinite(np.delete(weights, 1, 0)).all()


def test_out_may_be_in(here):
    x = logits(3, 40)
    np.save("x.npy", x)
    ok("softmax", "x.npy", "x.npy")
    np.testing.assert_allclose(np.load("x.npy"), softmax(x), rtol=2e-6)
    assert names(here) == ["x.npy"]


# ---- masks and lengths


def test_mask(here):
    x = logits(6, 33)
    mask = np.random.default_rng(1).random((6, 33)) < 0.5
    np.save("mask.npy", mask)
    weights, stats = compute(x, "--mask", "mask.npy", "--rule", "paper")
    np.testing.assert_allclose(weights, softmax(np.where(mask, x, -np.inf), "paper"), rtol=1e-5)
    np.testing.assert_array_equal(field(stats, "count"), mask.sum(-1))


@pytest.mark.parametrize("shape", [(4, 5), (5,), (1, 5), (4, 1), (1,), ()])
@pytest.mark.parametrize("order", ["C", "F"])
def test_mask_broadcasts(here, shape, order):
    x = logits(3, 4, 5)
    mask = np.asarray(np.random.default_rng(2).random(shape) < 0.7, order=order)
    np.save("mask.npy", mask)
    weights, _ = compute(x, "--mask", "mask.npy", "--axis", 1)
    visible = np.broadcast_to(mask, x.shape)
    expected = np.where(visible, np.exp(x.astype(float)), 0)
    total = expected.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, np.divide(expected, total, out=np.zeros_like(expected), where=total > 0),
                               rtol=2e-6)


def test_wrong_masks(here):
    np.save("in.npy", logits(3, 4))
    for mask, saying in [(np.ones((3, 5), bool), "mask"), (np.ones((2, 4), bool), "mask"),
                         (np.ones((1, 3, 4), bool), "mask.npy: has 3 axes"),
                         (np.ones((3, 4), np.float32), "mask.npy: holds float32")]:
        np.save("mask.npy", mask)
        refused(2, "softmax", "in.npy", "out.npy", "--mask", "mask.npy", saying=saying)
    np.save("mask.npy", np.ones((3, 4), np.uint8))
    refused(1, "softmax", "in.npy", "out.npy", "--mask", "mask.npy", saying="'|u1'")
    np.save("mask.npy", np.full((3, 4), 2, np.uint8).view(bool))
    refused(1, "softmax", "in.npy", "out.npy", "--mask", "mask.npy", saying="mask.npy: has the byte 2")
    assert names(here) == ["in.npy", "mask.npy"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_lengths(here, order):
    x = logits(3, 4, 20)
    lengths = np.asarray(np.random.default_rng(3).integers(0, 21, (3, 4)), order=order)
    np.save("lengths.npy", lengths)
    weights, stats = compute(x, "--lengths", "lengths.npy")
    np.testing.assert_array_equal(field(stats, "count"), lengths)
    for index in np.ndindex(3, 4):
        n = lengths[index]
        assert (weights[index][n:] == 0).all()
        if n:
            np.testing.assert_allclose(weights[index][:n], softmax(x[index][:n]), rtol=2e-6)


def test_lengths_of_a_single_row(here):
    np.save("lengths.npy", np.int64(2))
    weights, _ = compute(logits(5), "--lengths", "lengths.npy")
    assert np.count_nonzero(weights) == 2


def test_wrong_lengths(here):
    np.save("in.npy", logits(3, 4))
    for lengths, saying in [([1, 2], "has shape (2,)"), ([[1], [2], [3]], "has shape (3, 1)"), ([1, 2, 5], "lengths"),
                            ([1, 2, -1], "lengths"), ([1.0, 2.0, 3.0], "holds float64")]:
        np.save("lengths.npy", lengths)
        refused(2, "softmax", "in.npy", "out.npy", "--lengths", "lengths.npy", saying=saying)
    assert names(here) == ["in.npy", "lengths.npy"]


# ---- edge cases of numbers, with every rule


RULES = ["none", "paper", "fixed:3", "log-length:2", "ssmax:0.4", "log-power:1,0.5,2", "llama4:2", "target-entropy:0.2",
         "target-peak:0.9"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_edges(here, rule, dtype):
    inf, nan = np.inf, np.nan
    x = np.array([[-inf] * 4,               # 0: no visible key
                  [-inf, 5, -inf, -inf],    # 1: one
                  [2, 2, 2, 2],             # 2: all equal
                  [1, nan, 2, 3],           # 3: NaN
                  [1, inf, 2, 3],           # 4: +inf
                  [0, 1, -inf, 2]], dtype)  # 5: an ordinary one between them
    weights, stats = compute(x, "--rule", rule)
    assert (weights[0] == 0).all()
    np.testing.assert_array_equal(stats[0], [0, -inf, -inf, 0, 0, 0, 0, 1, 0, 0, 0, -inf])
    np.testing.assert_array_equal(weights[1], [0, 1, 0, 0])
    np.testing.assert_array_equal(stats[1], [1, 5, 5, 0, 0, 0, 1, 1, 0, 1, 1, -inf])
    assert (weights[2] == 0.25).all()
    np.testing.assert_allclose(field(stats, "entropy")[2], np.log(4), rtol=1e-6)
    for row in (3, 4):
        assert np.isnan(weights[row]).all() and np.isnan(stats[row, 1:]).all()
    assert weights[5, 2] == 0 and np.isfinite(weights[5]).all() and np.isfinite(stats[5, :-1]).all()
    assert abs(weights[5].astype(float).sum() - 1) < (2e-3 if dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_huge_logits(here, rule):
    x = np.array([[3e38, -3e38, 0], [3e38, 3e38, -3e38], [-3e38, -3e38, -3e38]], np.float32)
    weights, stats = compute(x, "--rule", rule)
    np.testing.assert_array_equal(weights[0], [1, 0, 0])
    np.testing.assert_array_equal(weights[1], [0.5, 0.5, 0])
    np.testing.assert_allclose(weights[2], [1 / 3] * 3, rtol=1e-6)
    assert not np.isnan(stats).any()


def test_nan_behind_a_mask_has_no_effect(here):
    x = logits(2, 5)
    mask = np.ones((2, 5), bool)
    mask[:, 2] = False
    np.save("mask.npy", mask)
    clean, _ = compute(x, "--mask", "mask.npy")
    x[0, 2], x[1, 2] = np.nan, np.inf
    hidden, _ = compute(x, "--mask", "mask.npy")
    assert clean.tobytes() == hidden.tobytes()


def test_scale_prints_the_same_as_a_table_and_as_json():
    line = ["scale", "--tokens", "1e5", "--ranks", 8]
    found = json.loads(run(*line, "--json").stdout)
    table = run(*line).stdout
    assert {case["scheme"] for case in found["forward"]} == {"in place", "ring"}
    for case in found["forward"]:
        assert case["seconds"] >= case["compute_seconds"] > 0
    assert f"{found['merge_error_bound']:.1e}" in table
    refused(2, "scale", "--ranks", 0, saying="--ranks: is 0, must be finite and at least 1")
    refused(2, "scale", "--steps", 2000, saying="--steps: Value 2000 not in range 0 to 1000")
