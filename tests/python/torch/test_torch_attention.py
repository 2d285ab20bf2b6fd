"""whet.torch.attention against F.scaled_dot_product_attention, over what torch's own tests of it cover."""

import itertools

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", minversion="2.6")
import whet
from torch.nn.functional import scaled_dot_product_attention
from whet.torch import attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(batch=(2,), heads=4, key_heads=None, queries=5, keys=9, size=8, value_size=None, dtype=torch.float32):
    key_heads, value_size = key_heads or heads, value_size or size
    shapes = ((*batch, heads, queries, size), (*batch, key_heads, keys, size), (*batch, key_heads, keys, value_size))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def same_as_torch(given, attn_mask=None, **options):
    """Output and every gradient."""
    dtype = given[0].dtype
    results = []
    for function in (attention, scaled_dot_product_attention):
        tensors = [t.detach().clone().requires_grad_() for t in given]
        mask = attn_mask
        if attn_mask is not None and attn_mask.requires_grad:
            mask = attn_mask.detach().clone().requires_grad_()
            tensors.append(mask)
        out = function(*tensors[:3], mask, **options)
        out.backward(torch.ones_like(out).cumsum(-1) / out.shape[-1])
        results.append([out, *(t.grad for t in tensors)])
    for found, expected in zip(*results):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch, queries, keys, size", [
    ((2,), 5, 9, 8), ((1,), 1, 17, 16), ((3,), 16, 16, 64), ((2,), 33, 7, 3), ((), 4, 6, 8), ((2, 3), 4, 6, 8),
    ((1,), 70, 300, 32), ((2, 1, 2), 3, 3, 5)])
def test_shapes_and_dtypes(batch, queries, keys, size, dtype):
    given = inputs(batch, 2, queries=queries, keys=keys, size=size, dtype=dtype)
    for is_causal, scale in itertools.product((False, True), (None, 0.3)):
        same_as_torch(given, is_causal=is_causal, scale=scale)


def test_two_dimensions():
    given = [torch.randn(n, 8, requires_grad=True) for n in (4, 6, 6)]
    same_as_torch(given)
    same_as_torch(given, torch.rand(4, 6) < 0.8)
    out, stats = attention(*given, return_stats=True)
    assert out.shape == (4, 8) and stats.count.shape == (4,)


