"""The commands of the lab from outside: runs that last, results that hold together, errors that name what is wrong."""

import hashlib
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from command import SANITIZED, WHET, names, ok, refused, run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

STEPS = 2500  # past the first checkpoint, at 2000
SETS = 16 if SANITIZED else 64  # each is drawn of nine sizes for the fit
SMALL = ["--batch", 4, "--items", "5..6"]  # steps of about 0.2 ms
RULES = ["softmax", "paper", "fixed", "log_length", "target_entropy", "target_peak", "refit", "hard"]


def train(folder, *options, steps=STEPS):
    result = run("train", folder, "--steps", steps, *SMALL, *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def content(folder):
    """A run's files by name, as hashes."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names(folder)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "run"
    train(folder)
    return folder


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """A tiny reproduction: two heads, two sizes."""
    folder = tmp_path_factory.mktemp("lab") / "reproduction"
    result = run("reproduce", folder, "--seeds", 2, "--steps", 300, "--sizes", "16,64", "--sets", SETS, "--batch", 16)
    assert result.returncode == 0, result.stderr
    return folder, result


# ---- runs that last


def test_a_run_is_three_files_that_others_can_read(trained):
    assert names(trained) == ["checkpoint.safetensors", "config.json", "metrics.jsonl"]
    tensors = load_file(trained / "checkpoint.safetensors")
    assert tensors["item1.kernel"].shape == (11, 128) and tensors["output.bias"].shape == (10,)
    weights = [t for name, t in tensors.items() if not name.startswith("adam.")]
    assert sum(t.size for t in weights) == 118666 and all(t.dtype == np.float32 for t in weights)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(500, STEPS + 1, 500))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert json.loads((trained / "config.json").read_text())["recipe"]["steps"] == STEPS


def test_killed_at_any_moment_a_run_ends_in_the_same_bits(trained, tmp_path):
    """kill -9 again and again, before the first checkpoint and after it; the same command resumes."""
    folder, generator = tmp_path / "run", random.Random(1)
    command = list(map(str, [WHET, "train", folder, "--steps", STEPS, *SMALL]))

    def started():
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(process):
        process.kill()
        process.wait()

    for _ in range(3):
        process = started()
        time.sleep(generator.uniform(0, 0.2))
        kill(process)
    process = started()
    while not (folder / "checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.001)
    kill(process)
    for _ in range(3):
        process = started()
        time.sleep(generator.uniform(0, 0.1))
        kill(process)
    (folder / ".whet-999999999-0.tmp").write_text("half")  # as a kill -9 inside a write leaves it
    assert run(*command[1:]).returncode == 0
    assert content(folder) == content(trained)


def test_ctrl_c_leaves_a_resumable_run(trained, tmp_path):
    folder = tmp_path / "run"
    # A program started in the background may inherit SIGINT ignored, and whet would leave it so.
    process = subprocess.Popen(list(map(str, [WHET, "train", folder, "--steps", STEPS, *SMALL])), stderr=subprocess.DEVNULL,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not (folder / "checkpoint.safetensors").exists():
        time.sleep(0.001)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    assert not list(folder.glob(".whet-*"))
    train(folder)
    assert content(folder) == content(trained)


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "empty"])
def test_a_damaged_checkpoint_is_refused_by_name(trained, tmp_path, damage):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    path = folder / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "foreign":
        save_file({"weight": np.zeros(3, np.float32)}, path)
    else:
        path.write_bytes(b"")
    before = content(folder)
    for command in (["train", folder, "--steps", STEPS, *SMALL], ["eval", folder]):
        assert "checkpoint.safetensors" in refused_after_progress(1, *command)
    assert content(folder) == before


DEEP = "[" * 200_000


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_deeply_nested_json_is_refused_by_name(trained, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / name).write_text(DEEP)
    for command in (["train", folder, "--steps", STEPS, *SMALL], ["eval", folder], ["horizon", folder]):
        line = refused_after_progress(1, *command)
        assert f"{name}: " in line and "is nested deeper than the 32 levels that whet reads" in line


def test_the_rule_of_a_run_names_no_file(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    os.mkfifo(tmp_path / "fifo")
    config = json.loads((folder / "config.json").read_text())
    config["recipe"]["rule"] = f"polynomial:{tmp_path / 'fifo'}"
    (folder / "config.json").write_text(json.dumps(config))
    for command in ("eval", "horizon", "fit"):
        assert f"config.json: rule: 'polynomial:{tmp_path}/fifo' names a file" in refused_after_progress(1, command, folder)


def refused_after_progress(code, *arguments):
    """Like refused(), where progress may stand before the error."""
    result = run(*arguments)
    assert result.returncode == code and result.stdout == "", result.stderr
    return result.stderr.splitlines()[-1]


def test_another_recipe_in_the_same_folder_is_refused(trained):
    before = content(trained)
    assert f"steps is {STEPS} there and 5000 here" in refused_after_progress(2, "train", trained, "--steps", 5000, *SMALL)
    assert content(trained) == before


def test_a_full_disk_leaves_the_last_good_state(trained, tmp_path):
    before = content(trained)
    limit = 100_000  # bytes a file may have: less than a checkpoint

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = run("train", tmp_path / "new", "--steps", STEPS, *SMALL, preexec_fn=small_files)
    assert result.returncode == 1
    assert "checkpoint.safetensors: cannot write it: File too large" in result.stderr.splitlines()[-1]
    train(tmp_path / "new")
    assert content(tmp_path / "new") == before


def test_a_wrong_folder_costs_no_training(here):
    """Every folder is looked at before the first step."""
    assert run("reproduce", "x", "--seeds", 1, "--steps", 20, "--sizes", 16, "--sets", 4, *SMALL).returncode == 0
    assert "steps is 20 there and 30 here" in refused_after_progress(2, "reproduce", "x", "--seeds", 3, "--steps", 30, *SMALL)
    assert not (here / "x/seed-1").exists() or "checkpoint.safetensors" not in names(here / "x/seed-1")


def test_weights_that_no_training_leaves_are_refused(trained, tmp_path):
    """Saved again by others: without a checksum, or with one but not finite."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    path = folder / "checkpoint.safetensors"
    with safe_open(path, "np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    save_file(tensors, path, {k: v for k, v in metadata.items() if not k.startswith("whet.")})
    assert "has no checksum" in refused_after_progress(1, "eval", folder)
    tensors["k.kernel"][3, 3] = np.nan
    save_file(tensors, path, metadata)
    assert "altered or damaged" in refused_after_progress(1, "eval", folder)


# ---- results


def test_results_hold_together(reproduced):
    folder, result = reproduced
    assert names(folder) == ["report.html", "results.json", "seed-0", "seed-1", "tables.csv", "tables.md"]
    results = json.loads((folder / "results.json").read_text())
    assert results["schema"] == "whet results" and results["version"] == 1 and results["kind"] == "reproduction"
    assert results["provenance"]["command"].startswith("whet reproduce ") and results["provenance"]["whet"] == "0.1.0"
    assert [m["seed"] for m in results["models"]] == [0, 1]
    for size, items in zip(results["summary"], [16, 64], strict=True):
        assert size["items"] == items and size["sets"] == SETS
        assert list(size["rules"]) == RULES
        index = [16, 64].index(items)
        for rule, entry in size["rules"].items():
            accuracies = [m["sizes"][index]["rules"][rule]["accuracy"] for m in results["models"]]
            assert entry["accuracy"] == pytest.approx(np.mean(accuracies))
            assert entry["deviation"] == pytest.approx(np.std(accuracies, ddof=1))
    for model in results["models"]:
        for size in model["sizes"]:
            rules = size["rules"]
            assert rules["fixed"]["beta"] == pytest.approx(2, abs=1e-6) and rules["fixed"]["sharpened"] == 1
            assert rules["softmax"]["entropy"] == pytest.approx(size["entropy"], rel=1e-6)
            assert rules["paper"]["entropy"] <= size["entropy"] + 1e-9
            assert size["largest_weight"] <= size["weight_bound"] * (1 + 1e-6)
            assert size["weight_bound"] <= size["paper_bound"] * (1 + 1e-9)
            target = float(model["rules"]["target_entropy"].split(":")[1])
            assert rules["target_entropy"]["entropy"] <= target + 1e-5
    heat = results["heat_map"]
    assert [f["items"] for f in heat["frames"]] == [16, 64]
    assert np.shape(heat["frames"][0]["rules"]["paper"]) == (32, 16)
    assert np.allclose(np.sum(heat["frames"][0]["rules"]["softmax"], axis=1), 1, atol=2e-3)  # 16 of 16 items, rounded
    assert result.stdout == (folder / "tables.md").read_text()


def test_the_csv_says_what_the_json_says(reproduced):
    folder, _ = reproduced
    lines = (folder / "tables.csv").read_text().splitlines()
    assert lines[0] == "seed,items,sets,rule,accuracy,beta,sharpened,entropy,peak"
    assert len(lines) == 1 + 2 * 2 * len(RULES)
    results = json.loads((folder / "results.json").read_text())
    first = results["models"][0]["sizes"][0]["rules"]["softmax"]
    assert lines[1] == f'0,16,{SETS},"softmax",{",".join(json.dumps(first[f]) for f in lines[0].split(",")[4:])}'


def test_threads_change_nothing_and_a_second_run_is_the_first(reproduced, tmp_path):
    folder, result = reproduced
    again = run("reproduce", folder, "--seeds", 2, "--steps", 300, "--sizes", "16,64", "--sets", SETS, "--batch", 16)
    assert again.stdout == result.stdout
    other = run("reproduce", tmp_path / "other", "--seeds", 2, "--steps", 300, "--sizes", "16,64", "--sets", SETS,
                "--batch", 16, "--threads", 3)
    assert other.stdout == result.stdout
    assert content(tmp_path / "other/seed-1") == content(folder / "seed-1")


def test_results_of_a_head_are_cached_and_never_trusted(tmp_path):
    folder = tmp_path / "run"
    command = ["reproduce", folder, "--seeds", 2, "--steps", 20, "--batch", 4, "--sizes", 16, "--no-calibration", "--sets"]
    tables = run(*command, 4).stdout
    cache = folder / "seed-1/evaluation.json"
    text, stamp = cache.read_text(), cache.stat().st_mtime_ns
    assert tables and run(*command, 4).stdout == tables and cache.stat().st_mtime_ns == stamp  # not evaluated again
    accuracy = re.search(r'"accuracy":(\d[.\d]*)', text)
    for damaged in (text[:-20], "[]", DEEP, text[:accuracy.start(1)] + "0.125" + text[accuracy.end(1):], text + " " * (65 << 20)):
        cache.write_text(damaged)
        assert run(*command, 4).stdout == tables
        assert cache.read_text() == text
    assert run(*command, 5).returncode == 0 and cache.read_text() != text  # under another key


def test_eval_of_one_head_knows_no_deviation(trained, here):
    result = run("eval", trained, "--sizes", "16,300", "--sets", 8, "--no-calibration", "--json", "--with", "fixed:7")
    assert result.returncode == 0
    results = json.loads(result.stdout)  # NaN would not be JSON
    rules = results["summary"][1]["rules"]
    assert rules["softmax"]["deviation"] is None and rules["paper"]["against_softmax"]["p"] is None
    assert "fixed:7" in rules and "calibrated" not in results["models"][0]
    assert names(here) == []


def test_sets_can_be_saved_for_other_programs(trained, here):
    result = run("eval", trained, "--sizes", "16,300", "--sets", 8, "--no-calibration", "--save-sets", "sets.safetensors")
    assert result.returncode == 0, result.stderr
    tensors = load_file("sets.safetensors")
    assert len(tensors) == 8
    for n in (16, 300):
        priorities, classes, queries, targets = (tensors[f"{n}.{part}"]
                                                 for part in ("priorities", "classes", "queries", "targets"))
        assert priorities.shape == classes.shape == (8, n) and queries.shape == targets.shape == (8,)
        assert ((0 < priorities) & (priorities <= 1)).all()
        assert np.array_equal(classes[np.arange(8), priorities.argmax(1)], targets)


def test_lines_of_output_and_progress_stay_whole(trained, here):
    """Both into one file, as `make` has them: tables are longer than a buffer, and progress follows them."""
    with open("all.txt", "w") as file:
        subprocess.run([WHET, "eval", trained, "--sizes", ",".join(map(str, range(16, 116))), "--sets", "1", "--out", "out"],
                       stdout=file, stderr=file, check=True)
    tables = (here / "out/tables.md").read_text()
    assert len(tables) > 2 * 4096
    assert tables + "Written to out: " in (here / "all.txt").read_text()


@pytest.mark.skipif(SANITIZED, reason="takes minutes with sanitizers, of code that other tests reach")
def test_demo_compares_two_recipes_and_is_shown_again(here):
    result = run("demo", "d", "--steps", 50, "--sets", 16)
    assert result.returncode == 0, result.stderr
    assert names("d") == ["paper", "report.html", "sharp"] and names("d/paper") == ["results.json", "seed-0"]
    blank, head, _, *rows = result.stdout.splitlines()
    assert blank == "" and [cell.strip() for cell in head.split("|")[2:-1]] == ["16 items", "256", "4096", "16384"]
    for row, (recipe, rule) in zip(rows, [(r, n) for r in ("paper", "sharp") for n in ("softmax", "paper", "target_entropy")]):
        summary = json.loads((here / "d" / recipe / "results.json").read_text())["summary"]
        expected = [100 * size["rules"][rule]["accuracy"] for size in summary if size["items"] in (16, 256, 4096, 16384)]
        assert [float(cell) for cell in row.split("|")[2:-1]] == pytest.approx(expected, abs=0.051)
        assert row.split("|")[1].strip().startswith(f"{recipe} head, ")
    assert result.stdout.splitlines()[-1] == "Open d/report.html in a browser."
    page = (here / "d/report.html").read_text()
    assert '"comparison":[{' in page and '"name":"sharp"' in page
    assert ok("report", "d/paper", "d/sharp", "--out", "same.html") and (here / "same.html").read_text() == page
    again = run("demo", "d", "--steps", 50, "--sets", 16)
    assert again.stdout == result.stdout and "d was finished before" in again.stderr
    assert "steps is 50 there and 60 here" in refused_after_progress(2, "demo", "d", "--steps", 60)
    assert run("demo", "d\udcff", "--steps", 1, "--sets", 1, errors="replace").returncode == 0  # a name that is not UTF-8


def test_a_head_that_leaves_nothing_to_fit_has_its_fit_left_out(here):
    """Steps so large that every row has one weight of 1, and an entropy of 0."""
    result = run("reproduce", "x", "--seeds", 1, "--steps", 10, "--rate", 1, "--l2-form", "none", "--sizes", 16, "--sets", 16,
                 "--batch", 4)
    assert result.returncode == 0, result.stderr
    (model,) = json.loads((here / "x/results.json").read_text())["models"]
    assert "fit" not in model and model["sizes"][0]["entropy"] == 0
    assert refused(2, "fit", "x/seed-0", "--sets", 16).endswith(
        "points: have entropies from 0.000000 to 0.000000, a polynomial of degree 4 needs at least 5 different ones\n")


def test_names_that_are_no_utf8_are_shown_escaped(trained, here):
    name = os.fsdecode(b"bad\xff")
    (here / name).write_text("polynomial:1,2\n")
    small = ["--sizes", 16, "--sets", 4, "--no-calibration"]
    result = run("reproduce", f"{name} x", "--seeds", 1, "--steps", 3, *SMALL, *small, "--with", f"polynomial:{name}")
    assert result.returncode == 0, result.stderr
    assert "| polynomial:bad\\xff |" in result.stdout and "Written to bad\\xff x: " in result.stderr
    results = json.loads((here / f"{name} x/results.json").read_text())
    assert "polynomial:bad\\xff" in results["summary"][0]["rules"]
    command = results["provenance"]["command"]
    assert command.startswith("whet reproduce $'bad\\xff x' ") and command.endswith("$'polynomial:bad\\xff'")
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, check=True).stdout
    assert words.split(b"\n")[2] == b"bad\xff x"
    shutil.copytree(trained, name + "run")
    assert json.loads(ok("horizon", name + "run", "--json", "--sizes", 16, "--sets", 4))["run"] == "bad\\xffrun"
    assert ok("horizon", name + "run", "--sizes", 16, "--sets", 4).startswith("bad\\xffrun, 4 sets")


def test_lines_of_both_outputs_stay_whole(here):
    """JSON of one line that is longer than any buffer, and what is said on standard error, into one pipe and one terminal."""
    command = ["reproduce", "x", "--seeds", 1, "--steps", 3, *SMALL, "--sizes", "16,64", "--sets", 4, "--json"]

    def read(output):
        process = subprocess.Popen(list(map(str, [WHET, *command])), stdout=output[1], stderr=output[1])
        os.close(output[1])
        text = b""
        while True:
            try:
                block = os.read(output[0], 65536)
            except OSError:  # how a terminal ends
                block = b""
            if not block:
                break
            text += block
        os.close(output[0])
        assert process.wait() == 0
        # What a bar is replaced by stands behind the code that erases it.
        return [line.rstrip("\r").split("\r\x1b[K")[-1] for line in text.decode().removesuffix("\n").split("\n")]

    for output in (os.pipe(), pty.openpty()):
        lines = read(output)
        assert len([line for line in lines if line.startswith("{") and json.loads(line)]) == 1
        others = [line for line in lines if not line.startswith("{")]
        assert others[-2:] == ["Written to x: results.json, tables.md, tables.csv", "Open x/report.html in a browser."]
        assert all(re.match(r"(training|evaluating): \d+/\d+", line) for line in others[:-2]), others


def test_precision_of_the_arithmetic_is_a_choice(trained):
    def entropies(precision):
        out = run("eval", trained, "--sizes", "64", "--sets", 8, "--no-calibration", "--json", "--precision", precision)
        return [m["sizes"][0]["entropy"] for m in json.loads(out.stdout)["models"]]

    assert entropies("f32") == pytest.approx(entropies("f64"), rel=1e-4)
    assert entropies("f32") != entropies("f64")


# ---- fit, calibrate


def test_a_fitted_rule_loads_everywhere(trained, here):
    result = run("fit", trained, "--out", "my.rule", "--sizes", "16,64,256", "--sets", 128)
    assert result.returncode == 0, result.stderr
    name = result.stdout.splitlines()[-2]
    assert name.startswith("polynomial:") and ":hold=" in name
    np.save("x.npy", np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32))
    ok("softmax", "x.npy", "a.npy", "--rule", "polynomial:my.rule")
    ok("softmax", "x.npy", "b.npy", "--rule", name)
    assert np.array_equal(np.load("a.npy"), np.load("b.npy"))


