"""The alpha of entmax as an array that is learned: gradients in both modes, transformations, wrong values."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
import whet
from jax.test_util import check_grads
from whet.jax import Entmax, attention, softmax

ALPHAS = [1.001, 1.3, 1.5, 2.0, 3.0, 4.0]


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def both_sides(alpha):
    """A step for differences, and the value nearest to alpha that has values on both sides."""
    step = min(1e-6, (alpha - 1) / 100)
    return step, min(alpha, 4 - step)


def close(found, expected, tolerance):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, expected)


# ---- rows


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("rule", ["none", "fixed:0.5", "paper"])
def test_gradients_of_rows(x64, rule, alpha):
    """Both modes against differences and each other, and alpha against NumPy's gradient of each row."""
    x, dout = normal(3, 9, dtype=np.float64), normal(3, 9, seed=1, dtype=np.float64)
    where = (np.random.default_rng(2).random((3, 9)) < 0.8) & (np.arange(9) < [[9], [9], [1]])
    weights = jax.jit(lambda x, alpha: softmax(x, rule=rule, where=where, normalizer=Entmax(alpha)))
    dx, dalpha = jax.vjp(weights, x, jnp.float64(alpha))[1](dout)
    options = {"where": where, "normalizer": f"entmax:{alpha}", "rule": rule}
    expected, rows = whet.softmax_backward(np.asarray(x), np.asarray(dout), return_dparameter=True, **options)
    np.testing.assert_array_equal(dx, expected)
    np.testing.assert_allclose(dalpha, rows.sum(), rtol=1e-13)

    step, inside = both_sides(alpha)
    _, along = jax.jvp(lambda alpha: weights(x, alpha), (inside,), (1.0,))
    differences = (weights(x, inside + step) - weights(x, inside - step)) / (2 * step)
    np.testing.assert_allclose(along, differences, rtol=1e-3, atol=1e-4)
    dalpha = jax.vjp(lambda alpha: weights(x, alpha), inside)[1](dout)[0]
    np.testing.assert_allclose((along * dout).sum(), dalpha, rtol=1e-8 if alpha <= 2 else 1e-4, atol=1e-9)
    if 1.1 < alpha < 4:
        check_grads(weights, (x, alpha), 1, atol=1e-4, rtol=1e-4, eps=1e-6)


@pytest.mark.parametrize("alpha", [1.3, 3.0])
def test_torch_agrees(alpha):
    torch = pytest.importorskip("torch", minversion="2.6")
    import whet.torch
    x, dout = normal(4, 30), normal(4, 30, seed=1)
    found = jax.vjp(lambda x, alpha: softmax(x, normalizer=Entmax(alpha)), x, jnp.float32(alpha))[1](dout)
    given = torch.tensor(np.asarray(x), requires_grad=True), torch.tensor(alpha, requires_grad=True)
    whet.torch.softmax(given[0], normalizer=whet.torch.Entmax(given[1])).backward(torch.tensor(np.asarray(dout)))
    np.testing.assert_array_equal(found[0], given[0].grad)
    np.testing.assert_allclose(found[1], given[1].grad, rtol=1e-6)


def test_a_number_is_the_name():
    x = normal(4, 30)
    expected = softmax(x, normalizer="entmax:1.25")
    for alpha in (1.25, np.float32(1.25), np.array(1.25), jnp.array([1.25]), jnp.bfloat16(1.25), [1.25]):
        np.testing.assert_array_equal(softmax(x, normalizer=Entmax(alpha)), expected)
    assert "1.25" in str(jax.make_jaxpr(partial(softmax, normalizer=Entmax(1.25)))(x))
    by_argument = jax.jit(lambda x, normalizer: softmax(x, normalizer=normalizer))
    np.testing.assert_array_equal(by_argument(x, Entmax(1.25)), expected)  # a number in a jitted function's argument


