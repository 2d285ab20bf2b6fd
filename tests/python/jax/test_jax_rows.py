"""whet.jax.softmax beside jax.nn.softmax and the oracle: values, gradients, edges, wrong arguments."""

import subprocess
import sys
from functools import partial

import numpy as np
import oracle
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
import whet
from jax.test_util import check_grads
from whet.jax import log_softmax, softmax

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2, jnp.float16: 2e-3}


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(a, b, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


# ---- where jax.nn.softmax stood


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 2), (1,), None, ()])
def test_values_and_gradients_over_axes(axis, dtype):
    x, c = normal(3, 5, 4, dtype=dtype), normal(3, 5, 4, seed=1, dtype=dtype)
    close(softmax(x, axis), jax.nn.softmax(x, axis), TOLERANCE[dtype])
    ours, theirs = (jax.grad(lambda x, f=f: (f(x, axis) * c).sum()) for f in (softmax, jax.nn.softmax))
    close(ours(x), theirs(x), 2 * TOLERANCE[dtype])
    assert softmax(x, axis).dtype == dtype and ours(x).dtype == dtype


@pytest.mark.parametrize("shape", [(3, 5, 4), (5, 1), (4,), (3, 1, 1), ()])
@pytest.mark.parametrize("axis", [-1, 1, (0, 2)])
def test_where(axis, shape):
    x, c = normal(3, 5, 4), normal(3, 5, 4, seed=1)
    where = jnp.asarray(np.random.default_rng(2).random(shape) < 0.6)
    close(softmax(x, axis, where), jax.nn.softmax(x, axis, where))
    ours, theirs = (jax.grad(lambda x, f=f: (f(x, axis, where) * c).sum()) for f in (softmax, jax.nn.softmax))
    # JAX's gradient is NaN for a row of which nothing is visible; ours is 0.
    close(ours(x), jnp.nan_to_num(theirs(x)))


def test_the_cases_of_jax_itself():
    x = jnp.array([5.5, 1.3, -4.2, 0.9])
    mask = jnp.array([True, False, True, True])
    check_grads(softmax, (x,), order=1, modes=["rev"], atol=3e-3, rtol=3e-3)
    check_grads(lambda x: softmax(x, where=mask), (x,), order=1, modes=["rev"], atol=3e-3, rtol=3e-3)
    filtered = jnp.array([value for value, visible in zip(x, mask) if visible])
    close(softmax(x, where=mask)[mask], softmax(filtered))
    close(softmax(x, where=mask).sum(), 1)
    assert softmax(x, where=mask)[1] == 0
    assert jnp.isfinite(jax.grad(lambda x: softmax(x)[1])(jnp.array([-jnp.inf, 0.9]))).all()
    assert jnp.isnan(softmax(jnp.array([jnp.inf, 0.0]))).all()
    close(softmax(jnp.ones((2, 8))), jnp.full((2, 8), 0.125))
    assert softmax(jnp.ones((0, 4))).shape == (0, 4) and softmax(jnp.ones((4, 0))).shape == (4, 0)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_integers(dtype):
    x = jnp.arange(5, dtype=dtype)
    close(softmax(x), jax.nn.softmax(x))
    assert softmax(x).dtype == jax.nn.softmax(x).dtype
    unsigned = x.astype(jnp.uint8)  # JAX subtracts the maximum before it makes them floats, which is wrong below 0
    close(softmax(unsigned), jax.nn.softmax(x))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int8, jnp.uint8, jnp.int32, jnp.int64, jnp.bfloat16, jnp.float64])
def test_dtypes_with_where(dtype, x64):
    """Integers and booleans become what jax.nn.softmax makes of them, which depends on where and on x64."""
    with jax.enable_x64(x64):
        x, where = jnp.arange(5).astype(dtype), jnp.array([True, False, True, True, False])
        found, expected = softmax(x, where=where), jax.nn.softmax(x, where=where)
        assert found.dtype == expected.dtype
        close(found, expected, 1e-2 if x.dtype == jnp.bfloat16 else 1e-14 if found.dtype == jnp.float64 else 2e-6)
        compiled = jax.jit(softmax)(x, where=where)
        assert compiled.dtype == expected.dtype and jnp.array_equal(compiled, found)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.int64, jnp.float64])
