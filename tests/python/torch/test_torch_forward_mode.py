"""Forward mode against reverse mode and against differences."""

import oracle
import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from torch.autograd import forward_ad
from whet.torch import attention, log_softmax, softmax

STARTS = {"query_starts": [0, 2, 5], "key_starts": [0, 1, 6]}
OPTIONS = {
    "plain": {}, "causal": {"is_causal": True, "align": "end"}, "capped": {"softcap": 2.0, "window": (3, 1)},
    "lengths": {"lengths": [4, 6], "is_causal": True, "align": "end"}, "rows": {"lengths": [6, 5, 4, 1, 0] * 4},
    "heads": {"rule": ["paper", "target-peak:0.7"]}, "held": {"hold_beta": True}, "scale": {"scale": 0.7},
    "hard": {"normalizer": "hard"}, "sinks": {"sinks": torch.tensor([0.5, -torch.inf], dtype=torch.float64),
                                              "is_causal": True},
    "packed": STARTS, "packed causal": {**STARTS, "is_causal": True, "window": (2, None), "align": "end"},
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def float64(*shape):
    return torch.randn(shape, dtype=torch.float64)


def check_against_reverse_mode(function, *given):
    """<u, J t> from either side, for t and u drawn at random."""
    along = tuple(map(torch.randn_like, given))
    out, tangent = torch.func.jvp(function, given, along)
    assert torch.equal(out, function(*given))
    u = torch.randn_like(out)
    _, pull = torch.func.vjp(function, *given)
    expected = sum((gradient * t).sum() for gradient, t in zip(pull(u), along))
    torch.testing.assert_close((tangent * u).sum(), expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("rule", oracle.RULES)
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_rows(function, rule):
    where = torch.tensor([True, True, False, True, True, True])
    check_against_reverse_mode(lambda x: function(x, 0, rule=rule), float64(6, 3))
    check_against_reverse_mode(lambda x: function(x, rule=rule, where=where).masked_fill(~where, 0.0), float64(2, 6))
    check_against_reverse_mode(lambda x: function(x, rule=rule, hold_beta=True), float64(2, 6))


@pytest.mark.parametrize("rule", ["none", "paper", "polynomial:0.3,1.2:gate=0.2:hold=2"])
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_rows_against_differences(function, rule):
    x = float64(3, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, rule=rule), x, check_forward_ad=True, check_backward_ad=True,
                                    check_batched_forward_grad=True)


@pytest.mark.parametrize("rule", oracle.RULES)
def test_attention(rule):
    check_against_reverse_mode(
        lambda q, k, v, bias, sinks: attention(q, k, v, bias, rule=rule, sinks=sinks, enable_gqa=True),
        float64(2, 4, 5, 8), float64(2, 2, 6, 8), float64(2, 2, 6, 3), float64(1, 4, 5, 6), float64(4))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options):
    batch = 1 if "query_starts" in options else 2
    mask = torch.rand(5, 6) < 0.8
    check_against_reverse_mode(lambda q, k, v: attention(q, k, v, mask, **{"rule": "paper", **options}),
                               float64(batch, 2, 5, 8), float64(batch, 2, 6, 8), float64(batch, 2, 6, 3))


def test_one_operand_at_a_time():
    given = [float64(1, 2, 5, 8), float64(1, 2, 6, 8), float64(1, 2, 6, 3)]
    for i in range(3):
        check_against_reverse_mode(
            lambda x: attention(*given[:i], x, *given[i + 1:], rule="paper", is_causal=True), given[i])


@pytest.mark.parametrize("shape", [(2, 2, 5), (2, 1), ()])
def test_query_scale(shape):
    q, k, v, s = float64(2, 2, 5, 4), float64(2, 2, 6, 4), float64(2, 2, 6, 3), float64(*shape)
    function = lambda q, k, v, s: attention(q, k, v, rule="paper", softcap=2.0, is_causal=True, query_scale=s)
    check_against_reverse_mode(function, q, k, v, s)
    check_against_reverse_mode(lambda s: function(q, k, v, s), s)
    check_against_reverse_mode(lambda q: function(q, k, v, s), q)
    check_against_reverse_mode(lambda v: function(q, k, v, s), v)


def test_rows_that_see_nothing():
    x = torch.full((2, 3), -torch.inf, dtype=torch.float64)
    for function in (softmax, log_softmax):
        _, tangent = torch.func.jvp(lambda x: function(x, rule="paper"), (x,), (torch.ones_like(x),))
        assert (tangent == 0).all()


def test_jacfwd_and_16_bits():
    x = torch.randn(6, dtype=torch.float64)
    for function in (softmax, log_softmax):
        torch.testing.assert_close(torch.func.jacfwd(lambda x: function(x, rule="paper"))(x),
                                   torch.func.jacrev(lambda x: function(x, rule="paper"))(x), atol=1e-9, rtol=1e-7)
    x = torch.randn(3, 50).bfloat16()
    _, tangent = torch.func.jvp(lambda x: softmax(x, rule="paper"), (x,), (torch.ones_like(x),))
    assert tangent.dtype == torch.bfloat16 and tangent.isfinite().all()
    q = torch.randn(1, 1, 3, 8).half()
    _, tangent = torch.func.jvp(lambda q: attention(q, q, q, rule="paper"), (q,), (torch.ones_like(q),))
    assert tangent.dtype == torch.float16 and tangent.isfinite().all()


def test_dual_tensors():
    x, t = float64(2, 5), float64(2, 5)
    with forward_ad.dual_level():
        out = softmax(forward_ad.make_dual(x, t), rule="paper")
        tangent = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: softmax(x, rule="paper"), (x,), (t,))[1])