@pytest.mark.parametrize("method", ["classes", "pairs"])
def test_calibration_makes_a_head_of_finer_resolution(trained, here, method):
    before = content(trained)
    result = run("calibrate", trained, "edited", "--method", method)
    assert result.returncode == 0, result.stderr
    assert content(trained) == before and names("edited") == ["checkpoint.safetensors", "config.json", "metrics.jsonl"]
    old, new = load_file(trained / "checkpoint.safetensors"), load_file("edited/checkpoint.safetensors")
    assert [n for n in new if not np.array_equal(new[n], old[n])] == ["k.kernel"]
    assert json.loads(open("edited/config.json").read())["edit"].startswith("K made blind to")
    if method == "classes":
        resolution = float(result.stdout.split("resolution ")[1].split()[0])
        assert resolution > 100 * float(result.stdout.split("was ")[1])
    assert "edited" in refused(2, "calibrate", trained, "edited")
    assert "edited after training" in refused_after_progress(2, "train", "edited", "--steps", STEPS, *SMALL)


# ---- other heads


def ok_after_progress(*arguments):
    """Like ok(), where progress stands on standard error."""
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("options, trained_as", [
    (["--normalizer", "entmax15", "--rule", "ssmax:0.43"], "entmax15 with ssmax:0.43"),
    (["--normalizer", "sigmoid"], "sigmoid"),
    (["--normalizer", "straight-through", "--heads", 2, "--activation", "step"], "straight-through"),
])
def test_a_head_is_evaluated_as_it_was_trained(here, options, trained_as):
    train("run", *options, steps=60)
    recipe = json.loads((here / "run/config.json").read_text())["recipe"]
    given = dict(zip([name.removeprefix("--") for name in options[::2]], options[1::2]))
    assert {name: recipe[name] for name in given} == given
    model = json.loads(ok_after_progress("eval", "run", "--sizes", "6,64", "--sets", 8, "--no-calibration", "--json"))["models"][0]
    assert model["rules"]["softmax"] == "none" and model["rules"]["trained"] == trained_as and model["rules"]["hard"] == "hard"
    for size in model["sizes"]:
        assert list(size["rules"])[:2] == ["softmax", "trained"] and 0 <= size["ranked"] <= 1
        if trained_as == "straight-through":
            assert size["rules"]["trained"]["accuracy"] == size["rules"]["hard"]["accuracy"]


