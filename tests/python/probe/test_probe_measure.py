"""Statistics of a tiny model against its eager attention in float64; probes that are interrupted."""

import json

import numpy as np
import pytest
import torch
from tiny_models import HEADS, LAYERS, make_model, make_tokenizer
from whet.probe.analysis import STATISTICS
from whet.probe.errors import ProbeError
from whet.probe.losses import recalled, rules_of
from whet.probe.measure import Plan, Store, config_of, measure, statistics_of
from whet.probe.models import Loaded
from whet.probe.prompts import Prompts
from whet.transformers import collect, enable

PAPER = [-0.037, 0.481, -2.3, 4.917, -1.791]
SHAPE = LAYERS, HEADS


def eager_weights(tokens):
    """(layers, heads, queries, keys) of the unchanged model, in float64."""
    model = make_model().to(torch.float64)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.stack([a[0] for a in model(torch.tensor([tokens]), output_attentions=True).attentions]).numpy()


def entropies(weights):
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


@pytest.mark.parametrize("rows", ["last", "all"])
def test_against_eager_attention(loaded, rows):
    prompt = Prompts("max", loaded.tokenizer).draw(120, 0)
    found = statistics_of(loaded, prompt, Plan([120], 1, "paper", rows))
    weights = eager_weights(prompt.tokens)
    # The last query sees all keys; query i of all sees i + 1.
    weights = weights[:, :, -1:] if rows == "last" else weights
    count = np.arange(len(prompt.tokens) + 1 - weights.shape[2], len(prompt.tokens) + 1)
    entropy = entropies(weights)
    beta = np.where(entropy > 0.5, np.maximum(1, np.polyval(PAPER, entropy)), 1)
    powers = weights ** beta[..., None]
    sharp = powers / powers.sum(-1, keepdims=True)
    expected = {"entropy": entropy, "relative_entropy": entropy / np.log(np.maximum(count, 2)), "peak": weights.max(-1),
                "first": weights[..., 0], "beta": beta, "sharp_entropy": entropies(sharp), "sharp_peak": sharp.max(-1)}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.mean(-1), atol=3e-5, err_msg=name)
    assert found["spread"].shape == SHAPE and (found["spread"] > 0).all()


@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.5", "log-length:16"])
def test_a_rule_that_is_not_applied(rule):
    """collect(rule=...): in the first layer, whose input no rule changes, as if it were applied; logits as without."""
    model, tokens = make_model(), torch.randint(0, 60, (2, 40))
    with torch.no_grad():
        with enable(model):
            plain = model(tokens).logits
        with collect(model, rule=rule) as stats:
            logits = model(tokens).logits
        with collect(model, rows=-1, rule=rule) as last:
            model(tokens)
        with enable(model, rule=rule), collect(model) as applied:
            model(tokens)
    assert torch.equal(logits, plain)
    for name in ("beta", "sharp_entropy", "sharp_peak", "entropy"):
        np.testing.assert_allclose(getattr(stats, name)[0], getattr(applied, name)[0], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(getattr(last, name), getattr(stats, name)[..., -1:], rtol=1e-4, atol=1e-6)
    assert (stats.beta > 1.01).any()


def test_a_rule_that_is_not_applied_under_a_mask():
    model, tokens = make_model(), torch.randint(0, 60, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    with torch.no_grad():
        with collect(model, rows=-1, rule="paper") as last:
            model(tokens, attention_mask=mask)
        with enable(model, rule="paper"), collect(model, rows=-1) as applied:
            model(tokens, attention_mask=mask)
    np.testing.assert_allclose(last.beta[0], applied.beta[0], rtol=1e-5)
    assert last.count[0, 0, 0, 0] == 33


def probe(loaded, folder, progress=lambda *_: None, **changes):
    plan = Plan([80, 128], 2, changes.pop("rule", "paper"), "last")
    prompts = Prompts("max", loaded.tokenizer, changes.pop("seed", 0))
    config = {**config_of(loaded, prompts, plan, "float32", None), **changes}
    return measure(loaded, prompts, plan, Store(folder, config, SHAPE), progress)


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a[:2] == b[:2]
        assert all(np.array_equal(a.statistics[name], b.statistics[name]) for name in STATISTICS)


def test_an_interrupted_probe_goes_on(loaded, tmp_path, monkeypatch):
    whole = probe(loaded, tmp_path / "whole")

    def stop(done, all, sample):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(loaded, tmp_path / "part", stop)
    files = sorted(path.name for path in (tmp_path / "part/prompts").iterdir())
    assert files == ["128-0.json", "80-0.json", "80-1.json"]
    ran = []
    forward = type(loaded.model).forward
    monkeypatch.setattr(type(loaded.model), "forward", lambda *a, **k: ran.append(1) or forward(*a, **k))
    assert_same(probe(loaded, tmp_path / "part"), whole)
    assert len(ran) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"tokens": 3}', '{"tokens": 64, "statistics": {"entropy": [[1]]}}'])
def test_a_damaged_piece_is_measured_again(loaded, tmp_path, damage):
    whole = probe(loaded, tmp_path)
    path = tmp_path / "prompts/80-1.json"
    before = path.read_bytes()
    path.write_text(damage)
    assert_same(probe(loaded, tmp_path), whole)
    assert path.read_bytes() == before


@pytest.mark.parametrize("change, saying", [({"seed": 1}, "seed is 0 where this one has 1"),
                                            ({"rule": "none"}, "rule is 'paper' where this one has 'none'"),
                                            ({"weights": "other"}, "weights is"), ({"model": "b"}, "model is 'tiny'"),
                                            ({"tokenizer": "other"}, "tokenizer is")])
def test_another_config_is_refused_by_name(loaded, tmp_path, change, saying):
    probe(loaded, tmp_path)
    with pytest.raises(ProbeError, match=saying):
        probe(loaded, tmp_path, **change)
    assert json.loads((tmp_path / "probe.json").read_text())["seed"] == 0


def test_a_config_edited_beside_the_same_weights(loaded, tmp_path):
    probe(loaded, tmp_path)
    edited = make_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    other = Loaded("tiny", edited, loaded.tokenizer)
    assert other.fingerprint() == loaded.fingerprint()
    with pytest.raises(ProbeError, match="holds a probe whose config is"):
        probe(other, tmp_path)


def test_weights_that_are_not_numbers(loaded):
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 3] = torch.nan
    prompt = Prompts("max", loaded.tokenizer).draw(90, 0)
    with pytest.raises(ProbeError, match="broken: layer 1 gives NaN with 9. tokens; its weights aren't all numbers"):
        statistics_of(Loaded("broken", model, loaded.tokenizer), prompt, Plan([90], 1, "paper", "last"))