MASKS = [(2, 4, 5, 9), (2, 1, 5, 9), (1, 4, 1, 9), (2, 1, 1, 9), (5, 9), (1, 9), (4, 5, 9)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["bool", "float", "float with gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks(shape, kind, dtype):
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True  # no row that sees nothing: torch gives NaN there
    if kind != "bool":
        mask = torch.randn(shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        mask.requires_grad_(kind != "float")
    same_as_torch(inputs(dtype=dtype), mask)


def test_mask_with_more_leading_dimensions():
    given = inputs((2, 3), 2, queries=4, keys=6)
    for shape in [(4, 6), (1, 1, 2, 4, 6), (2, 3, 2, 4, 6), (2, 1, 1, 4, 6), (3, 2, 4, 6)]:
        same_as_torch(given, torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads(key_heads):
    same_as_torch(inputs(key_heads=key_heads), enable_gqa=True)
    same_as_torch(inputs(key_heads=key_heads), torch.rand(5, 9) < 0.9, enable_gqa=True)


def test_leading_dimensions_broadcast():
    q, k, v = inputs()
    same_as_torch([q, k[:1], v[:1]])
    same_as_torch([q[:1], k, v])
    same_as_torch([q, k[:, :1], v[:, :1]])
    same_as_torch([q, k[0], v[0]])


def test_grouped_heads_have_to_be_asked_for():
    given = inputs(key_heads=2)
    with pytest.raises(ValueError, match="enable_gqa"):
        attention(*given)
    with pytest.raises(ValueError, match="^key"):
        attention(*inputs(key_heads=3), enable_gqa=True)


@pytest.mark.parametrize("key_heads, value_heads", [(1, 4), (4, 2), (2, 4), (2, 3), (6, 4)])
def test_key_and_value_in_groups_of_their_own(key_heads, value_heads):
    heads = 12
    q, k, _ = inputs(heads=heads, key_heads=key_heads)
    _, _, v = inputs(heads=heads, key_heads=value_heads)
    same_as_torch([q, k, v], enable_gqa=True)
    same_as_torch([q[0], k[0], v[0]], enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_scale_as_a_tensor(dtype):
    given = inputs()
    scale = torch.tensor(2.0).to(dtype)
    torch.testing.assert_close(attention(*given, scale=scale), attention(*given, scale=2.0))
    torch.testing.assert_close(attention(*given, scale=scale), scaled_dot_product_attention(*given, scale=scale.item()))


def test_scale_that_is_learned():
    given = inputs(dtype=torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda scale: attention(*given, scale=scale, rule="paper"), scale)
    compiled = torch.compile(lambda *given: attention(*given, scale=scale), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), attention(*given, scale=scale))


def test_none_is_no_limit():
    given = inputs()
    assert torch.equal(attention(*given, softcap=None), attention(*given))
    for window in [(2, None), (None, 1), (None, None)]:
        limits = tuple(-1 if side is None else side for side in window)
        assert torch.equal(attention(*given, window=window), attention(*given, window=limits))


def test_lengths_as_a_list():
    given = inputs()
    expected = attention(*given, lengths=torch.tensor([9, 4]))
    assert torch.equal(attention(*given, lengths=[9, 4]), expected)
    assert torch.equal(attention(*given, lengths=(9, torch.tensor(4))), expected)
    assert attention(*inputs((0,)), lengths=[]).shape == (0, 4, 5, 8)


@pytest.mark.parametrize("size, value_size", [(257, 257), (512, 512), (576, 512), (40, 1024)])
def test_large_heads(size, value_size):
    """Above 256, for which the kernels are tuned: 512 in some models, 576 keys against 512 values in absorbed MLA."""
    same_as_torch(inputs((1,), 2, queries=5, keys=70, size=size, value_size=value_size))
    same_as_torch(inputs((1,), 2, 1, queries=33, keys=40, size=size, value_size=value_size), is_causal=True,
                  enable_gqa=True)


def test_sizes_of_values():
    same_as_torch(inputs(value_size=3))
    same_as_torch(inputs(value_size=24), is_causal=True)


def test_layouts():
    """(B, N, H, D) in memory, expanded and negated: the bits of contiguous ones."""
    q, k, v = (t.detach() for t in inputs())
    expected = attention(q, k, v, rule="paper")
    joined = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(attention(*joined, rule="paper"), expected)
    negated = torch.complex(q, -q).conj().imag
    assert negated.is_neg() and torch.equal(attention(negated, k, v, rule="paper"), expected)
    one = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(attention(q, one, v), attention(q, one.contiguous(), v))
    out = attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous(), "joining heads copies nothing"


@pytest.mark.parametrize("sizes", [{"batch": (0,)}, {"queries": 0}, {"keys": 0}])
def test_zero_sizes(sizes):
    given = inputs(**sizes)
    out = attention(*given, rule="paper")
    out.sum().backward()
    assert (out == 0).all() and all((t.grad == 0).all() for t in given)
    assert torch.equal(attention(*(t.detach() for t in given)), out.detach())


def test_rows_that_see_nothing_give_zero():
    """torch gives NaN in some of its ways to compute and 0 in others."""
    given = inputs()
    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[2] = False
    out = attention(*given, mask, rule="paper")
    out.sum().backward()
    assert (out[:, :, 2] == 0).all() and (given[0].grad[:, :, 2] == 0).all()
    assert all(t.grad.isfinite().all() for t in given)


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True, "align": "end"}, {"window": (2, 1)}, {"softcap": 3.0, "scale": 0.7}, {"lengths": [9, 4]},
    {"sinks": [0.5, -1.0, 0.0, 2.0]}])
def test_rules_and_keywords(rule, options):
    q, k, v = inputs(key_heads=2, dtype=torch.float64)
    expected, _ = oracle.attention(*(t.detach().numpy() for t in (q, k, v)), rule, **options)
    ours = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in options.items()}
    if "sinks" in ours:
        ours["sinks"] = ours["sinks"].double()
    for given in ([q, k, v], [t.detach() for t in (q, k, v)]):
        out, stats = attention(*given, rule=rule, enable_gqa=True, return_stats=True, **ours)
        np.testing.assert_allclose(out.detach(), expected, atol=2e-5)
        assert stats.beta.shape == (2, 4, 5) and not stats.beta.requires_grad


