"""Normalizers from NumPy: against their definitions, by other means than the library's."""

import numpy as np
import pytest
import whet

NAMES = ["softmax", "sparsemax", "entmax15", "entmax:1.3", "entmax:2.5", "top-k:3", "hard", "straight-through", "sigmoid",
         "relu", "softpick"]


def entmax(s, alpha):
    """By bisection over the threshold."""
    low, high = -1.0, 0.0
    y = (alpha - 1) * (s - s.max())
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if np.sum(np.maximum(y - tau, 0) ** (1 / (alpha - 1))) > 1 else (low, tau)
    return np.maximum(y - low, 0) ** (1 / (alpha - 1))


def expected(name, s):
    kind, _, parameter = name.partition(":")
    e = np.exp(s - s.max())
    match kind:
        case "softmax":
            return e / e.sum()
        case "sparsemax" | "entmax15" | "entmax":
            return entmax(s, {"sparsemax": 2.0, "entmax15": 1.5}.get(kind) or float(parameter))
        case "top-k":
            kept = e * (s >= np.sort(s)[-int(parameter)])
            return kept / kept.sum()
        case "hard" | "straight-through":
            return (s == s.max()) / np.sum(s == s.max())
        case "sigmoid":
            return 1 / (1 + len(s) * np.exp(-s))
        case "relu":
            return np.maximum(s, 0) / len(s)
        case "softpick":
            return np.maximum(np.expm1(s), 0) / np.sum(np.abs(np.expm1(s)))
    raise ValueError(name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", [None, "fixed:0.5", "log-length:3", "paper", "target-entropy:0.9"])
def test_rows(rng, name, rule):
    x = rng.normal(size=(6, 9))
    weights, stats = whet.softmax(x, rule=rule, normalizer=name, return_stats=True)
    for row, beta, given in zip(x, stats.beta, weights):
        np.testing.assert_allclose(given, expected(name, beta * row), atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_the_weights_of_its_logits_times_values(rng, name):
    q, k, v = (rng.normal(size=(2, 3, n, 4)) for n in (5, 7, 7))
    out, stats = whet.attention(q, k, v, normalizer=name, rule="log-length:4", return_stats=True)
    logits = q @ np.swapaxes(k, -1, -2) / 2
    weights = np.apply_along_axis(lambda s: expected(name, s), -1, np.asarray(stats.beta)[..., None] * logits)
    np.testing.assert_allclose(out, weights @ v, atol=1e-9)


def test_the_published_entmax_agrees(rng):
    torch, entmax_package = pytest.importorskip("torch"), pytest.importorskip("entmax")
    from_package = {"sparsemax": entmax_package.sparsemax, "entmax15": entmax_package.entmax15,
                    **{f"entmax:{a}": lambda x, dim, a=a: entmax_package.entmax_bisect(x, a, dim, n_iter=100)
                       for a in (1.1, 1.3, 1.5, 1.9, 2.0, 3.0)}}
    for scale in (0.1, 1, 8):
        x = scale * rng.normal(size=(5, 40))
        for name, function in from_package.items():
            tensor = torch.tensor(x, requires_grad=True)
            weights = function(tensor, dim=-1)
            np.testing.assert_allclose(whet.softmax(x, normalizer=name), weights.detach(), atol=1e-7, err_msg=name)
            dout = rng.normal(size=x.shape)
            weights.backward(torch.tensor(dout))
            np.testing.assert_allclose(whet.softmax_backward(x, dout, normalizer=name), tensor.grad,
                                       atol=2e-6 * tensor.grad.abs().max().item(), err_msg=name)


def test_any_axis(rng):
    """Where the published sparsemax and entmax15 with a partial sort go wrong: an axis before the last two."""
    x = rng.normal(size=(40, 3, 5))
    for name in ("sparsemax", "entmax15"):
        for axis in (0, -3):
            np.testing.assert_allclose(whet.softmax(x, axis, normalizer=name),
                                       np.moveaxis(whet.softmax(np.moveaxis(x, 0, -1).copy(), normalizer=name), -1, 0))


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax:1.3", "top-k:3", "sigmoid", "relu", "softpick"])
def test_element_types(rng, name, dtype, tolerance):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = rng.normal(size=(4, 12)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    weights = whet.softmax(x, normalizer=name)
    assert weights.dtype == x.dtype
    for row, given in zip(x.astype(float), weights.astype(float)):
        np.testing.assert_allclose(given, expected(name, row), atol=tolerance)


@pytest.mark.parametrize("name, message", [
    ("entmax:1", "parameter of entmax is '1', must be a number above 1 and at most 4"),
    ("entmax:4.5", "at most 4"), ("entmax", "is not a normalizer"), ("top-k:2.5", "a whole number above 0"),
    ("top-k:0", "a whole number above 0"), ("sparse", "normalizers are softmax, sparsemax, entmax15, entmax:P, top-k:P")])
def test_wrong_names(name, message):
    with pytest.raises(ValueError, match=message):
        whet.softmax(np.zeros(3), normalizer=name)


def test_support_and_threshold(rng):
    x = rng.normal(size=(6, 40))
    x[1, 3] = -np.inf
    of = {name: whet.softmax(x, normalizer=name, rule="fixed:2", return_stats=True) for name in NAMES}
    for name, (weights, stats) in of.items():
        np.testing.assert_array_equal(stats.support, (weights > 0).sum(-1), err_msg=name)
        at_it = name in ("top-k:3", "hard", "straight-through")
        above = (x >= stats.threshold[:, None] if at_it else x > stats.threshold[:, None]) & np.isfinite(x)
        np.testing.assert_array_equal(above, weights > 0, err_msg=name)
    np.testing.assert_array_equal(of["top-k:3"][1].threshold, np.sort(x)[:, -3])
    np.testing.assert_array_equal(of["hard"][1].threshold, x.max(-1))
    assert (of["softmax"][1].threshold == -np.inf).all() and (of["sigmoid"][1].threshold == -np.inf).all()
    assert (of["relu"][1].threshold == 0).all() and (of["softpick"][1].threshold == 0).all()


@pytest.mark.parametrize("alpha", [1.001, 1.3, 1.5, 2.0, 3.0, 4.0])
def test_gradient_to_alpha(rng, alpha):
    x, dout, step = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 4, 5)), min(1e-6, (alpha - 1) / 100)
    dx, dalpha = whet.softmax_backward(x, dout, 1, normalizer=f"entmax:{alpha}", return_dparameter=True)
    np.testing.assert_array_equal(dx, whet.softmax_backward(x, dout, 1, normalizer=f"entmax:{alpha}"))
    assert dalpha.shape == (3, 5) and dalpha.dtype == np.float64
    inside = min(alpha, 4 - step)
    above, below = (whet.softmax(x, 1, normalizer=f"entmax:{inside + side}") for side in (step, -step))
    np.testing.assert_allclose(dalpha, (dout * (above - below)).sum(1) / (2 * step), atol=2e-5)

    q, k, v, dout = rng.normal(size=(4, 2, 3, 7, 4))
    options = {"is_causal": True, "sinks": rng.normal(size=3)}
    found = whet.attention_backward(q, k, v, dout, normalizer=f"entmax:{alpha}", return_dparameter=True, **options)
    assert found.dparameter.shape == (2, 3, 7)
    above, below = (whet.attention(q, k, v, normalizer=f"entmax:{inside + side}", **options) for side in (step, -step))
    np.testing.assert_allclose(found.dparameter, (dout * (above - below)).sum(-1) / (2 * step), atol=2e-5)
    assert whet.attention_backward(q, k, v, dout, normalizer=f"entmax:{alpha}", **options).dparameter is None


def test_only_entmax_has_a_gradient_to_its_parameter(rng):
    x = rng.normal(size=(3, 4))
    for name in ("softmax", "sparsemax", "top-k:3"):
        with pytest.raises(ValueError, match=f"^dparameter: given, but the normalizer is {name}, must be entmax:P"):
            whet.softmax_backward(x, x, normalizer=name, return_dparameter=True)
        with pytest.raises(ValueError, match="^dparameter: given, but"):
            whet.attention_backward(x, x, x, x, normalizer=name, return_dparameter=True)