def test_a_model_without_attention_of_its_users(loaded, tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=80, state_size=4)
    config.num_attention_heads = 2
    model = Loaded("mamba", MambaForCausalLM(config).eval(), make_tokenizer())
    prompt = Prompts("max", loaded.tokenizer).draw(90, 0)
    with pytest.raises(ProbeError, match="mamba: its attention can't be probed") as error:
        statistics_of(model, prompt, Plan([90], 1, "paper", "last"))
    assert "\n" not in str(error.value)


def test_a_model_with_attention_in_some_layers(loaded):
    model = Loaded("mixed", make_model(), make_tokenizer())
    model.model.config.num_hidden_layers = 3
    with pytest.raises(ProbeError, match="has attention in 2 of its 3 layers"):
        statistics_of(model, Prompts("max", loaded.tokenizer).draw(90, 0), Plan([90], 1, "paper", "last"))


def test_positions_that_a_model_does_not_have(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=100, vocab_size=80)
    model = Loaded("gpt2", GPT2LMHeadModel(config).eval(), make_tokenizer())
    with pytest.raises(ProbeError, match="has positions for 100 tokens where a length of 128 is asked for"):
        probe(model, tmp_path)
    for kind in ("max", "needle"):  # as long as its table of positions allows, the answer's tokens included
        model = Loaded("gpt2", GPT2LMHeadModel(GPT2Config(**{**config.to_dict(), "n_positions": 200})).eval(), make_tokenizer())
        prompts = Prompts(kind, model.tokenizer, most=model.most_tokens)
        for index in range(8):
            prompt = prompts.draw(200, index)
            statistics_of(model, prompt, Plan([200], 1, "paper", "last"))
            assert len(prompt.tokens) + max(0, len(prompt.answer) - 1) <= 200
        recalled(model, [prompt], rules_of(model))


def test_a_folder_of_other_results(tmp_path):
    (tmp_path / "results.json").write_text('{"kind": "reproduction"}')
    with pytest.raises(ProbeError, match="holds results of another kind"):
        Store(tmp_path, {}, (1, 1))
    assert not (tmp_path / "probe.json").exists()


def test_a_folder_whose_config_is_lost(tmp_path):
    Store(tmp_path, {"seed": 0}, (1, 1))
    (tmp_path / "prompts/64-0.json").write_text("{}")
    (tmp_path / "probe.json").unlink()
    with pytest.raises(ProbeError, match=r"probe.json is lost"):
        Store(tmp_path, {"seed": 1}, (1, 1))