def test_dtypes_under_x64(dtype):
    with jax.enable_x64(True):
        x = jnp.arange(5).astype(dtype)
        assert softmax(x).dtype == jax.nn.softmax(x).dtype
        close(softmax(x), jax.nn.softmax(x), 1e-14 if softmax(x).dtype == jnp.float64 else 2e-6)


def test_booleans_need_a_mask():
    """As in JAX, which subtracts them only then."""
    for function in (softmax, jax.nn.softmax):
        with pytest.raises(TypeError, match="bool"):
            function(jnp.array([True, False]))


def test_masked_arrays_are_refused():
    with pytest.raises((TypeError, ValueError), match="^x: .*masked"):
        softmax(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


def test_many_axes():
    """More than whet itself takes; with a mask for which neighbouring axes can't all be made one."""
    x = normal(*(2,) * 11)
    where = jnp.asarray(np.random.default_rng(1).random((1, 2, 2, 1, 2, 2, 2, 2, 1, 2, 2)) < 0.7)
    close(softmax(x, 5), jax.nn.softmax(x, 5))
    close(softmax(x, 6, where), jax.nn.softmax(x, 6, where))


# ---- with a rule


@pytest.mark.parametrize("rule", oracle.RULES)
def test_rules_agree_with_the_oracle_and_with_numpy(rule):
    x = 2 * normal(6, 40)
    weights, stats = softmax(x, rule=rule, return_stats=True)
    close(weights, oracle.softmax(x, rule), 2e-5)
    expected, numbers = whet.softmax(np.asarray(x), rule=rule, return_stats=True)
    np.testing.assert_array_equal(weights, expected)
    for ours, theirs in zip(stats, numbers):
        assert ours.dtype == jnp.float32 and ours.shape == (6,)
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))


@pytest.mark.parametrize("hold_beta", [False, True])
@pytest.mark.parametrize("rule", oracle.RULES)
def test_gradients_with_a_rule(rule, hold_beta):
    with jax.enable_x64(True):
        x, c = 2 * normal(3, 12, dtype=jnp.float64), normal(3, 12, seed=1, dtype=jnp.float64)
        where = jnp.arange(12) != 5
        _, stats = softmax(x, where=where, rule=rule, return_stats=True)
        assert stats.beta.dtype == jnp.float64
        given = jax.grad(lambda x: (softmax(x, where=where, rule=rule, hold_beta=hold_beta) * c).sum())(x)
        if hold_beta:
            held = jax.grad(lambda x: (jax.nn.softmax(stats.beta[:, None] * x, where=where) * c).sum())(x)
            close(given, held, 1e-10)
        else:
            step = 1e-5
            for i in (0, 4, 5, 11):
                up, down = (softmax(x.at[:, i].add(s), where=where, rule=rule) for s in (step, -step))
                close(given[:, i], ((up - down) * c).sum(1) / (2 * step), 2e-4 if "target" in rule else 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
@pytest.mark.parametrize("rule, size", [("none", 3), ("fixed:1.5", 3), ("log-length:4", 3), ("ssmax:0.4", 3),
                                        ("target-entropy:0.2", 4), ("target-peak:0.9", 4), ("paper", 6),
                                        ("polynomial:0.3,1.2:hold=2", 6)])
def test_what_is_kept_for_backward(rule, size, dtype):
    """Beside the logits a few numbers per row, in the type of the arithmetic."""
    with jax.enable_x64(True):
        x = normal(3, 12, dtype=dtype)
        for normalizer, numbers in (("softmax", size), ("hard", 3)):
            _, pull = jax.vjp(partial(softmax, rule=rule, normalizer=normalizer), x)
            kept = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull)}
            assert kept == {(x.shape, x.dtype), ((3, numbers), jnp.promote_types(dtype, jnp.float32))}


