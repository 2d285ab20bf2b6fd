"""whet.torch.softmax against torch.softmax, over what torch's own tests of it cover; rules against the oracle."""

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", minversion="2.6")
import whet
from whet.torch import log_softmax, softmax

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1,), (7,), (2, 5), (1, 16), (64, 3), (3, 4, 5), (2, 1, 4, 3), (2, 3, 2, 2, 3), (31, 33), (4, 1025),
          (1, 1, 1)]


def close(found, expected, dtype):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch(shape, dtype):
    for dim in range(-len(shape), len(shape)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        dout = torch.randn(shape, dtype=dtype)
        found, expected = softmax(x, dim), torch.softmax(y, dim)
        found.backward(dout)
        expected.backward(dout)
        close(found, expected, dtype)
        close(x.grad, y.grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_logarithms_are_those_of_torch(shape, dtype):
    for dim in range(-len(shape), len(shape)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        dout = torch.randn(shape, dtype=dtype)
        found, expected = log_softmax(x, dim), torch.log_softmax(y, dim)
        found.backward(dout)
        expected.backward(dout)
        close(found, expected, dtype)
        torch.testing.assert_close(x.grad, y.grad, atol=10 * TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype])


def test_logarithms_of_hidden_keys():
    x = torch.randn(2, 5, dtype=torch.float64)
    x[0, 1] = -torch.inf
    where = torch.tensor([True, True, True, False, True])
    for rule in oracle.RULES:
        logs, stats = log_softmax(x, rule=rule, where=where, return_stats=True)
        np.testing.assert_allclose(logs, whet.log_softmax(x.numpy(), rule=rule, where=where.numpy()), atol=1e-9)
        assert torch.equal(stats.beta, softmax(x, rule=rule, where=where, return_stats=True)[1].beta)
    x = torch.full((2, 3), -torch.inf, requires_grad=True)
    logs = log_softmax(x, rule="paper")
    assert (logs == -torch.inf).all()
    logs.backward(torch.ones(2, 3))
    assert (x.grad == 0).all()
    assert log_softmax(torch.tensor(3.0), 0).item() == 0


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_out(function):
    x = torch.randn(3, 5)
    for out in (torch.empty(3, 5), torch.empty(5, 3).mT):
        assert function(x, rule="paper", out=out) is out
        assert torch.equal(out, function(x, rule="paper"))
    number = torch.empty(())
    function(torch.tensor(3.0), 0, out=number)
    assert number == (1 if function is softmax else 0)
    with pytest.raises(ValueError, match=r"^out: is \(3, 4\) of torch.float32, must be as the result, \(3, 5\)"):
        function(x, out=torch.empty(3, 4))
    with pytest.raises(TypeError, match="^out: is a list"):
        function(x, out=[1.0])
    with pytest.raises(ValueError, match="^out: can't be given where a gradient is recorded"):
        function(x.requires_grad_(), out=out)


def test_normalizers_go_by_name():
    x = torch.randn(2, 5, requires_grad=True)
    assert torch.equal(softmax(x, normalizer="softmax"), softmax(x))
    hard = softmax(x, normalizer="hard")
    assert torch.equal(hard, torch.eye(5)[x.argmax(-1)])
    assert (torch.autograd.grad(hard[:, 0].sum(), x)[0] == 0).all()
    _, tangent = torch.func.jvp(lambda x: softmax(x, normalizer="hard", rule="paper"), (x.detach(),), (torch.ones(2, 5),))
    assert (tangent == 0).all()
    for given in (x, x.detach()):
        with pytest.raises(ValueError, match="^normalizer.*softmax"):
            softmax(given, normalizer="softest")


@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("asked", [torch.float32, torch.float64])
def test_dtype_converts_first(given, asked):
    x = (4 * torch.randn(3, 5)).to(given)
    close(softmax(x, 1, asked), torch.softmax(x, 1, asked), torch.float32)
    x = torch.randn(3, 5, dtype=torch.float16, requires_grad=True)
    softmax(x, dtype=torch.float32)[:, 0].sum().backward()
    assert x.grad.dtype == torch.float16


def test_a_number_is_a_row_of_one():
    x = torch.tensor(3.0, requires_grad=True)
    weights, stats = softmax(x, 0, return_stats=True, rule="paper")
    assert weights.shape == () and weights.item() == 1 and stats.count.item() == 1
    assert softmax(x.detach(), -1).item() == 1
    with pytest.raises(ValueError, match="^dim:"):
        softmax(x, 1)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_zero_sizes(shape):
    for dim in range(len(shape)):
        x = torch.empty(shape, requires_grad=True)
        weights, stats = softmax(x, dim, rule="paper", return_stats=True)
        assert weights.shape == shape and stats.beta.shape == shape[:dim] + shape[dim + 1:]
        weights.sum().backward()
        assert x.grad.shape == shape
        assert softmax(x.detach(), dim).shape == shape


VIEWS = [lambda x: x.T, lambda x: x[::2, 1:], lambda x: x[:1].expand(5, -1), lambda x: x[:, :1].expand(-1, 4),
         lambda x: x.unfold(1, 3, 1), lambda x: torch.complex(x, x).conj().imag, lambda x: x[None, :, None],
         lambda x: x.to(memory_format=torch.preserve_format).diagonal()]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_views(view, needs_gradient):
    x = torch.randn(6, 8, requires_grad=needs_gradient)
    given = view(x)
    expected = softmax(given.detach().resolve_neg().clone(), rule="paper")
    found = softmax(given, rule="paper")
    assert torch.equal(found, expected) and found.is_contiguous()
    assert found.requires_grad == needs_gradient


def test_large_offsets_and_infinities():
    """As torch.softmax, but that a row which sees nothing gives 0 instead of NaN."""
    x = torch.tensor([[1e4, 1e4 + 1, -1e4], [-torch.inf, 0, 1], [3e38, -3e38, 0]])
    close(softmax(x), torch.softmax(x, -1), torch.float32)
    hidden = torch.full((2, 3), -torch.inf, requires_grad=True)
    assert torch.softmax(hidden, -1).isnan().all()
    weights = softmax(hidden, rule="paper")
    weights.sum().backward()
    assert (weights == 0).all() and (hidden.grad == 0).all()
    nan = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    assert softmax(nan).isnan().any(-1).tolist() == [True, False]


@pytest.mark.parametrize("rule", oracle.RULES)
def test_rules(rng, rule):
    x = 3 * rng.normal(size=(5, 40))
    tolerance = 2e-5 if rule.startswith("target") else 1e-12
    expected = oracle.softmax(x, rule)
    np.testing.assert_allclose(softmax(torch.from_numpy(x), rule=rule), expected, atol=tolerance)
    np.testing.assert_allclose(softmax(torch.from_numpy(x), rule=whet.rule(rule)), expected, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (6,), ()])
def test_where_broadcasts_and_hides(shape):
    x = torch.randn(4, 6, requires_grad=True)
    where = torch.rand(shape) < 0.6
    weights = softmax(x, rule="paper", where=where)
    weights.square().sum().backward()
    hidden = ~where.expand(4, 6)
    assert (weights[hidden] == 0).all() and (x.grad[hidden] == 0).all()
    filled = softmax(x.detach().masked_fill(hidden, -torch.inf), rule="paper")
    assert torch.equal(weights, filled)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_stats(needs_gradient):
    x = torch.randn(2, 9, 3, requires_grad=needs_gradient)
    weights, stats = softmax(x, 1, rule="paper", return_stats=True)
    plain = torch.softmax(x.detach().double(), 1)
    assert type(stats) is whet.torch.Stats
    for field in stats:
        assert field.shape == (2, 3) and field.dtype == torch.float64 and not field.requires_grad
    torch.testing.assert_close(stats.entropy, -(plain * plain.log()).sum(1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(stats.sharp_peak, weights.detach().double().amax(1), atol=1e-6, rtol=1e-6)
    assert weights.requires_grad == needs_gradient
