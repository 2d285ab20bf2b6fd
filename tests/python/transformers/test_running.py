"""Models as people run them: caches, generate(), compilers, training."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import whet.transformers
from models import padding, row_by_row, small_model, tokens

DECODERS = ["llama", "gemma2", "gemma3", "gpt2", "gpt_oss", "mistral", "qwen3"]


@pytest.mark.parametrize("rule", [None, "paper"])
@pytest.mark.parametrize("architecture", DECODERS)
def test_a_cache_gives_what_the_whole_gives(architecture, rule):
    model, ids = small_model(architecture).double(), tokens()
    with whet.transformers.enable(model, rule=rule), torch.no_grad():
        whole = model(ids).logits
        step = model(ids[:, :13], use_cache=True)
        parts = [step.logits]
        for start, end in ((13, 14), (14, 18), (18, 19), (19, 24)):  # one token, and several at once
            step = model(ids[:, start:end], past_key_values=step.past_key_values)
            parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss"])
def test_a_static_cache(architecture):
    model, ids = small_model(architecture).double(), tokens()
    with whet.transformers.enable(model, rule="paper"), torch.no_grad():
        whole = model(ids).logits
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        parts = [model(ids[:, :13], past_key_values=cache).logits]
        for i in range(13, 24):
            parts.append(model(ids[:, i:i + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("architecture", DECODERS)
def test_generate_of_a_padded_batch(architecture, cache):
    """Log-probabilities of each new token, against attention row by row over the whole text."""
    model, ids = small_model(architecture).double(), tokens()
    keywords = padding(ids, "left")
    with whet.transformers.enable(model, rule="paper"):
        out = model.generate(ids, **keywords, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True,
                             return_dict_in_generate=True, cache_implementation=cache if cache == "static" else None,
                             disable_compile=True)
    mask = torch.cat([keywords["attention_mask"], torch.ones(2, 6, dtype=torch.long)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected, _ = row_by_row(model, out.sequences, rules=dict.fromkeys(range(3), "paper"), attention_mask=mask,
                             position_ids=positions)
    for i, logits in enumerate(out.logits):
        torch.testing.assert_close(logits, expected[:, 23 + i].to(logits.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "bert"])
def test_compiled_without_a_break(architecture):
    model, ids = small_model(architecture), tokens()
    with whet.transformers.enable(model, rule="paper", layers=[0, 2]), torch.no_grad():
        plain = model(ids)[0]
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(ids)[0], plain, rtol=1e-4, atol=1e-4)


def test_collecting_from_a_compiled_model():
    model, ids = small_model("llama", num_hidden_layers=1), tokens()
    with whet.transformers.collect(model) as plain, torch.no_grad():
        model(ids)
    with whet.transformers.collect(model) as stats, torch.no_grad():
        torch.compile(model, backend="eager")(ids)
    np.testing.assert_allclose(stats.entropy, plain.entropy, atol=1e-5)


def gradients(model, ids, **keywords):
    model.zero_grad()
    logits = model(ids, **keywords).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_oss", "gemma2"])
def test_gradients_are_those_of_differences(architecture, side):
    """Padding hides whole rows there, whose gradients must be 0 and not NaN."""
    model, ids = small_model(architecture).double(), tokens(2, 12)
    keywords = padding(ids, side)
    with whet.transformers.enable(model, rule="paper"):
        found = gradients(model, ids, **keywords)
        assert all(torch.isfinite(gradient).all() for gradient in found.values())
        if architecture != "gpt2":  # whose norms are in float32: too coarse for differences
            return
        rng = torch.Generator().manual_seed(0)
        for name in ("transformer.h.0.attn.c_attn.weight", "transformer.wte.weight"):
            parameter = dict(model.named_parameters())[name]
            direction = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
            losses = []
            with torch.no_grad():
                for sign in (1, -1):
                    parameter += sign * 1e-6 * direction
                    logits = model(ids, **keywords).logits
                    losses.append(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
                    parameter -= sign * 1e-6 * direction
            difference = (losses[0] - losses[1]) / 2e-6
            assert abs((found[name] * direction).sum() - difference) < 1e-5 * max(1, abs(difference))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, ids = small_model("llama"), tokens()
    model.train()
    with whet.transformers.enable(model, rule="paper"), whet.transformers.collect(model) as stats:
        plain = gradients(model, ids)
        rows = stats.entropy.shape
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        checkpointed = gradients(model, ids)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6)
    assert stats.entropy.shape == (*rows[:3], 2 * rows[3])  # the second time recorded once, though computed twice
    np.testing.assert_allclose(stats.entropy[..., :24], stats.entropy[..., 24:], atol=1e-6)


def test_training_with_a_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model = small_model("llama")
    data = [{"input_ids": tokens(1, 16, seed)[0], "labels": tokens(1, 16, seed)[0]} for seed in range(8)]
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=6, per_device_train_batch_size=4,
                                               gradient_checkpointing=True, report_to=[], use_cpu=True,
                                               learning_rate=1e-3, logging_steps=1, save_strategy="no",
                                               disable_tqdm=True)
    entropies = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *arguments, **keywords):
            entropies.append(stats.mean("sharp_entropy").mean())

    with whet.transformers.enable(model, rule="paper"), whet.transformers.collect(model, summary=True) as stats:
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Watch()])
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert len(entropies) == 6
    assert np.isfinite(entropies).all()
    assert (stats.rows == 6 * 4 * 16).all()