def test_the_value_is_read_when_the_program_runs():
    x, traced = normal(4, 30), []

    @jax.jit
    def weights(alpha):
        traced.append(alpha)
        return softmax(x, normalizer=Entmax(alpha))

    for alpha in (1.25, 2.0, 3.0):
        np.testing.assert_array_equal(weights(alpha), softmax(x, normalizer=f"entmax:{alpha}"))
    assert len(traced) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_gradient_has_the_shape_and_dtype_of_alpha(dtype):
    x, alpha = normal(4, 30), jnp.array([1.25], dtype)
    gradient = jax.grad(lambda alpha, x: softmax(x, normalizer=Entmax(alpha))[:, 0].astype(jnp.float32).sum())
    found = gradient(alpha, x)
    _, rows = whet.softmax_backward(np.asarray(x), np.tile(np.eye(30, dtype=np.float32)[0], (4, 1)),
                                    normalizer="entmax:1.25", return_dparameter=True)
    assert found.shape == (1,) and found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, float), [rows.sum()], rtol=1e-2)
    np.testing.assert_allclose(np.asarray(gradient(alpha, x.astype(dtype)), float), [rows.sum()], rtol=3e-2, atol=3e-3)
    weights = lambda alpha: softmax(x.astype(dtype), normalizer=Entmax(alpha))
    _, tangent = jax.jvp(weights, (alpha,), (jnp.ones_like(alpha),))
    assert tangent.dtype == dtype
    np.testing.assert_allclose(np.asarray(tangent, float)[:, 0].sum(), rows.sum(), rtol=3e-2, atol=3e-3)


def test_several_axes_stats_and_rows_that_see_nothing():
    x, alpha = normal(2, 3, 4), jnp.float32(1.7)
    weights, stats = softmax(x, (0, 2), normalizer=Entmax(alpha), return_stats=True)
    np.testing.assert_array_equal(stats.support, (weights > 0).sum((0, 2)))
    gradients = jax.grad(lambda x, axis: softmax(x, axis, normalizer=Entmax(alpha)).max())
    np.testing.assert_allclose(gradients(x, (0, 2)), jnp.moveaxis(gradients(
        jnp.moveaxis(x, 1, 0).reshape(3, 8), -1).reshape(3, 2, 4), 0, 1), atol=1e-6)
    nothing = lambda alpha: softmax(jnp.full((2, 3), -jnp.inf), normalizer=Entmax(alpha)).sum()
    assert jax.grad(nothing)(1.5) == 0 and jax.jvp(nothing, (1.5,), (1.0,))[1] == 0
    with_nan = lambda alpha: softmax(jnp.array([[0.0, jnp.nan], [0.0, 0.5]]), normalizer=Entmax(alpha))
    tangent = jax.jvp(with_nan, (1.5,), (1.0,))[1]
    assert jnp.isnan(tangent[0]).all() and jnp.isfinite(tangent[1]).all()


# ---- attention