def test_an_old_run_reads_as_it_was(trained, tmp_path):
    """A config.json from before there was a choice of normalizer, activation and heads."""
    old = tmp_path / "run"
    shutil.copytree(trained, old)
    config = json.loads((old / "config.json").read_text())
    for name in ("normalizer", "activation", "heads"):
        del config["recipe"][name]
    (old / "config.json").write_text(json.dumps(config))
    train(old)
    assert "another recipe (heads is 1 there and 2 here)" in refused_after_progress(2, "train", old, "--steps", STEPS, *SMALL, "--heads", 2)


def test_a_head_that_does_not_learn_says_so(here):
    options = ["--seeds", 1, "--sizes", "16", "--sets", 8, "--no-calibration", *SMALL]
    tables = ok_after_progress("reproduce", "relu", "--normalizer", "relu", "--steps", 200, *options)
    assert re.search(r"^- Seed 0 did not learn: accuracy \d+\.\d % on sets of 6 items, the largest of training\.$", tables, re.M)
    assert "did_not_learn" in json.loads((here / "relu/results.json").read_text())["models"][0]


def test_a_diverged_run_does_not_end_the_others(here):
    options = ["--rate", 1, "--normalizer", "relu", "--rule", "fixed:1e18", "--l2-form", "none", "--steps", 300, *SMALL]
    assert "the loss is no longer finite at step" in refused_after_progress(1, "train", "run", *options)
    tables = ok_after_progress("reproduce", "runs", "--seeds", 2, "--sizes", "16", "--sets", 8, "--no-calibration", *options)
    assert len(re.findall(r"^- Seed [01] did not learn: loss no longer finite at step \d+, weights are those of step \d+\.$", tables, re.M)) == 2


