"""Normalizers in torch: gradients, both modes, operators, compilers and transforms."""

import pytest
import torch
from whet.torch import attention, softmax

SMOOTH = ["sparsemax", "entmax15", "entmax:1.3", "top-k:3", "sigmoid", "relu", "softpick"]
TANGENTS = [name for name in SMOOTH if name != "softpick"]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rule", [None, "paper", "target-entropy:0.9"])
@pytest.mark.parametrize("name", SMOOTH)
def test_rows_gradcheck(name, rule):
    check = {"check_forward_ad": name in TANGENTS}
    assert torch.autograd.gradcheck(lambda x: softmax(x, rule=rule, normalizer=name), draw(4, 7), atol=1e-6, **check)


@pytest.mark.parametrize("name", SMOOTH)
def test_attention_gradcheck(name):
    q, k, v = draw(1, 2, 3, 4), draw(1, 2, 5, 4, seed=1), draw(1, 2, 5, 3, seed=2)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, is_causal=True, normalizer=name), (q, k, v),
                                    check_forward_ad=name in TANGENTS, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "relu"])
def test_sinks_of_separate_keys_in_forward_mode(name):
    q, k, v, sinks = draw(1, 2, 3, 4), draw(1, 2, 5, 4, seed=1), draw(1, 2, 5, 3, seed=2), draw(2, seed=3)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, normalizer=name, sinks=sinks.detach()), (q, k, v),
                                    check_forward_ad=True, atol=1e-6)


def test_softpick_has_no_forward_mode():
    with pytest.raises(ValueError, match="softpick can't be differentiated in forward mode"):
        torch.func.jvp(lambda x: softmax(x, normalizer="softpick"), (draw(3),), (torch.ones(3, dtype=torch.float64),))


def test_straight_through():
    x = draw(4, 6)
    weights = softmax(x, normalizer="straight-through", rule="fixed:2")
    assert torch.equal(weights, torch.nn.functional.one_hot(x.argmax(-1), 6).double())
    dout = draw(4, 6, seed=5).detach()
    given, = torch.autograd.grad(weights, x, dout)
    expected, = torch.autograd.grad(torch.softmax(2 * x, -1), x, dout)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("name", ["sparsemax", "entmax:1.3", "sigmoid"])
def test_compile_and_vmap(name):
    x = draw(3, 4, 8)
    plain = softmax(x, normalizer=name)
    compiled = torch.compile(lambda x: softmax(x, normalizer=name), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain)
    torch.testing.assert_close(torch.vmap(lambda x: softmax(x, normalizer=name))(x), plain)
    given, = torch.autograd.grad(compiled(x).square().sum(), x)
    expected, = torch.autograd.grad(plain.square().sum(), x)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("name", ["sparsemax", "softpick"])
def test_opcheck(name):
    x = draw(3, 8)
    torch.library.opcheck(torch.ops.whet.softmax.default, (x, None), {"dim": 1, "rule": "paper", "normalizer": name})
