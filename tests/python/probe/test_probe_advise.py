"""Losses, slopes, advice and tuning on a tiny model, against torch and finite differences; verdicts on made-up outcomes."""

import json

import numpy as np
import pytest
import torch
from tiny_models import HEADS, LAYERS, make_model
from whet.probe import losses, tune
from whet.probe.advise import Advice, Outcome, advise, clearly, settings, table
from whet.probe.errors import ProbeError
from whet.probe.prompts import Prompts, pieces, read_text
from whet.transformers import enable, read_rules


@pytest.fixture(scope="module")
def cut(loaded, text):
    return pieces(loaded.tokenizer, read_text(text), 100, 4)


def heads(kind="dispersing"):
    return [{"layer": layer, "head": head, "class": kind if head == 0 else "sharp"}
            for layer, head in np.ndindex(LAYERS, HEADS)]


SHORTEST = {"tokens": 64.0, "statistics": {"entropy": {"mean": np.full((LAYERS, HEADS), 1.5)}}}


def test_losses_against_eager_attention(loaded, cut):
    model = make_model().to(torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = [float(model(torch.tensor([piece]), labels=torch.tensor([piece])).loss) for piece in cut]
    found = losses.text_losses(loaded, cut, losses.rules_of(loaded))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_slopes_against_finite_differences(loaded, cut):
    slope = losses.slopes(loaded, cut[:1])[0]
    for layer, head in [(0, 0), (0, 3), (1, 2)]:
        sides = []
        for step in (-0.02, 0.02):
            rules = losses.rules_of(loaded)
            rules[layer, head] = f"fixed:{1 + step}"
            sides.append(losses.text_losses(loaded, cut[:1], rules)[0])
        assert slope[layer, head] == pytest.approx((sides[1] - sides[0]) / 0.04, abs=2e-4)
    assert not any(parameter.grad is not None for parameter in loaded.model.parameters())


def test_recall(loaded):
    prompts = [Prompts("needle", loaded.tokenizer).draw(300, i) for i in range(4)]
    assert 0 <= losses.recalled(loaded, prompts, losses.rules_of(loaded)) <= 1  # random weights know nothing
    model = make_model().eval()
    with torch.no_grad():  # what is most likely, taken for the answer
        prompt = prompts[0]
        tokens = list(prompt.tokens)
        for _ in range(3):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    right = prompt._replace(answer=tokens[-3:])
    wrong = prompt._replace(answer=[*tokens[-3:-1], (tokens[-1] + 1) % 70])
    assert losses.recalled(loaded, [right, wrong], losses.rules_of(loaded)) == 1


def test_settings(loaded):
    slope = np.random.default_rng(0).normal(size=(4, LAYERS, HEADS)) * 0.01
    slope[:, 1, 1] -= 1
    slope[:, 0, 2] += 1
    named = {setting.name: setting.rules for setting in settings(loaded, heads(), SHORTEST, slope)}
    assert (named["none"] == "none").all() and (named["paper in all heads"] == "paper").all()
    assert (named["paper in 2 dispersing heads"][:, 0] == "paper").all()
    assert np.count_nonzero(named["paper in 2 dispersing heads"] == "paper") == 2
    assert (named["log-length:64"] == "log-length:64").all()
    assert (named["target-entropy as at 64 tokens"] == "target-entropy:1.5").all()
    by_slope = next(rules for name, rules in named.items() if name.endswith("by slope"))
    assert by_slope[1, 1] == "paper" and by_slope[0, 2] == "none"
    thirds = [rules == "paper" for name, rules in named.items() if name.startswith("paper in layers")]
    assert np.array_equal(sum(third.astype(int) for third in thirds), np.ones((LAYERS, HEADS)))
    assert not any("dispersing" in s.name for s in settings(loaded, heads("sink"), SHORTEST, slope))


def test_signs_that_are_clear():
    slope = np.array([[-1.0, -1.0, 1.0], [-1.1, 0.5, 1.1], [-0.9, -1.0, 0.9]])[:, None]
    assert clearly(slope, -1).tolist() == [[True, False, False]]
    assert clearly(slope, 1).tolist() == [[False, False, True]]


def test_advice(loaded, text):
    said = []
    advice = advise(loaded, read_text(text), heads(), SHORTEST, progress=said.append)
    found = advice.results()
    names = [entry["name"] for entry in found["settings"]]
    assert names[0] == "none" and "paper in all heads" in names and len(names) >= 6
    none, paper = found["settings"][:2]
    assert none["difference"] == none["low"] == none["high"] == 0
    assert paper["low"] <= paper["difference"] <= paper["high"]
    assert np.log(paper["perplexity"] / none["perplexity"]) == pytest.approx(paper["difference"], abs=1e-9)
    assert 0 <= none["needle_low"] <= none["needle"] <= none["needle_high"] <= 1 and none["tokens"] > 500
    assert found["verdict"].endswith(".") and "\n" not in found["verdict"]
    assert found["verdict"] in table(found) and len(said) == 1 + len(names)
    json.dumps(found)


def outcomes(**changes):
    base = np.random.default_rng(0).normal(3, 0.1, size=8)
    noise = np.random.default_rng(1).normal(0, 0.002, size=(len(changes), 8))
    none = [Outcome("none", base, 10)]
    return Advice(none + [Outcome(name, base + change + extra, hits)
                          for (name, (change, hits)), extra in zip(changes.items(), noise)], 12, 1000)


def test_verdicts():
    assert outcomes(a=(0.5, 3), b=(1.2, 0)).verdict().startswith("Don't sharpen this model: none of 2 settings")
    assert "the worst, b, takes perplexity from" in outcomes(a=(0.5, 3), b=(1.2, 0)).verdict()
    assert outcomes(a=(-0.05, 10), b=(1, 0)).verdict().startswith("Sharpen with a: it lowers the loss by 0.0")
    assert outcomes(a=(-0.05, 4), b=(1, 0)).verdict().startswith("Don't sharpen for recall")
    assert outcomes(a=(0.0, 10), b=(0.0, 10)).verdict().startswith("Don't sharpen this model")


def test_a_text_too_short(loaded):
    with pytest.raises(ProbeError, match="has 9 tokens where at least 384 are needed"):
        advise(loaded, "a cat sat", heads(), SHORTEST)


def test_proposals(loaded):
    slope = np.random.default_rng(0).normal(size=(6, LAYERS, HEADS)) * 0.01
    slope[:, 0] -= np.array([1, 2, 3, 4])
    slope[:, 1, 0] += 1
    slope[:, 1, 1:] = np.array([-1, 1] * 3)[:, None]
    proposed = dict(tune.proposals(loaded, slope, ["paper", "fixed:0.9"]))
    assert (proposed["paper in 4 heads"] == [["paper"] * 4, ["none"] * 4]).all()
    assert list(proposed["paper in 1 heads"][0]) == ["none", "none", "none", "paper"]
    assert proposed["fixed:0.9 in 1 heads"][1, 0] == "fixed:0.9"
    both = proposed["paper in 2 heads and fixed:0.9 in 1 heads"]
    assert list(both[0]) == ["none", "none", "paper", "paper"] and both[1, 0] == "fixed:0.9"


def test_tuning_finds_a_head_that_should_be_sharper(loaded, text, tmp_path, capsys, monkeypatch):
    """Losses that one head's rule improves, others worsen."""
    def losses_of(model, cut, rules):
        base = np.array([len(piece) / 100 + sum(piece) / 1e5 for piece in cut])
        return base + sum(-0.01 if at == (1, 2) else 0.02 for at in np.ndindex(rules.shape) if rules[at] != "none")

    def slopes_of(model, cut):
        slope = np.full((len(cut), LAYERS, HEADS), -0.1) + np.random.default_rng(0).normal(size=(len(cut), 1, 1)) * 0.01
        slope[:, 1, 2] = -1
        return slope

    monkeypatch.setattr(tune, "text_losses", losses_of)
    monkeypatch.setattr(tune, "slopes", slopes_of)
    tuned = tune.tune(loaded, read_text(text), ["paper"])
    assert not tuned.kept  # two heads are the fewest it tries, as the quarter of eight: the other costs more
    slopes_two = slopes_of
    monkeypatch.setattr(tune, "slopes", lambda model, cut: np.where(slopes_two(model, cut) < -0.5, -1.0, 1.0)
                        + np.random.default_rng(0).normal(size=(len(cut), 1, 1)) * 0.01)
    tuned = tune.tune(loaded, read_text(text), ["paper"])
    assert tuned.kept and tuned.rules[1, 2] == "paper" and np.count_nonzero(tuned.rules != "none") == 1
    assert tuned.change.mean == pytest.approx(-0.01)
    assert tune.sentence(tuned).startswith("paper in 1 heads changes the loss on held-out text by -0.0100 nats")


@pytest.mark.parametrize("out, saying", [("none/rules.json", "can't be written"), (".", "is a folder"),
                                         ("text.txt/rules.json", "can't be written")])
def test_tune_refuses_an_out_before_it_loads(tiny, text, tmp_path, capsys, monkeypatch, out, saying):
    monkeypatch.setattr(tune.models, "load", lambda *a, **k: pytest.fail("loaded"))
    (tmp_path / "text.txt").write_text("a file, no folder")
    with pytest.raises(SystemExit) as ended:
        tune.main([str(tiny), str(text), "--out", str(tmp_path / out)])
    assert ended.value.code == 1 and saying in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_tune_writes_rules_that_enable_reads(tiny, loaded, text, tmp_path, capsys):
    out = tmp_path / "rules.json"
    tune.main([str(tiny), str(text), "--out", str(out), "--rules", "fixed:1.1+fixed:0.9"])
    printed = capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["kind"] == "rules" and content["model"] == "tiny"
    assert (content["layers"], content["heads"]) == (LAYERS, HEADS)
    assert printed.count("\n") == 1 and ("held-out" in printed or "Nothing helps" in printed)
    assert read_rules(out) == {int(layer): rules for layer, rules in content["rules"].items()}
    with enable(loaded.model, rule=str(out)), torch.no_grad():
        loaded.model(torch.tensor([[1, 2, 3]]))
    if "Nothing helps" in printed:
        assert content["rules"] == {}