def test_a_rule_a_head():
    q, k, v = inputs()
    rules = ["paper", whet.Fixed(2), None, "ssmax:0.5"]
    out = attention(q, k, v, rule=rules)
    for head, rule in enumerate(rules):
        alone = attention(*(t[:, head : head + 1] for t in (q, k, v)), rule=rule)
        torch.testing.assert_close(out[:, head : head + 1], alone)


def test_stats_are_those_of_the_weights():
    q, k, v = inputs()
    _, stats = attention(q, k, v, is_causal=True, align="end", return_stats=True)
    assert stats.count[0, 0].tolist() == [5, 6, 7, 8, 9]
    logits = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(5, 9).tril(4).bool(), -torch.inf)
    p = torch.softmax(logits.detach().double(), -1)
    torch.testing.assert_close(stats.entropy, torch.special.entr(p).sum(-1), atol=1e-5, rtol=1e-5)
    assert all(field.dtype == torch.float64 for field in stats)


def test_lengths_of_other_integers_and_one_a_row():
    q, k, v = inputs()
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    expected = attention(q, k, v, lengths=lengths)
    rows = lengths[:, None, None].expand(2, 4, 5)
    torch.testing.assert_close(attention(q, k, v, lengths=rows), expected)


def test_a_list_of_rules_has_one_per_head():
    q = torch.randn(1, 4, 3, 8)
    for rules in ([], ["paper"], ["paper"] * 3):
        with pytest.raises(ValueError, match="^rule: . given, must be one per query head, 4"):
            attention(q, q, q, rule=rules)


def test_shapes_broadcast_as_in_torch():
    for shapes in (((3, 4), (1, 5, 4)), ((1, 0, 3, 4), (1, 1, 3, 4))):
        q, k = (torch.randn(shape) for shape in shapes)
        theirs = scaled_dot_product_attention(q, k, k)
        torch.testing.assert_close(attention(q, k, k), theirs)


# ---- packed sequences, scales of queries, optional outputs


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "align": "end", "window": 1}])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, list])
def test_packed_sequences(options, kind):
    """Each sequence is as if it were alone."""
    given = inputs((1,), queries=7, keys=9)
    query_starts, key_starts = [0, 3, 3, 7], [0, 4, 6, 9]
    starts = [s if kind is list else torch.tensor(s, dtype=kind) for s in (query_starts, key_starts)]
    out = attention(*given, rule="paper", query_starts=starts[0], key_starts=starts[1], **options)
    gradients = torch.autograd.grad(out.square().sum(), given)
    parts = []
    for i in range(3):
        queries, keys = slice(*query_starts[i:i + 2]), slice(*key_starts[i:i + 2])
        q, k, v = given
        parts.append(attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], rule="paper", **options))
    expected = torch.cat(parts, 2)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), given), atol=1e-5, rtol=1e-5)


