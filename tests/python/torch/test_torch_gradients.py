"""Gradients against differences in float64, for every rule."""

import oracle
import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from whet.torch import attention, log_softmax, softmax

# Targets are met within a few 1e-6: a difference over 1e-3 sees that.
STEPS = {"target": {"eps": 1e-3, "atol": 1e-2, "rtol": 1e-2}, "": {"eps": 1e-6, "atol": 1e-6, "rtol": 1e-4}}


def gradcheck(function, rule, *given):
    steps = STEPS["target" if rule.startswith("target") else ""]
    assert torch.autograd.gradcheck(function, given, **steps)


def float64(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("rule", oracle.RULES)
def test_softmax(rule):
    gradcheck(lambda x: softmax(x, 0, rule=rule), rule, float64(6, 2))
    where = torch.tensor([True, True, False, True, True])
    gradcheck(lambda x: softmax(x, rule=rule, where=where), rule, float64(2, 5))


@pytest.mark.parametrize("rule", oracle.RULES)
def test_log_softmax(rule):
    gradcheck(lambda x: log_softmax(x, 0, rule=rule), rule, float64(6, 2))
    where = torch.tensor([True, True, False, True, True])
    gradcheck(lambda x: log_softmax(x, rule=rule, where=where).masked_fill(~where, 0.0), rule, float64(2, 5))


@pytest.mark.parametrize("rule", oracle.RULES)
def test_attention(rule):
    gradcheck(lambda q, k, v: attention(q, k, v, rule=rule, is_causal=True, enable_gqa=True), rule,
              float64(1, 2, 3, 4), float64(1, 1, 5, 4), float64(1, 1, 5, 2))
    starts = {"query_starts": [0, 1, 3], "key_starts": [0, 3, 5]}
    gradcheck(lambda q, k, v, s: attention(q, k, v, rule=rule, query_scale=s, **starts), rule, float64(1, 2, 3, 4),
              float64(1, 2, 5, 4), float64(1, 2, 5, 2), float64(2, 3))


@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 4, 1), (4, 1), (3,), ()])
def test_query_scale(shape):
    function = lambda q, k, v, s: attention(q, k, v, rule="paper", is_causal=True, enable_gqa=True, softcap=3.0,
                                            query_scale=s)
    given = float64(2, 4, 3, 4), float64(2, 2, 5, 4), float64(2, 2, 5, 2)
    gradcheck(function, "paper", *given, float64(*shape))
    gradcheck(function, "paper", *given, torch.zeros(shape, dtype=torch.float64, requires_grad=True))
    gradcheck(lambda s: function(*(t.detach() for t in given), s), "paper", float64(*shape))


def test_query_scale_with_dropout():
    q, k, v, s = float64(1, 2, 3, 4), float64(1, 2, 5, 4), float64(1, 2, 5, 2), float64(2, 3)

    def function(s):
        torch.manual_seed(3)
        return attention(q, k, v, dropout_p=0.4, rule="paper", query_scale=s)

    gradcheck(function, "paper", s)