def heads(dtype=np.float64):
    shapes = (2, 3, 4, 5), (2, 6, 2, 5), (2, 6, 2, 2), (4, 3, 6), (4,)
    return tuple(normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


@pytest.mark.parametrize("rule", ["none", "paper"])
@pytest.mark.parametrize("alpha", [1.001, 1.5, 1.8, 3.0, (1.8, 1.3, 2.0, 1.5)])
def test_gradients_of_attention(x64, alpha, rule):
    def output(q, k, v, bias, sinks, alpha):
        return attention(q, k, v, bias, sinks=sinks, normalizer=Entmax(alpha), is_causal=True, rule=rule)

    given, alpha = heads(), jnp.asarray(alpha)
    out, pull = jax.vjp(output, *given, alpha)
    dout = normal(*out.shape, seed=9, dtype=np.float64)
    *gradients, dalpha = pull(dout)
    step = min(1e-6, float(alpha.min() - 1) / 100)
    for head in range(alpha.size):
        side = jnp.zeros(alpha.size).at[head].set(step).reshape(alpha.shape)
        above, below = (output(*given, alpha + sign * side) for sign in (1, -1))
        slope = ((above - below) * dout).sum() / (2 * step)
        np.testing.assert_allclose(dalpha.reshape(-1)[head], slope, rtol=1e-3, atol=1e-4)

    # Other gradients: those of fixed alphas. Forward mode: <dout, J t> from either side.
    if alpha.ndim == 0:
        named = lambda *given: attention(*given[:4], sinks=given[4], normalizer=f"entmax:{alpha}", is_causal=True, rule=rule)
        close(gradients, list(jax.vjp(named, *given)[1](dout)), 1e-12)
    along = tuple(normal(*x.shape, seed=20 + i, dtype=np.float64) for i, x in enumerate((*given, alpha)))
    _, tangent = jax.jvp(output, (*given, alpha), along)
    expected = sum((gradient * t).sum() for gradient, t in zip((*gradients, dalpha), along))
    np.testing.assert_allclose((tangent * dout).sum(), expected, rtol=1e-7 if alpha.max() <= 2 else 1e-4, atol=1e-7)
    _, tangent = jax.jvp(lambda alpha: output(*given, alpha), (alpha,), (along[-1],))
    np.testing.assert_allclose((tangent * dout).sum(), (dalpha * along[-1]).sum(),
                               rtol=1e-7 if alpha.max() <= 2 else 1e-4, atol=1e-7)


def test_numpy_agrees():
    q, k, v, bias, sinks = heads(np.float32)
    dout, alpha = normal(2, 3, 4, 2, seed=9), 1.25
    found = jax.vjp(lambda alpha: attention(q, k, v, bias, sinks=sinks, normalizer=Entmax(alpha)), jnp.float32(alpha))
    q, k, v, dout_heads_first = (np.asarray(x).swapaxes(1, 2) for x in (q, k, v, dout))
    expected = whet.attention_backward(q, k, v, dout_heads_first, bias=np.asarray(bias), sinks=np.asarray(sinks),
                                       normalizer=f"entmax:{alpha}", return_dparameter=True)
    np.testing.assert_allclose(found[1](dout)[0], expected.dparameter.sum(), rtol=1e-5)


def test_one_alpha_per_head_is_each_head_alone():
    q, k, v = normal(2, 20, 4, 8), normal(2, 30, 2, 8, seed=1), normal(2, 30, 2, 6, seed=2)
    alphas, rules = [1.25, 1.5, 2.0, 3.0], ["none", "paper", "fixed:2", "log-length:4"]
    rng = np.random.default_rng(3)
    mask, scale, sinks = rng.random((2, 1, 20, 30)) < 0.8, normal(2, 1, 4, seed=4), normal(4, seed=5)
    options = {"mask": mask, "key_value_seq_lengths": jnp.array([30, 7]), "return_stats": True, "top_k": 3,
               "column_sums": True}
    out, stats, extras = attention(q, k, v, rule=rules, query_scale=scale, sinks=sinks,
                                   normalizer=Entmax(jnp.array(alphas)), **options)
    for head, (alpha, rule) in enumerate(zip(alphas, rules)):
        one, key = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        expected, expected_stats, expected_extras = attention(
            q[:, :, one], k[:, :, key], v[:, :, key], rule=rule, query_scale=scale[:, :, one], sinks=sinks[one],
            normalizer=f"entmax:{alpha}", **options)
        np.testing.assert_array_equal(out[:, :, one], expected)
        for found, exact in zip((*stats, *extras[1:4]), (*expected_stats, *expected_extras[1:4])):
            np.testing.assert_array_equal(found[:, :, one], exact)
    none = attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], normalizer=Entmax(jnp.zeros(0)))
    assert none.shape == (2, 20, 0, 6)


