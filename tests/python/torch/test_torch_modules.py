"""The modules against torch's own, whose parameters load into them."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from torch import nn
from whet.torch import LengthScale, MultiheadAttention, Softmax, attention, softmax

VARIANTS = [
    {}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6}, {"batch_first": True}, {"dtype": torch.float32},
    {"batch_first": True, "bias": False, "add_zero_attn": True, "vdim": 4}]
B, N, M, E, H = 3, 5, 7, 8, 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pair(options, **ours):
    theirs = nn.MultiheadAttention(E, H, **options)
    for parameter in theirs.parameters():  # biases start at 0
        nn.init.normal_(parameter, std=0.5)
    mine = MultiheadAttention(E, H, **options, **ours)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def inputs(options, batched=True):
    sizes = (N, E), (M, options.get("kdim", E)), (M, options.get("vdim", E))
    tensors = []
    for rows, size in sizes:
        shape = (rows, size) if not batched else (B, rows, size) if options.get("batch_first") else (rows, B, size)
        tensors.append(torch.randn(shape, dtype=options.get("dtype"), requires_grad=True))
    return tensors


def masks(kind, batched):
    """None, or a mask that hides something from every row but never everything."""
    padding = torch.zeros(B, M, dtype=torch.bool)
    padding[0, -1] = padding[1, 4:] = True
    padding = padding if batched else padding[1]
    pairs = torch.rand(N, M) < 0.4
    pairs[:, 0] = False
    heads = torch.rand((B if batched else 1) * H, N, M) < 0.4
    heads[..., 0] = False
    both = {"none": (None, None), "padding": (None, padding), "pairs": (pairs, None), "heads": (heads, padding),
            "both": (pairs, padding)}[kind.removeprefix("float ")]
    if not kind.startswith("float "):
        return both
    return tuple(m if m is None else torch.randn(m.shape).masked_fill(m, -torch.inf) for m in both)


KINDS = ["none", "padding", "pairs", "heads", "both", "float padding", "float pairs", "float both"]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_same_as_torch(options, batched):
    options = {"dtype": torch.float64, **options}
    dtype, tolerance = options["dtype"], {"atol": 1e-10, "rtol": 1e-10}
    if dtype == torch.float32:
        tolerance = {"atol": 1e-5, "rtol": 1e-4}
    mine, theirs = pair(options)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    given = inputs(options, batched)
    for kind, need_weights, average in itertools.product(KINDS, (False, True), (False, True)):
        attn_mask, padding = (m.to(dtype) if m is not None and m.is_floating_point() else m
                              for m in masks(kind, batched))
        keywords = {"key_padding_mask": padding, "attn_mask": attn_mask, "need_weights": need_weights,
                    "average_attn_weights": average}
        (out, weights), (expected, expected_weights) = mine(*given, **keywords), theirs(*given, **keywords)
        torch.testing.assert_close(out, expected, **tolerance)
        torch.testing.assert_close(weights, expected_weights, **tolerance)
        if need_weights and average and dtype == torch.float64:
            loss = lambda out, weights: out.square().sum() + weights.square().sum()
            found = torch.autograd.grad(loss(out, weights), [*given, *mine.parameters()])
            wanted = torch.autograd.grad(loss(expected, expected_weights), [*given, *theirs.parameters()])
            torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_causal(options, padded):
    mine, theirs = pair(options)
    given = inputs(options)
    after = torch.ones(N, M, dtype=torch.bool).triu(1)
    padding = masks("padding", True)[1] if padded else None
    expected = theirs(*given, attn_mask=after, key_padding_mask=padding)
    for mask in (after, None):
        found = mine(*given, attn_mask=mask, is_causal=True, key_padding_mask=padding, need_weights=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_weights_are_for_the_asking():
    mine, _ = pair({})
    given = inputs({})
    out, weights = mine(*given)
    assert weights is None
    assert torch.equal(mine(*given, need_weights=True)[0], out)


@pytest.mark.parametrize("rule", ["paper", ["target-peak:0.9", "fixed:2"]])
def test_rules(rule):
    mine, _ = pair({"batch_first": True}, rule=rule)
    plain, _ = pair({"batch_first": True})
    plain.load_state_dict(mine.state_dict())
    q, k, v = inputs({"batch_first": True})
    out, weights, stats = mine(q, k, v, need_weights=True, average_attn_weights=False, is_causal=True,
                               return_stats=True)
    assert not torch.allclose(out, plain(q, k, v, is_causal=True)[0], atol=1e-3)
    values = nn.functional.linear(v, mine.in_proj_weight[2 * E :], mine.in_proj_bias[2 * E :])
    heads = (weights @ values.unflatten(-1, (H, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mine.out_proj(heads), out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(stats.sharp_peak.float(), weights.amax(-1), atol=1e-5, rtol=1e-4)


def test_torch_encoders_do_not_go_past_the_rule():
    """In evaluation nn.TransformerEncoderLayer computes attention itself, from the weights of its self_attn."""
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).eval()
    with_rule = copy.deepcopy(layer)
    with_rule.self_attn = MultiheadAttention(E, H, batch_first=True, rule="fixed:8").eval()
    with_rule.self_attn.load_state_dict(layer.self_attn.state_dict())
    x = torch.randn(B, N, E)
    with torch.no_grad():
        found, sharp = layer(x), with_rule(x)
        by_hand = with_rule.norm1(x + with_rule.self_attn(x, x, x)[0])
        by_hand = with_rule.norm2(by_hand + with_rule._ff_block(by_hand))
    assert not torch.allclose(found, sharp, atol=1e-3)
    torch.testing.assert_close(sharp, by_hand)
    nn.TransformerEncoder(with_rule, 2, enable_nested_tensor=False)(x)


def test_dropout_acts_in_training_only():
    mine, given = MultiheadAttention(E, H, dropout=0.5), inputs({})
    assert not torch.equal(mine(*given)[0], mine(*given)[0])
    mine.eval()
    assert torch.equal(mine(*given)[0], mine(*given)[0])


def test_rows_that_see_nothing_give_the_bias_of_the_projection():
    mine, theirs = pair({})
    given, padding = inputs({}), torch.ones(B, M, dtype=torch.bool)
    out, _ = mine(*given, key_padding_mask=padding)
    torch.testing.assert_close(out, mine.out_proj.bias.expand(N, B, E))
    assert theirs(*given, key_padding_mask=padding, need_weights=True)[0].isnan().all()


def test_reprs_copies_and_resets():
    assert repr(Softmax(1, "paper")) == "Softmax(dim=1, rule='paper')"
    mine = MultiheadAttention(E, H, rule="target-entropy:0.2")
    assert "rule='target-entropy:0.2'" in repr(mine)
    assert "rule=['paper', 'none']" in repr(MultiheadAttention(E, H, rule=["paper", None]))
    given = inputs({})
    assert torch.equal(copy.deepcopy(mine)(*given)[0], mine(*given)[0])
    mine._reset_parameters()
    mine(*given)
    with pytest.raises(ValueError, match="rule"):
        MultiheadAttention(E, H, rule="sharp")


def test_softmax():
    x, where = torch.randn(3, 4), torch.rand(3, 4) < 0.6
    assert torch.equal(Softmax(0, "paper")(x, where), softmax(x, 0, rule="paper", where=where))
    torch.testing.assert_close(Softmax()(x), nn.Softmax(-1)(x))


def test_it_compiles():
    mine, _ = pair({"batch_first": True}, rule="paper")
    x = torch.randn(B, N, E)
    padding = masks("padding", True)[1][:, :N]
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    found = compiled(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=True)
    torch.testing.assert_close(found, mine(x, x, x, key_padding_mask=padding, is_causal=True, need_weights=True))


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_masks_of_integers_are_refused(name):
    layer = MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    mask = torch.zeros((5, 5) if name == "attn_mask" else (2, 5), dtype=torch.uint8)
    with pytest.raises(TypeError, match=f"^{name}: its dtype is uint8"):
        layer(x, x, x, **{name: mask})


def test_a_list_of_rules_has_one_a_head():
    for rules in ([], ["paper"], ["paper"] * 3):
        with pytest.raises(ValueError, match="^rule: . given, must be one per head, 2"):
            MultiheadAttention(16, 2, rule=rules)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_autocast(options):
    layer = MultiheadAttention(16, 2, batch_first=True, **options)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(x, x, x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x, x, x)[0], atol=0.02, rtol=0.02)


# ---- LengthScale


def operands(dtype=torch.float64, heads=4, queries=12):
    return torch.randn(3, B, heads, queries, 8, dtype=dtype).unbind()


@pytest.mark.parametrize("kind", ["log-power", "ssmax"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_length_scale_shapes(kind, dtype):
    scale = LengthScale(4, kind, dtype=dtype)
    q, k, v = operands(dtype)
    for n in (torch.arange(1, 13), torch.arange(1, 13).expand(B, 12), torch.arange(1.0, 13.0)):
        found = scale(n)
        assert found.shape == (*n.shape[:-1], 4, 12) and found.dtype == dtype
        out = attention(q, k, v, is_causal=True, query_scale=found)
        scaled = q.double() * found[..., None].double()  # in bfloat16 the product itself would round
        expected = attention(scaled, k.double(), v.double(), is_causal=True)
        torch.testing.assert_close(out, expected.to(dtype))
    with pytest.raises(ValueError, match="^n: "):
        scale(torch.tensor(3))


def test_length_scale_starts_as_the_identity():
    q, k, v = operands()
    n = torch.arange(1, 13)
    assert (LengthScale(4)(torch.tensor([0, 1, 2, 3, 10**6])) == 1).all()
    out = attention(q, k, v, is_causal=True, query_scale=LengthScale(4, dtype=torch.float64)(n))
    assert torch.equal(out, attention(q, k, v, is_causal=True))
    assert LengthScale(4, "ssmax", dtype=torch.float64)(torch.tensor([1024])).sub(1).abs().max() < 1e-15


@pytest.mark.parametrize("kind, init, rule", [
    ("ssmax", 0.4, "ssmax:0.4"), ("log-power", (0.5, 0.3, 1.5), "log-power:0.5,0.3,1.5"),
    ("log-power", (1, 0.5, 2), "log-power:1,0.5,2"), ("log-power", (0, 0.4, 1), "ssmax:0.4"),
    ("log-power", (0.7, 0.2, 0), "log-power:0.7,0.2,0")])
def test_length_scale_equals_the_rule(kind, init, rule):
    q, k, v = operands()
    scale = LengthScale(4, kind, init=init, dtype=torch.float64)
    out, stats = attention(q, k, v, is_causal=True, rule=rule, return_stats=True)
    torch.testing.assert_close(scale(stats.count[:, 0]), stats.beta, rtol=1e-12, atol=0)
    torch.testing.assert_close(attention(q, k, v, is_causal=True, query_scale=scale(torch.arange(1, 13))), out)


def test_length_scales_of_heads_differ():
    scale = LengthScale(3, "ssmax", dtype=torch.float64)
    scale.load_state_dict({"s": torch.tensor([0.2, 0.4, 0.8])})
    q, k, v = operands(heads=3)
    rules = [f"ssmax:{s}" for s in scale.s.tolist()]
    found = attention(q, k, v, is_causal=True, query_scale=scale(torch.arange(1, 13)))
    torch.testing.assert_close(found, attention(q, k, v, is_causal=True, rule=rules))


@pytest.mark.parametrize("kind, init", [("ssmax", 0.4), ("log-power", (0.5, 0.3, 1.5)), ("log-power", (0.5, 0.3, -0.5))])
def test_length_scale_gradients(kind, init):
    q, k, v = operands(queries=5)
    scale = LengthScale(4, kind, init=init, dtype=torch.float64)
    names = [name for name, _ in scale.named_parameters()]

    def out(*values):
        factor = torch.func.functional_call(scale, dict(zip(names, values)), torch.arange(5))  # one row counts no key
        return attention(q, k, v, is_causal=True, query_scale=factor)

    assert torch.autograd.gradcheck(out, tuple(scale.parameters()))
    out(*scale.parameters()).square().sum().backward()
    assert all(p.grad.isfinite().all() and (p.grad != 0).all() for p in scale.parameters())


def test_length_scale_learns_from_the_identity():
    """beta starts at 0, where gamma has no gradient yet."""
    scale = LengthScale(2)
    optimizer = torch.optim.Adam(scale.parameters(), 0.05)
    n = torch.tensor([1, 2, 16, 256, 4096])
    wanted = 0.5 + 0.3 * n.clamp(min=2).log() ** 1.5
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (scale(n) - wanted)[:, 1:].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    assert (scale.beta != 0).all() and (scale.gamma != 1).all()


def test_length_scale_compiles_and_resets():
    scale = LengthScale(2, "ssmax", init=0.3)
    assert repr(scale) == "LengthScale(2, kind='ssmax')"
    n = torch.arange(7)
    torch.testing.assert_close(torch.compile(scale, fullgraph=True, backend="aot_eager")(n), scale(n))
    nn.init.zeros_(scale.s)
    scale.reset_parameters()
    assert torch.equal(scale.s, torch.full((2,), 0.3)) and torch.equal(copy.deepcopy(scale)(n), scale(n))


def test_length_scales_refused():
    with pytest.raises(ValueError, match="^kind: is 'llama4', must be one of log-power, ssmax"):
        LengthScale(2, "llama4")
    with pytest.raises(ValueError, match="^init: 1 given, must be 3 for log-power: delta, beta, gamma"):
        LengthScale(2, init=0.4)