# ---- wrong use


@pytest.mark.parametrize("options, saying", [
    (["--steps", 0], "steps: is 0"),
    (["--items", "9..5"], "items: is 9 to 5"),
    (["--items", "a..b"], "--items: is 'a..b'"),
    (["--l2-form", "quarter"], "l2-form: is 'quarter', must be one of none, sum, half, decoupled"),
    (["--schedule", "step"], "schedule: is 'step'"),
    (["--recipe", "best"], "recipe: is 'best', must be paper or sharp"),
    (["--rule", "sharp"], "sharp"),
    (["--zoom", "9"], "zoom: is 9"),
    (["--rate", "0"], "rate: is 0"),
    (["--normalizer", "hard"], "normalizer: is hard, must be one that has a gradient"),
    (["--normalizer", "argmax"], "'argmax' is not a normalizer"),
    (["--activation", "relu"], "activation: is 'relu', must be one of gelu, step"),
    (["--heads", "3"], "heads: is 3, must be 1 or 2"),
])
def test_a_wrong_recipe_is_named_and_nothing_is_written(here, options, saying):
    refused(2, "train", "run", *options, saying=saying)
    refused(2, "reproduce", "run", *options, saying=saying)
    assert names(here) == []


def test_wrong_runs_and_sizes_are_named(trained, here):
    refused(1, "eval", "nowhere", saying="nowhere: is not a run")
    refused(2, "eval", trained, "--sizes", "0", saying="sizes: has 0")
    refused(2, "eval", trained, trained, saying="RUN: has the same head twice")
    os.symlink(trained, "link")
    shutil.copytree(trained, "copy")
    for other in (f"{trained}/.", "link", "copy"):
        for command in ("eval", "fit"):
            refused(2, command, trained, other, saying=f"the same head twice, as {trained} and as {other}; name each once")
    os.remove("link")
    shutil.rmtree("copy")
    before = content(trained)
    for name in ("config.json", "checkpoint.safetensors", "metrics.jsonl", "evaluation.json"):
        own = trained / name
        refused(2, "fit", trained, "--out", own, saying=f"--out: {own} is a file of the run itself; name another file")
        refused(2, "eval", trained, "--sets", 2, "--save-sets", own, saying=f"--save-sets: {own} is a file of the run itself")
        refused(2, "bench", "train", "--quick", "--run", trained, "--keep", own, saying=f"--keep: {own} is a file of the run itself")
    assert content(trained) == before
    refused(2, "fit", trained, "--sizes", "0", saying="sizes: has 0")
    refused(2, "fit", trained, "--sets=-1", saying="sets: is -1")
    refused(2, "fit", trained, "--sizes", "16", "--sets", "2", saying="misranks only")
    refused(1, "eval", trained, "--sets", "8", "--out", "/proc/nope", saying="/proc/nope: cannot make the folder")
    refused(2, "train", "x", "--seed=-1", saying="--seed")
    refused(2, "eval", trained, "--precision", "f16", saying="--precision: is 'f16'")
    refused(2, "eval", trained, "--with", "paper:3", saying="paper")
    refused(1, "fit", "nowhere", saying="nowhere: is not a run")
    refused(2, "fit", trained, "--degree", "9", saying="degree")
    refused(2, "calibrate", trained, "out", "--method", "magic", saying="--method: is 'magic'")
    refused(2, "reproduce", "x", "--seeds", "0", saying="seeds: is 0")
    assert names(here) == []


def test_help_teaches():
    for command in ["reproduce", "train", "eval", "fit", "calibrate"]:
        text = ok(command, "--help")
        assert "Example" in text and f"whet {command}" in text


def test_bench_train_runs(here):
    report = json.loads(ok("bench", "train", "--quick", "--json", "--keep", "steps.safetensors"))
    assert report["steps_per_second"] > 0 and report["evaluation"][0]["sets_per_second"] > 0
    tensors = load_file("steps.safetensors")
    assert tensors["losses"].shape == (100,) and tensors["batches.targets"].shape == (12800,)