def test_alpha_is_learned():
    """Attention over 64 keys of which one matters: alpha rises until the others have no weight."""
    q, k, v = normal(1, 16, 2, 8), normal(1, 64, 2, 8, seed=1), normal(1, 64, 2, 4, seed=2)
    best = jnp.einsum("btnh,bsnh->btns", q, k).argmax(-1)
    target = jnp.take_along_axis(v, best.swapaxes(1, 2)[0].T[None, ..., None], 1)

    @jax.jit
    def step(raw):
        def loss(raw):
            return ((attention(q, k, v, normalizer=Entmax(1 + 3 * jax.nn.sigmoid(raw))) - target) ** 2).mean()
        value, gradient = jax.value_and_grad(loss)(raw)
        return value, raw - 0.2 * jnp.sign(gradient)

    raw, losses = jnp.zeros(2), []
    for _ in range(30):
        loss, raw = step(raw)
        losses.append(loss)
    assert losses[-1] < 0.7 * losses[0] and (1 + 3 * jax.nn.sigmoid(raw) > 2.6).all()


# ---- what JAX does with functions


def loss_of_rows(x, alpha):
    return softmax(x, normalizer=Entmax(alpha))[:, 0].sum()


def loss_of_attention(q, alpha):
    k = normal(6, 2, 8, seed=1)
    return (attention(q, k, k, normalizer=Entmax(alpha)) ** 2).sum()


@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0), (0, None)])
@pytest.mark.parametrize("case", ["rows", "attention", "attention of a batch", "one per head"])
def test_vmap(case, in_axes):
    """Gradients to both under vmap, and the gradient of a sum over vmap, are those of a loop."""
    loss = loss_of_rows if case == "rows" else loss_of_attention
    if case == "attention of a batch":
        loss = lambda q, alpha: (attention(q, q, q, normalizer=Entmax(alpha)) ** 2).sum()
    shape = {"rows": (3, 10), "attention of a batch": (2, 3, 2, 8)}.get(case, (3, 2, 8))
    x, alpha = normal(4, *shape), jnp.array([1.2, 1.5, 2.0, 1.7])
    if case == "one per head":
        alpha = jnp.stack([alpha, alpha[::-1]], 1)
    given = tuple(values if axis == 0 else values[0] for values, axis in zip((x, alpha), in_axes))
    gradients = jax.grad(loss, (0, 1))
    loop = [gradients(*(values if axis is None else values[i] for values, axis in zip(given, in_axes))) for i in range(4)]
    expected = jax.tree.map(lambda *values: jnp.stack(values), *loop)
    close(jax.jit(jax.vmap(gradients, in_axes))(*given), expected, 2e-5)
    summed = jax.grad(lambda *given: jax.vmap(loss, in_axes)(*given).sum(), (0, 1))(*given)
    close(summed, tuple(values if axis == 0 else values.sum(0) for values, axis in zip(expected, in_axes)), 5e-5)


def test_vmap_of_vmap():
    """alpha along one axis, logits along another, both and neither."""
    x, alphas = normal(2, 3, 10), jnp.array([1.2, 1.5, 3.0])
    loss = lambda x, alpha: softmax(x, normalizer=Entmax(alpha))[0]
    for gradients in (jax.grad(loss, (0, 1)), lambda *given: jax.jvp(loss, given, tuple(map(jnp.ones_like, given)))):
        outer = jax.vmap(jax.vmap(gradients, (None, 0)), (0, None))(x[:, 0], alphas)
        inner = jax.vmap(jax.vmap(gradients, (0, None)), (None, 0))(x[:, 0], alphas)
        close(jax.tree.map(lambda values: values.swapaxes(0, 1), inner), outer, 1e-6)
        both = jax.vmap(jax.vmap(gradients), (0, None))(x, alphas)
        for i in range(2):
            for j in range(3):
                of = partial(jax.tree.map, lambda values: values[i, j])
                close(of(outer), gradients(x[i, 0], alphas[j]), 1e-6)
                close(of(both), gradients(x[i, j], alphas[j]), 1e-6)