def test_only_what_is_asked_for_is_computed():
    def results(function, **options):
        text = str(jax.make_jaxpr(partial(function, rule="paper", **options))(normal(3, 8)))
        return "saved" in text, "stats" in text

    def gradient(x, **options):
        return jax.grad(lambda x: softmax(x, **options)[0, 0])(x)

    assert results(softmax) == (False, False) and results(softmax, return_stats=True) == (False, True)
    assert results(gradient) == (True, False) and results(log_softmax) == (True, False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rule", oracle.RULES)
def test_gradients_are_those_that_keep_nothing(rule, dtype):
    """NumPy's function finds everything about a row again."""
    x, c = 2 * normal(6, 40, dtype=dtype), normal(6, 40, seed=1, dtype=dtype)
    where = (jnp.arange(40) % 7 > 0) & (jnp.arange(6) != 3)[:, None]
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-4 if "target" in rule else 1e-5
    for options in ({}, {"hold_beta": True}, {"normalizer": "hard"}):
        given = jax.grad(lambda x: (softmax(x, where=where, rule=rule, **options) * c).sum())(x)
        expected = whet.softmax_backward(np.asarray(x), np.asarray(c), rule=rule, where=np.asarray(where), **options)
        close(given, expected, tolerance)
        assert given.dtype == dtype and (given[3] == 0).all()


def test_stats_carry_no_gradient():
    def loss(x):
        weights, stats = softmax(x, rule="paper", return_stats=True)
        return (weights**2).sum() + stats.entropy.sum()

    x = normal(3, 8)
    np.testing.assert_array_equal(jax.grad(loss)(x), jax.grad(lambda x: (softmax(x, rule="paper")**2).sum())(x))


def test_rules_in_every_form(tmp_path):
    x = normal(2, 50)
    polynomial = whet.Polynomial([0.3, 1.2], hold=2.0)
    polynomial.save(tmp_path / "rule")
    np.testing.assert_array_equal(softmax(x, rule=polynomial), softmax(x, rule=f"polynomial:{tmp_path / 'rule'}"))
    np.testing.assert_array_equal(softmax(x, rule=whet.Paper()), softmax(x, rule="paper"))
    np.testing.assert_array_equal(softmax(x, rule=None), softmax(x, rule="none"))


# ---- edges


def test_not_finite():
    """Only the row that holds NaN or +inf is NaN; -inf and where hide, and what is hidden doesn't matter."""
    inf, nan = jnp.inf, jnp.nan
    x = jnp.array([[0.0, 1.0, 2.0], [nan, 0.0, 0.0], [inf, 0.0, 0.0], [-inf, -inf, -inf], [-inf, 1.0, 1.0],
                   [3e38, -3e38, 0.0]])
    weights, stats = softmax(x, rule="paper", return_stats=True)
    assert jnp.isnan(weights[1:3]).all() and jnp.isnan(stats.entropy[1:3]).all()
    np.testing.assert_array_equal(weights[3:], [[0, 0, 0], [0, 0.5, 0.5], [1, 0, 0]])
    assert stats.count.tolist()[3:] == [0, 2, 3] and stats.log_sum_exp[3] == -inf and stats.beta[3] == 1
    gradient = jax.grad(lambda x: (softmax(x, rule="paper")[:, 1]).sum())(x)
    assert jnp.isfinite(gradient[jnp.array([0, 3, 4, 5])]).all() and jnp.isnan(gradient[1:3]).all()
    hidden = softmax(x, where=jnp.array([False, True, True]), rule="paper")
    assert jnp.isfinite(hidden).all() and (hidden[:, 0] == 0).all()


def test_gradients_where_those_of_the_plain_formula_are_nan():
    """A rule written with jnp.where and -inf trains to NaN at the first masked key."""
    x = jnp.array([1.0, 0.5, 0.0, -jnp.inf])

    def plain(x):
        p = jax.nn.softmax(x)
        entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0.0))
        return jax.nn.softmax(jnp.maximum(1.0, jnp.polyval(jnp.array(oracle.PAPER), entropy)) * x)

    close(softmax(x, rule="paper"), plain(x))
    assert jnp.isnan(jax.grad(lambda x: plain(x)[0])(x)).any()
    given = jax.grad(lambda x: softmax(x, rule="paper")[0])(x)
    assert jnp.isfinite(given).all() and given[3] == 0
    close(given[:3], jax.grad(lambda x: plain(x)[0])(x[:3]))


