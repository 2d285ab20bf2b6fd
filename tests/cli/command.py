"""Running whet, and what it should compute, in float64."""

import os
import subprocess

import numpy as np

WHET = os.path.abspath(os.path.join(os.environ["WHET_BUILD"], "bin", "whet"))  # tests change the folder
# AddressSanitizer needs more address space than a limit on memory would leave it.
with open(WHET, "rb") as program:
    SANITIZED = b"__asan_init" in program.read()

FIELDS = ["count", "max", "log_sum_exp", "entropy", "varentropy", "spread", "peak",
          "beta", "sharp_entropy", "sharp_peak", "support", "threshold"]
PAPER = [-0.037, 0.481, -2.3, 4.917, -1.791]


# ---- running whet


def run(*arguments, **keywords):
    return subprocess.run([WHET, *map(str, arguments)], capture_output=True, text=True, timeout=600 if SANITIZED else 60,
                          **keywords)


def ok(*arguments, **keywords):
    result = run(*arguments, **keywords)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def refused(code, *arguments, saying="", **keywords):
    """Fails with this exit code, one line on stderr that contains `saying`, nothing on stdout."""
    result = run(*arguments, **keywords)
    assert result.returncode == code, (result.returncode, result.stderr)
    assert result.stdout == ""
    assert result.stderr.startswith("whet") and ": " in result.stderr
    assert result.stderr.endswith("\n") and result.stderr.count("\n") == 1, result.stderr
    assert saying in result.stderr, result.stderr
    return result.stderr


def names(folder):
    return sorted(os.listdir(folder))


# ---- what it should compute, in float64


def beta_of(rule, x):
    p = plain(x)
    entropy, count = entropy_of(p), np.count_nonzero(np.isfinite(x))
    if count <= 1:
        return 1.0
    name, _, value = rule.partition(":")
    if name == "paper":
        return max(1.0, np.polyval(PAPER, entropy)) if entropy > 0.5 else 1.0
    if name == "fixed":
        return float(value)
    if name == "ssmax":
        return float(value) * np.log(count)
    if name == "log-power":
        d, b, g = map(float, value.split(","))
        return d + b * np.log(count) ** g
    if name == "llama4":
        n0, _, s = value.partition(",")
        return 1 + float(s or 0.1) * np.log(count // int(n0) + 1)
    if name == "log-length":
        n0, _, s = value.partition(",")
        return max(1.0, float(s or 1) * np.log(count) / np.log(float(n0)))
    assert name == "none"
    return 1.0


def plain(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def entropy_of(p):
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def softmax(x, rule="none", axis=-1):
    return np.apply_along_axis(lambda row: plain(beta_of(rule, row) * row), axis, x.astype(np.float64))


def compute(x, *options, command="softmax"):
    """Runs a command on x in the current folder; weights and stats."""
    np.save("in.npy", x)
    ok(command, "in.npy", "out.npy", "--stats", "stats.npy", *options)
    return np.load("out.npy"), np.load("stats.npy")


def field(stats, name):
    return stats[..., FIELDS.index(name)]


def logits(*shape, seed=0, dtype=np.float32, scale=3):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)
