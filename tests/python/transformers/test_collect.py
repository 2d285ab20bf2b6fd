"""whet.transformers.collect: the numbers that weights written out give."""

import gc
import tracemalloc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import oracle
import whet.transformers
from models import ARCHITECTURES, HEADS, LAYERS, padding, row_by_row, small_model, tokens

NORMALIZERS = ["softmax", "sparsemax", "entmax15", "entmax:1.3", "top-k:3", "hard", "sigmoid", "relu", "softpick"]


def run(model, ids, **keywords):
    with torch.no_grad():
        return model(ids, **keywords)[0]


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_statistics_are_those_of_the_weights(architecture, side):
    model, ids = small_model(architecture).double(), tokens()
    keywords = padding(ids, side)
    _, weights = row_by_row(model, ids, **keywords)
    before = model.config._attn_implementation
    with whet.transformers.collect(model) as stats:
        run(model, ids, **keywords)
    assert model.config._attn_implementation == before
    weights = np.stack(weights)
    count = (weights > 0).sum(-1)
    p = np.where(weights > 0, weights, 1)
    entropy = -(p * np.log(p)).sum(-1)
    peak = weights.max(-1)
    at = np.zeros(len(ids), int)
    if side == "left":
        at[1] = 7
    on_first = np.stack([weights[:, i, :, :, at[i]] for i in range(len(ids))], 1)
    seen = count > 0
    assert np.isnan(stats.entropy[~seen]).all()
    close = dict(rtol=1e-5, atol=2e-6)
    if architecture != "gpt_oss":  # there a sink has weight too
        np.testing.assert_allclose(stats.entropy[seen], entropy[seen], **close)
        np.testing.assert_allclose(stats.relative_entropy[seen], entropy[seen] / np.log(np.maximum(count[seen], 2)),
                                   **close)
    np.testing.assert_array_equal(stats.count[seen], count[seen])
    np.testing.assert_allclose(stats.peak[seen], peak[seen], **close)
    np.testing.assert_allclose(stats.first[seen], on_first[seen], **close)
    assert (stats.beta[seen] == 1).all()
    np.testing.assert_array_equal(stats.sharp_peak[seen], stats.peak[seen])
    assert stats.layers == [0, 1, 2]