def test_zero_sizes():
    for shape, axis in (((0, 4), 1), ((4, 0), 1), ((0, 4), 0), ((3, 0, 2), 1), ((0,), 0)):
        x = jnp.zeros(shape)
        weights, stats = softmax(x, axis, rule="paper", return_stats=True)
        assert weights.shape == shape and stats.beta.shape == tuple(np.delete(shape, axis))
        assert jax.grad(lambda x: softmax(x, axis, rule="paper").sum())(x).shape == shape


def test_x64_on_and_off():
    x = np.random.default_rng(0).normal(size=(3, 50))
    with jax.enable_x64(True):
        wide, stats = softmax(x, rule="target-entropy:0.5", return_stats=True)
        gradient = jax.grad(lambda x: softmax(x, rule="target-entropy:0.5")[0, 0])(jnp.asarray(x))
        assert wide.dtype == gradient.dtype == stats.beta.dtype == jnp.float64
        np.testing.assert_array_equal(wide, whet.softmax(x, rule="target-entropy:0.5"))
        mixed, stats = softmax(jnp.asarray(x, jnp.float32), rule="paper", return_stats=True)
        assert mixed.dtype == jnp.float32 and stats.beta.dtype == jnp.float64
        assert softmax(jnp.arange(3)).dtype == jax.nn.softmax(jnp.arange(3)).dtype
    narrow, stats = softmax(x, rule="target-entropy:0.5", return_stats=True)
    assert narrow.dtype == stats.beta.dtype == jnp.float32


# ---- wrong arguments


@pytest.mark.parametrize("kind, name, arguments", [
    (TypeError, "x", {"x": "text"}), (ValueError, "x", {"x": None}), (TypeError, "x", {"x": np.zeros(3, complex)}),
    (TypeError, "x", {"x": np.zeros(3, bool)}), (ValueError, "axis", {"axis": 2}), (ValueError, "axis", {"axis": -3}),
    (ValueError, "axis", {"axis": (0, 0)}), (TypeError, "axis", {"axis": 0.5}), (TypeError, "axis", {"axis": "0"}),
    (ValueError, "axis", {"x": 1.0}), (TypeError, "where", {"where": np.ones(3)}),
    (ValueError, "where", {"where": np.ones(4, bool)}),
    (ValueError, "where", {"where": np.ones((1, 2, 3), bool)}), (ValueError, "rule", {"rule": "sharp"}),
    (TypeError, "rule", {"rule": 2}), (TypeError, "return_stats", {"return_stats": 1}),
    (TypeError, "hold_beta", {"hold_beta": "no"})])
def test_wrong_arguments(kind, name, arguments):
    with pytest.raises(kind) as caught:
        softmax(**{"x": np.zeros((2, 3), np.float32), **arguments})
    assert str(caught.value).startswith((f"{name}:", f"{name} ")), caught.value


def test_a_jaxlib_too_old_for_this_build(tmp_path):
    """XLA would refuse the handlers, and JAX would be left without a CPU."""
    header = tmp_path / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    program = f"import jax; jax.ffi.include_dir = lambda: {str(tmp_path)!r}; import whet.jax"
    for minor, refused in ((0, True), (99, False)):
        header.write_text(f"#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR {minor}\n")
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert ("needs version 0." in run.stderr and "jaxlib" in run.stderr) == refused == (run.returncode != 0)