def test_query_scale_of_another_shape_or_dtype():
    q, s = torch.randn(2, 3, 4, 5, 8), torch.randn(3, 4, 5, requires_grad=True)
    scaled = q * s.unsqueeze(-1)
    ours, theirs = attention(q, q, q, query_scale=s), attention(scaled, q, q)
    torch.testing.assert_close(ours, theirs)
    found, expected = (torch.autograd.grad(out.square().sum(), s)[0] for out in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        scale = s[0].to(dtype).detach().requires_grad_()
        narrow = q[0, :2].bfloat16()
        found = torch.autograd.grad(attention(narrow, narrow, narrow, query_scale=scale).float().sum(), scale)[0]
        wide, exact = narrow.double(), scale.detach().double().requires_grad_()
        expected = torch.autograd.grad(attention(wide, wide, wide, query_scale=exact).sum(), exact)[0]
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rule", oracle.RULES)
def test_attention_with_masks_bias_and_sinks(rule):
    def function(q, k, v, bias, sinks):
        return attention(q, k, v, bias, rule=rule, sinks=sinks, softcap=2.0, window=(2, 1), align="end",
                         lengths=torch.tensor([5, 4]))

    gradcheck(function, rule, float64(2, 2, 3, 4), float64(2, 2, 5, 4), float64(2, 2, 5, 3), float64(1, 2, 3, 5),
              float64(2))
    mask = torch.rand(3, 5) < 0.7
    gradcheck(lambda q, k, v: attention(q, k, v, mask, rule=rule), rule, float64(2, 3, 4), float64(2, 5, 4),
              float64(2, 5, 3))


@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.5", "target-peak:0.7", "fixed:2"])
def test_beta_held(rule):
    """The gradient at a fixed beta, which is what that beta gives as a rule of its own."""
    x = float64(1, 6)
    beta = softmax(x, rule=rule, return_stats=True)[1].beta.item()
    dout = torch.randn(1, 6, dtype=torch.float64)
    held, = torch.autograd.grad(softmax(x, rule=rule, hold_beta=True), x, dout)
    fixed, = torch.autograd.grad(softmax(x, rule=f"fixed:{beta!r}"), x, dout)
    torch.testing.assert_close(held, fixed, atol=1e-9, rtol=1e-7)
    through, = torch.autograd.grad(softmax(x, rule=rule), x, dout)
    assert rule == "fixed:2" or not torch.allclose(through, held, atol=1e-6)

    q, k, v = float64(1, 1, 1, 3), float64(1, 1, 6, 3), float64(1, 1, 6, 2)
    beta = attention(q, k, v, rule=rule, return_stats=True)[1].beta.item()
    held = torch.autograd.grad(attention(q, k, v, rule=rule, hold_beta=True).sum(), (q, k, v))
    fixed = torch.autograd.grad(attention(q, k, v, rule=f"fixed:{beta!r}").sum(), (q, k, v))
    torch.testing.assert_close(held, fixed, atol=1e-9, rtol=1e-7)


def test_only_what_is_asked_for():
    """Frozen inputs get no gradient, and don't change those of the others."""
    given = [float64(1, 2, 3, 4), float64(1, 2, 5, 4), float64(1, 2, 5, 3), float64(3, 5), float64(2)]

    def out(*tensors):
        q, k, v, bias, sinks = tensors
        return attention(q, k, v, bias, sinks=sinks, rule="paper").square().sum()

    every = torch.autograd.grad(out(*given), given)
    for i, tensor in enumerate(given):
        alone = [t if t is tensor else t.detach() for t in given]
        torch.testing.assert_close(torch.autograd.grad(out(*alone), tensor)[0], every[i], atol=1e-12, rtol=1e-12)


def test_no_second_gradient():
    x, q = float64(2, 5), float64(1, 1, 3, 4)
    for out, given in ((softmax(x, rule="paper"), x), (log_softmax(x, rule="paper"), x), (attention(q, q, q), q)):
        gradient, = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            gradient.sum().backward()


def test_changed_inputs_are_noticed():
    x = torch.randn(2, 5, requires_grad=True)
    y = x * 1
    out = softmax(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_16_bits_and_expanded_gradients():
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 2, 4, 8, dtype=dtype, requires_grad=True) for _ in range(3))
        attention(q, k, v, torch.zeros(4, 4), rule="paper").sum().backward()
        assert all(t.grad.dtype == dtype and t.grad.isfinite().all() for t in (q, k, v))


def test_lazily_negated_inputs_and_gradients():
    """Views that negate when they are read: the memory under them has the other sign."""
    def negated(x):
        return torch.complex(torch.zeros_like(x), -x).conj().imag

    x, dout = float64(2, 5), torch.randn(2, 5, dtype=torch.float64)
    assert negated(x).is_neg()
    expected, = torch.autograd.grad(softmax(x, rule="paper"), x, dout)
    found, = torch.autograd.grad(softmax(negated(x), rule="paper"), x, negated(dout))
    torch.testing.assert_close(found, expected)
    q = float64(1, 2, 3, 4)
    expected, = torch.autograd.grad(attention(q, q, q, rule="paper").sum(), q)
    found, = torch.autograd.grad(attention(negated(q), q, negated(q), rule="paper").sum(), q)
    torch.testing.assert_close(found, expected)


def test_a_rule_from_a_file_is_read_once(tmp_path):
    path = tmp_path / "rule.txt"
    path.write_text("polynomial:0.3,1.2:hold=4\n")
    x = torch.randn(2, 50, dtype=torch.float64, requires_grad=True)
    weights = softmax(x, rule=f"polynomial:{path}")
    before, = torch.autograd.grad(weights[:, 0].sum(), x, retain_graph=True)
    path.write_text("polynomial:2,3\n")
    after, = torch.autograd.grad(weights[:, 0].sum(), x)
    assert torch.equal(before, after)