def test_wrong_starts():
    q, k, v = inputs((1,))
    for starts in ([0, 4], [1, 5], [0, 6]):
        with pytest.raises(ValueError, match="^query_starts"):
            attention(q, k, v, query_starts=starts, key_starts=[0, 9])
    with pytest.raises(TypeError, match="^key_starts: its dtype is float32"):
        attention(q, k, v, query_starts=[0, 5], key_starts=[0.0, 9.0])


def test_query_scale():
    q, k, v = inputs(dtype=torch.float64)
    for shape in ((2, 4, 5), (4, 1), (5,)):
        scale = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        out = attention(q, k, v, rule="paper", query_scale=scale)
        expected = whet.attention(*(t.detach().numpy() for t in (q, k, v)), rule="paper",
                                  query_scale=scale.detach().numpy())
        np.testing.assert_allclose(out.detach(), expected, atol=1e-12)
        assert torch.autograd.grad(out.sum(), scale)[0].shape == shape
    with pytest.raises(ValueError, match=r"^query_scale: its shape is \(3,\)"):
        attention(q, k, v, query_scale=torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("recorded", [False, True])
def test_optional_outputs(recorded):
    given = [t.requires_grad_(recorded) for t in map(torch.Tensor.detach, inputs(dtype=torch.float64))]
    rows = [[0, 0, 0], [1, 3, 4], [1, 2, 2]]
    out, stats, extras = attention(*given, is_causal=True, rule="paper", return_stats=True, weight_rows=rows, top_k=2,
                                   column_sums=True)
    assert torch.equal(out, attention(*given, is_causal=True, rule="paper")) and out.requires_grad == recorded
    arrays = [t.detach().numpy() for t in given]
    _, expected = whet.attention(*arrays, is_causal=True, rule="paper", weight_rows=rows, top_k=2, column_sums=True)
    for name in ("weights", "top_keys", "top_weights", "column_sums"):
        found = getattr(extras, name)
        assert not found.requires_grad
        np.testing.assert_array_equal(found, getattr(expected, name))
    assert extras.tile_counts is None and stats.beta.shape == (2, 4, 5)


def test_optional_outputs_have_the_batch_that_was_given():
    out, extras = attention(*inputs((2, 3)), top_k=1, column_sums=True)
    assert extras.top_keys.shape == (2, 3, 4, 5, 1) and extras.column_sums.shape == (2, 3, 4, 9)
    out, extras = attention(*(torch.randn(n, 8) for n in (4, 6, 6)), top_k=1, weight_rows=torch.tensor([[0, 0, 3]]))
    assert out.shape == (4, 8) and extras.top_keys.shape == (4, 1) and extras.weights.shape == (1, 6)
    with pytest.raises(ValueError, match=r"^weight_rows: its shape is \(2,\), must be \(R, 3\)"):
        attention(*inputs(), weight_rows=[1, 2])
    with pytest.raises(ValueError, match="^weight_rows"):
        attention(*inputs(), weight_rows=[[0, 4, 0]])
    with pytest.raises(ValueError, match="^top_k: is -1"):
        attention(*inputs(), top_k=-1)


def test_normalizers_go_by_name():
    given = inputs()
    assert torch.equal(attention(*given, normalizer="softmax"), attention(*given))
    with pytest.raises(ValueError, match="^normalizer.*softmax"):
        attention(*given, normalizer="softest")
    q, k, v = given
    out = attention(q, k, v, normalizer="hard")
    torch.testing.assert_close(out, v.gather(2, (q @ k.mT).argmax(-1, keepdim=True).expand(-1, -1, -1, 8)))
    dq, dk, dv = torch.autograd.grad(out.sum(), given)
    assert (dq == 0).all() and (dk == 0).all() and dv.sum() == out.numel()
    mapped = torch.vmap(lambda q: attention(q, k, v, normalizer="hard"))(torch.stack([q, -q]))
    assert torch.equal(mapped[0], out)
    compiled = torch.compile(lambda *given: attention(*given, normalizer="hard"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), out)
