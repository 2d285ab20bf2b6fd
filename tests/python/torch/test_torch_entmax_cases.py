"""The situations that the tests of the published package entmax put it in, with its outputs and gradients as expectation."""

import pytest

torch = pytest.importorskip("torch")
published = pytest.importorskip("entmax")

from whet.torch import Entmax, softmax

ALPHAS = (1.2, 1.25, 1.5, 1.75, 2.0, 2.25)
EXACT = {"sparsemax": (published.sparsemax, 2.0), "entmax15": (published.entmax15, 1.5)}
CLOSE = dict(rtol=1e-6, atol=1e-8)


def bisected(x, alpha, dim=-1):
    return published.entmax_bisect(x, alpha, dim, n_iter=100)


def drawn(*shape, seed=0, factor=1.0):
    return factor * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same(ours, theirs, x):
    """Outputs, and gradients of a weighted sum of them."""
    outputs, gradients = [], []
    for function in (ours, theirs):
        leaf = x.clone().requires_grad_()
        outputs.append(function(leaf))
        weights = drawn(*x.shape, seed=1)
        gradients.append(torch.autograd.grad((outputs[-1] * weights).sum(), leaf)[0])
    torch.testing.assert_close(*outputs, **CLOSE)
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("dim", (0, 1, 2, 3))
@pytest.mark.parametrize("name", EXACT)
def test_any_dimension(name, dim):
    x = drawn(3, 4, 2, 5)
    assert_same(lambda x: softmax(x, dim, normalizer=name), lambda x: EXACT[name][0](x, dim), x)
    torch.autograd.gradcheck(lambda x: softmax(x, dim, normalizer=name), x.requires_grad_())


@pytest.mark.parametrize("dim", (0, 1, 2, 3))
def test_an_alpha_for_each_row(dim):
    """whet's rows share an alpha: one call for each."""
    x = drawn(3, 4, 2, 5)
    shape = [1 if axis == dim else size for axis, size in enumerate(x.shape)]
    alphas = 1.05 + 1.5 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = bisected(x, alphas, dim).movedim(dim, -1).flatten(0, -2)
    for row, alpha, weights in zip(x.movedim(dim, -1).flatten(0, -2), alphas.flatten(), expected, strict=True):
        torch.testing.assert_close(softmax(row, normalizer=f"entmax:{float(alpha)!r}"), weights, **CLOSE)


@pytest.mark.parametrize("factor", (0.00001, 0.5, 10000.0))
@pytest.mark.parametrize("dim", (0, 1, 2))
def test_logits_of_any_size(dim, factor):
    """With as many keys in the support: all, some, one."""
    x = drawn(3, 4, 5, factor=factor)
    for name, (function, alpha) in EXACT.items():
        weights, stats = softmax(x, dim, normalizer=name, return_stats=True)
        expected = function(x, dim)
        torch.testing.assert_close(weights, expected, **CLOSE)
        torch.testing.assert_close(weights, bisected(x, alpha, dim), **CLOSE)
        support = (expected > 0).sum(dim)
        torch.testing.assert_close(stats.support.reshape(support.shape).to(support.dtype), support)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("alpha", ALPHAS)
def test_hidden_keys_change_nothing(alpha, dtype):
    x = drawn(2, 6).to(dtype)
    x[:, 3:] = -torch.inf
    normalizer = f"entmax:{alpha}"
    weights = softmax(x, normalizer=normalizer)
    assert (weights[:, 3:] == 0).all()
    torch.testing.assert_close(weights[:, :3], softmax(x[:, :3], normalizer=normalizer))
    torch.testing.assert_close(weights, bisected(x, alpha), rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_to_logits_and_alpha(alpha):
    x = drawn(4, 6)
    assert_same(lambda x: softmax(x, normalizer=f"entmax:{alpha}"), lambda x: bisected(x, alpha), x)
    learned = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, a: softmax(x, normalizer=Entmax(a)), (x.requires_grad_(), learned), eps=1e-5)


@pytest.mark.parametrize("name", EXACT)
def test_the_exact_ones_are_what_bisection_finds(name):
    x = drawn(4, 6, factor=0.5).float()
    torch.testing.assert_close(softmax(x, normalizer=name), bisected(x, EXACT[name][1]), rtol=1e-5, atol=1e-6)