def test_stats_under_vmap():
    x, alphas = normal(2, 3, 10), jnp.array([1.2, 2.0])
    weights, stats = jax.vmap(lambda x, alpha: softmax(x, normalizer=Entmax(alpha), return_stats=True))(x, alphas)
    np.testing.assert_array_equal(stats.support, (weights > 0).sum(-1))
    shared = jax.vmap(lambda alpha: softmax(x[0], 0, normalizer=Entmax(alpha)), out_axes=1)(alphas)
    for i, alpha in enumerate(alphas):
        np.testing.assert_array_equal(shared[:, i], softmax(x[0], 0, normalizer=Entmax(alpha)))


def test_jacobians_scan_and_checkpoint():
    x = normal(10)
    weights = lambda alpha: softmax(x, normalizer=Entmax(alpha))
    np.testing.assert_allclose(jax.jacfwd(weights)(1.4), jax.jacrev(weights)(1.4), rtol=1e-4, atol=1e-6)

    def steps(alpha, body):
        out, _ = jax.lax.scan(lambda carry, _: (body(carry, alpha), None), x, None, length=3)
        return (out**2).sum()

    once = lambda carry, alpha: softmax(3 * carry, normalizer=Entmax(alpha))
    plain, again = (jax.jit(jax.grad(partial(steps, body=body)))(1.4) for body in (once, jax.checkpoint(once)))
    np.testing.assert_array_equal(plain, again)
    unrolled = jax.grad(lambda alpha: (once(once(once(x, alpha), alpha), alpha) ** 2).sum())(1.4)
    np.testing.assert_allclose(plain, unrolled, rtol=1e-5)


def test_shard_map():
    """alpha is the same everywhere, and its gradient the sum of those of the parts."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("d",))
    of_rows, everywhere = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    weights = lambda x, alpha: softmax(x, normalizer=Entmax(alpha))
    sharded = jax.shard_map(weights, mesh=mesh, in_specs=(of_rows, everywhere), out_specs=of_rows)
    found, expected = (jax.jit(jax.grad(lambda *given: (f(*given) ** 2).sum(), (0, 1)))(normal(4, 9), jnp.float32(1.4))
                       for f in (sharded, weights))
    close(found, expected, 1e-6)


# ---- errors


@pytest.mark.parametrize("alpha, kind, text", [
    (1.0, ValueError, "alpha: is 1.0, must be above 1 and at most 4"), (5, ValueError, "alpha: is 5.0, must be"),
    (float("nan"), ValueError, "alpha: is nan"), (jnp.array(4.5), ValueError, "alpha: is 4.5"),
    (jnp.array([1.5, 0.5]), ValueError, "alpha: is 0.5"), (np.full(3, 1.5), ValueError, r"alpha: its shape is \(3,\), must"),
    (jnp.full((2, 2), 1.5), ValueError, r"alpha: its shape is \(2, 2\), must"),
    (jnp.array(2), TypeError, "alpha: its dtype is int32, must be floats"), ("two", TypeError, "alpha: ")])
def test_wrong_alphas(alpha, kind, text):
    q = normal(1, 5, 2, 4)
    for call in (lambda: softmax(q, normalizer=Entmax(alpha)), lambda: attention(q, q, q, normalizer=Entmax(alpha))):
        with pytest.raises(kind, match=f"^{text}"):
            call()


@pytest.mark.parametrize("alpha", [1.0, 4.5, jnp.nan])
def test_a_traced_alpha_out_of_range_stops_the_program(alpha):
    q = normal(1, 5, 2, 4)
    for function in (lambda alpha: softmax(q, normalizer=Entmax(alpha)),
                     lambda alpha: attention(q, q, q, normalizer=Entmax(alpha))):
        with pytest.raises((ValueError, RuntimeError), match=f"alpha: is {alpha:g}, must be above 1 and at most 4"):
            jax.block_until_ready(jax.jit(function)(alpha))


def test_log_softmax_and_names_without_parameter():
    with pytest.raises(ValueError, match="^normalizer"):
        softmax(normal(5), normalizer="entmax")