@pytest.mark.parametrize("rule", ["none", "paper"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_the_weight_on_the_first_key(normalizer, rule):
    """Of each normalizer, against the weights of whet.softmax on the logits."""
    model, ids = small_model("llama").double(), tokens(1)
    logits = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, _, keywords: logits.append(keywords["hidden_states"]), with_kwargs=True)
    with whet.transformers.enable(model, rule, normalizer), whet.transformers.collect(model) as stats:
        run(model, ids)
    hook.remove()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
        cos, sin = model.model.rotary_emb(logits[0], torch.arange(24)[None])
        q, k = ((projection(logits[0]).view(1, 24, -1, 16).transpose(1, 2))
                for projection in (attention.q_proj, attention.k_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        x = (q @ k.repeat_interleave(2, 1).mT * attention.scaling).numpy()
    weights = whet.softmax(x, rule=rule, normalizer=normalizer, where=np.tri(24, dtype=bool))
    np.testing.assert_allclose(stats.first[0], weights[..., 0], rtol=1e-5, atol=1e-6)
    if rule == "paper" and normalizer != "hard":  # of which no rule changes anything
        betas = [oracle.beta_of(rule, x[0, 1, i, :i + 1]) for i in range(24)]
        np.testing.assert_allclose(stats.beta[0, 0, 1], betas, rtol=1e-5)


def test_some_rows():
    model, ids = small_model("llama"), tokens()
    with whet.transformers.collect(model) as every:
        run(model, ids)
    for rows, same in ((-1, slice(-1, None)), (0, slice(0, 1)), (slice(3, 9, 2), slice(3, 9, 2)), (-3, slice(-3, -2))):
        with whet.transformers.collect(model, rows=rows) as some:
            run(model, ids)
        for name in whet.transformers.FIELDS:
            np.testing.assert_array_equal(getattr(some, name), getattr(every, name)[..., same])
    with pytest.raises(TypeError, match="^rows: is a str, must be an integer, a slice or None$"):
        whet.transformers.collect(model, rows="last")
    with pytest.raises(AttributeError, match="entropies"):
        _ = every.entropies
    assert "entropy" in dir(every)


def test_several_calls_are_joined():
    model, ids = small_model("llama"), tokens()
    with whet.transformers.collect(model) as one:
        run(model, ids)
    with whet.transformers.collect(model) as two:
        assert not two._calls[0]
        with pytest.raises(RuntimeError, match="^no rows yet"):
            _ = two.entropy
        with torch.no_grad():
            cache = model(ids[:, :20], use_cache=True).past_key_values
            for i in range(20, 24):
                model(ids[:, i:i + 1], past_key_values=cache)
    np.testing.assert_array_equal(two.count, one.count)
    np.testing.assert_allclose(two.entropy, one.entropy, atol=1e-5)
    np.testing.assert_allclose(two.first, one.first, atol=1e-5)
    with whet.transformers.collect(model) as odd:
        run(model, ids)
        run(model, ids[:1])
    with pytest.raises(ValueError, match="different numbers of sequences"):
        _ = odd.entropy


@pytest.mark.parametrize("side", [None, "left"])
def test_summaries_are_those_of_the_rows(side):
    model = small_model("llama")
    with whet.transformers.enable(model, rule="paper"), whet.transformers.collect(model, summary=True) as summary, \
            torch.no_grad():
        rows = []
        for seed in range(5):
            ids = tokens(seed=seed)
            keywords = padding(ids, side)
            with whet.transformers.collect(model) as inner:  # takes the place of the outer one while it lasts
                run(model, ids, **keywords)
            rows.append(inner)
            run(model, ids, **keywords)
    for name in whet.transformers.FIELDS:
        values = np.concatenate([getattr(part, name) for part in rows], -1).transpose(0, 2, 1, 3).reshape(LAYERS, HEADS, -1)
        values = values.astype(float)
        np.testing.assert_allclose(summary.mean(name), np.nanmean(values, -1), rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(summary.std(name), np.nanstd(values, -1), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(summary.min(name), np.nanmin(values, -1), rtol=1e-6)
        np.testing.assert_allclose(summary.max(name), np.nanmax(values, -1), rtol=1e-6)
        counts, edges = summary.histogram(name)
        assert counts.sum(-1).tolist() == summary.rows.tolist()
        assert (summary.rows == (~np.isnan(values)).sum(-1)).all()
        for q in (0.0, 0.1, 0.5, 0.9, 1.0):
            exact = np.nanquantile(values, q, -1, method="inverted_cdf")
            assert (abs(summary.quantile(name, q) - exact) <= edges[1] - edges[0] + 1e-6).all(), name
    with pytest.raises(ValueError, match="^name: is 'mass', must be one of count, entropy"):
        summary.mean("mass")
    with pytest.raises(ValueError, match="^q: is 2, must be 0 to 1$"):
        summary.quantile("peak", 2)
    empty = whet.transformers.Summary([0], 2, slice(None))
    assert np.isnan(empty.mean("entropy")).all()


def test_the_memory_of_summaries_does_not_grow():
    model = small_model("llama", max_position_embeddings=4096)
    sizes = []
    with whet.transformers.collect(model, summary=True) as summary:
        for length in (16, 512, 2048):
            run(model, tokens(1, length))
            sizes.append(sum(array.numel() for array in (summary._count, *summary._bins)))
    assert len(set(sizes)) == 1
    assert (summary.rows == 16 + 512 + 2048).all()


def test_no_matrix_of_all_pairs_is_kept():
    """n = 4,096: a matrix of one head alone would be 67 MB."""
    model = small_model("llama", max_position_embeddings=4096)
    gc.collect()
    tracemalloc.start()
    with whet.transformers.collect(model) as stats:
        run(model, tokens(1, 4096))
    assert stats.entropy.shape == (LAYERS, 1, HEADS, 4096)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    held = sum(call.numel() * call.element_size() for calls in stats._calls.values() for call in calls)
    assert held == LAYERS * HEADS * 4096 * len(whet.transformers.FIELDS) * 4


@pytest.mark.parametrize("normalizer", ["entmax15", "sigmoid", "relu"])
def test_the_first_key_in_heads_of_another_normalizer(normalizer):
    model, ids = small_model("llama"), tokens()
    with torch.no_grad():
        with whet.transformers.collect(model) as plain:
            model(ids)
        with whet.transformers.enable(model, normalizer=normalizer, heads=[0]), whet.transformers.collect(model) as some:
            model(ids)
    np.testing.assert_allclose(some.first[0, :, 1:], plain.first[0, :, 1:], atol=1e-5)
    assert np.isfinite(some.first).all() and not np.allclose(some.first[0, :, 0], plain.first[0, :, 0], atol=1e-3)


def test_rows_that_no_call_has():
    model, ids = small_model("llama"), tokens()
    with whet.transformers.collect(model, rows=slice(100, None), summary=True) as stats, torch.no_grad():
        model(ids)
    assert (stats.rows == 0).all()


def test_an_alpha_per_head():
    """Its heads as with the normalizer of that name, whether all have it or some."""
    from whet.torch import Entmax

    model, ids = small_model("llama"), tokens()
    alphas = [1.2, 1.5, 2.0, 3.0]

    def first(normalizer, heads=None):
        with whet.transformers.enable(model, normalizer=normalizer, heads=heads), whet.transformers.collect(model) as stats:
            run(model, ids)
        return stats.first[0]

    every = first(Entmax(torch.tensor(alphas)))
    some = first(Entmax(torch.tensor(alphas[1:3])), [1, 2])
    for head, alpha in enumerate(alphas):
        expected = first(f"entmax:{alpha}")[:, head]
        np.testing.assert_allclose(every[:, head], expected, atol=1e-6)
        if head in (1, 2):
            np.testing.assert_allclose(some[:, head], expected, atol=1e-6)
    np.testing.assert_allclose(some[:, [0, 3]], first("softmax")[:, [0, 3]], atol=1e-6)


def test_the_first_key_of_packed_sequences():
    """Rows of the second sequence don't see the first key that any query of the call sees."""
    model, ids = small_model("llama"), tokens(1)
    starts = torch.tensor([0, 10, 24], dtype=torch.int32)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    with whet.transformers.collect(model) as packed:
        run(model, ids, position_ids=positions, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=14, max_length_k=14)
    with whet.transformers.collect(model) as alone:
        run(model, ids[:, :10])
    np.testing.assert_allclose(packed.first[..., :10], alone.first, atol=1e-5)
    assert (packed.first[..., 10:] == 0).all()


def test_enable_and_disable_inside():
    model, ids = small_model("llama"), tokens()
    before = model.config._attn_implementation
    with whet.transformers.collect(model) as stats:
        whet.transformers.enable(model, "fixed:2")
        run(model, ids)
    assert (stats.beta[..., 1:] == 2).all()  # the first query sees one key
    assert model.config._attn_implementation == "whet"  # as enable() said: from now on
    with whet.transformers.collect(model) as stats:
        run(model, ids)
    assert (stats.beta[..., 1:] == 2).all()  # the first query sees one key
    with whet.transformers.collect(model):
        whet.transformers.disable(model)
    assert model.config._attn_implementation == before
    with whet.transformers.collect(model) as stats:
        with whet.transformers.enable(model, "fixed:3"):
            run(model, ids)
        run(model, ids)
    assert (stats.beta[..., 1:24] == 3).all() and (stats.beta[..., 24:] == 1).all()
    assert model.config._attn_implementation == before
