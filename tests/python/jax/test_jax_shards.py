"""whet.jax.attention over keys on several devices is whet.jax.attention over all keys, and so is its gradient."""

from functools import partial

import numpy as np
import oracle
import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from whet.jax import Entmax, attention

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices, as conftest.py asks for")
B, T, S, N, K, H, E = 2, 5, 12, 4, 2, 8, 6
KEYS = P(None, "x")  # where an axis of keys is the second
CUT = {"key": KEYS, "value": KEYS, "bias": P(None, None, None, "x"), "mask": P(None, None, None, "x")}
RULES = ["none", "fixed:1.7", "paper", "log-length:4", "target-entropy:0.5", "target-peak:0.7",
         ["none", "paper", "target-entropy:0.5", "ssmax:0.5"]]
TOLERANCE = dict(rtol=1e-3, atol=2e-4)  # a search ends within 1e-6 of its target


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(queries=T, keys=S, dtype=jnp.float32):
    return {"query": normal(B, queries, N, H, dtype=dtype), "key": normal(B, keys, K, H, seed=1, dtype=dtype),
            "value": normal(B, keys, K, E, seed=2, dtype=dtype)}


def mesh(devices=4):
    return Mesh(np.array(jax.devices()[:devices]), ("x",))


def over_devices(devices=4, specs=None, check_vma=True, **options):
    """attention by named arrays, with the keys cut over so many devices."""
    def function(arrays):
        given = {name: (specs or {}).get(name, CUT.get(name, P())) for name in arrays}
        local = lambda arrays: attention(**arrays, **options, axis_name="x")
        return jax.shard_map(local, mesh=mesh(devices), in_specs=(given,), out_specs=P(), check_vma=check_vma)(arrays)
    return function


def results(function, arrays):
    """The output, and the gradients to all floats by their names."""
    floats = {name: given for name, given in arrays.items() if jnp.issubdtype(given.dtype, jnp.floating)}
    c = normal(*arrays["query"].shape[:-1], arrays["value"].shape[-1], seed=9)

    @jax.jit
    def both(floats):
        def loss(floats):
            out = function({**arrays, **floats})
            return (out * c).astype(jnp.float32).sum(), out
        return jax.grad(loss, has_aux=True)(floats)

    gradients, out = both(floats)
    return {"out": out, **gradients}


def check(arrays, devices=4, specs=None, check_vma=True, tolerance=None, **options):
    expected = results(lambda arrays: attention(**arrays, **options), arrays)
    found = results(over_devices(devices, specs, check_vma, **options), arrays)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        np.testing.assert_allclose(np.asarray(found[name], np.float64), np.asarray(values, np.float64), err_msg=name,
                                   **(tolerance or TOLERANCE))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule(rule, check_vma):
    check(qkv(), check_vma=check_vma, rule=rule, is_causal=True)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("rule", ["none", "paper", "target-peak:0.7"])
def test_any_number_of_devices(rule, devices):
    check(qkv(), devices, rule=rule)


@pytest.mark.parametrize("rule", ["fixed:1.7", "paper", "target-entropy:0.5"])
def test_many_rows(rule):
    """On the path that packs keys."""
    check(qkv(queries=40, keys=120), rule=rule, is_causal=True)


SIDES = {
    "bias": {"bias": normal(B, N, T, S, seed=3)}, "bias of heads": {"bias": normal(N, 1, S, seed=3)},
    "bias of rows": {"bias": normal(1, N, T, 1, seed=3)}, "sinks": {"sinks": normal(N, seed=4)},
    "mask": {"mask": jnp.asarray(np.random.default_rng(5).random((B, 1, T, S)) < 0.6)},
    "no keys": {"mask": jnp.zeros((1, 1, 1, 1), bool), "sinks": normal(N, seed=4)},
    "query_scale": {"query_scale": abs(normal(B, T, N, seed=6))}, "query_scale of heads": {"query_scale": normal(N, seed=6)},
    "lengths": {"query_seq_lengths": jnp.array([5, 2]), "key_value_seq_lengths": jnp.array([12, 4])},
}
SPECS = {"bias of heads": {"bias": P(None, None, "x")}, "bias of rows": {"bias": P()}, "no keys": {"mask": P()}}


@pytest.mark.parametrize("rule", ["none", "fixed:1.7", "paper", "target-peak:0.7"])
@pytest.mark.parametrize("case", SIDES)
def test_other_operands(case, rule):
    check({**qkv(), **SIDES[case]}, specs=SPECS.get(case), rule=rule)


@pytest.mark.parametrize("options", [
    {"softcap": 2.0}, {"local_window_size": (3, 1)}, {"local_window_size": 2, "is_causal": True}, {"scale": 0.3},
    {"hold_beta": True}], ids=str)
@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.5"])
def test_options(rule, options):
    check(qkv(), rule=rule, **options)


@pytest.mark.parametrize("rule", ["none", "paper", "target-peak:0.7"])
def test_hard(rule):
    check(qkv(), rule=rule, normalizer="hard", is_causal=True)


def test_all_together():
    arrays = {**qkv(), **SIDES["bias"], **SIDES["mask"], **SIDES["sinks"], **SIDES["query_scale"], **SIDES["lengths"]}
    check(arrays, rule=RULES[-1], is_causal=True, softcap=3.0, local_window_size=(8, 0))


def test_a_row_of_one_key_and_a_sink():
    """Its beta is 1 with every rule but none decides it, and only all devices together know that it has one key."""
    check({**qkv(), **SIDES["sinks"]}, rule="fixed:3", is_causal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rule", ["none", "paper"])
def test_half_precision(dtype, rule):
    arrays = {**qkv(dtype=dtype), "sinks": normal(N, seed=4, dtype=dtype), "bias": normal(1, N, T, S, dtype=dtype)}
    check(arrays, rule=rule, is_causal=True, tolerance=dict(rtol=2e-2, atol=2e-2))


@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_double_precision_beside_numpy(rule):
    with jax.enable_x64(True):
        arrays = qkv(dtype=jnp.float64)
        out = jax.jit(over_devices(rule=rule, is_causal=True))(arrays)
        assert out.dtype == jnp.float64
        heads_first = lambda x: np.swapaxes(np.asarray(x), 1, 2)
        expected, _ = oracle.attention(*map(heads_first, arrays.values()), rule, is_causal=True)
        np.testing.assert_allclose(heads_first(out), expected, rtol=1e-5 if "target" in rule else 1e-11, atol=1e-6)
        check(arrays, rule=rule, tolerance=dict(rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.5"])
def test_gradient_beside_differences(rule):
    """Of NumPy's attention in float64, along one direction of all operands."""
    with jax.enable_x64(True):
        arrays = qkv(dtype=jnp.float64)
        c = normal(B, T, N, E, seed=9, dtype=jnp.float64)
        along = {name: normal(*given.shape, seed=10, dtype=jnp.float64) for name, given in arrays.items()}
        gradients = jax.grad(lambda arrays: (over_devices(rule=rule)(arrays) * c).sum())(arrays)

        def loss(step):
            moved = [np.swapaxes(np.asarray(arrays[name] + step * along[name]), 1, 2) for name in arrays]
            return (np.swapaxes(oracle.attention(*moved, rule)[0], 1, 2) * c).sum()

        slope = sum(float((gradients[name] * along[name]).sum()) for name in arrays)
        np.testing.assert_allclose(slope, (loss(1e-5) - loss(-1e-5)) / 2e-5, rtol=1e-4)


def test_nan_stays_in_its_rows():
    arrays = qkv()
    arrays["query"] = arrays["query"].at[0, 1, 2].set(jnp.nan)
    for rule in ("none", "paper", "target-entropy:0.5"):
        out = over_devices(rule=rule)(arrays)
        expected = attention(**arrays, rule=rule)
        np.testing.assert_allclose(out, expected, **TOLERANCE)
        assert int(jnp.isnan(out).sum()) == E


@pytest.mark.parametrize("sizes", [(B, 0, S), (0, T, S), (B, T, 0)], ids=str)
@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_nothing(sizes, rule):
    batch, queries, keys = sizes
    check({"query": normal(batch, queries, N, H), "key": normal(batch, keys, K, H), "value": normal(batch, keys, K, E)},
          rule=rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_devices_agree_in_every_bit(rule):
    q, k, v = qkv().values()
    local = lambda q, k, v: attention(q, k, v, rule=rule, axis_name="x")
    every = jax.shard_map(local, mesh=mesh(), in_specs=(P(), KEYS, KEYS), out_specs=P("x"), check_vma=False)(q, k, v)
    one, *others = jnp.split(every, 4)
    assert all(jnp.array_equal(one, other) for other in others)


# ---- what JAX does with functions


@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_two_axes_of_a_mesh(rule):
    """Sequences over one, keys over the other: searches then take as many steps as their own sequences need."""
    arrays = qkv()
    both = Mesh(np.array(jax.devices()).reshape(2, 2), ("b", "x"))
    specs = {"query": P("b"), "key": P("b", "x"), "value": P("b", "x")}
    local = lambda arrays: attention(**arrays, rule=rule, is_causal=True, axis_name="x")
    found = results(jax.shard_map(local, mesh=both, in_specs=(specs,), out_specs=P("b")), arrays)
    for name, values in results(lambda arrays: attention(**arrays, rule=rule, is_causal=True), arrays).items():
        np.testing.assert_allclose(found[name], values, err_msg=name, **TOLERANCE)


def test_keys_over_two_axes():
    arrays = qkv()
    both = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    keys = P(None, ("a", "b"))
    local = lambda arrays: attention(**arrays, rule="paper", is_causal=True, axis_name=("a", "b"))
    function = jax.shard_map(local, mesh=both, in_specs=({"query": P(), "key": keys, "value": keys},), out_specs=P())
    found = results(function, arrays)
    for name, values in results(lambda arrays: attention(**arrays, rule="paper", is_causal=True), arrays).items():
        np.testing.assert_allclose(found[name], values, err_msg=name, **TOLERANCE)


@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_gathered_queries(rule):
    """Queries that are cut, too: each device gathers them, and keeps the output of its own."""
    arrays = qkv(queries=8)

    def local(arrays):
        query = jax.lax.all_gather(arrays["query"], "x", axis=1, tiled=True)
        out = attention(**{**arrays, "query": query}, rule=rule, is_causal=True, axis_name="x")
        return jax.lax.dynamic_slice_in_dim(out, 2 * jax.lax.axis_index("x"), 2, 1)

    function = jax.shard_map(local, mesh=mesh(), in_specs=(dict.fromkeys(arrays, KEYS),), out_specs=KEYS)
    found = results(function, arrays)
    for name, values in results(lambda arrays: attention(**arrays, rule=rule, is_causal=True), arrays).items():
        np.testing.assert_allclose(found[name], values, err_msg=name, **TOLERANCE)


@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_gradient_within(rule):
    """jax.grad on every device, of a loss that all of them have."""
    arrays = qkv()
    loss = lambda arrays, **more: (attention(**arrays, rule=rule, **more)**2).sum()
    specs = {"query": P(), "key": KEYS, "value": KEYS}
    local = jax.grad(partial(loss, axis_name="x"))
    found = jax.shard_map(local, mesh=mesh(), in_specs=(specs,), out_specs=specs)(arrays)
    for name, values in jax.grad(loss)(arrays).items():
        np.testing.assert_allclose(found[name], values, err_msg=name, **TOLERANCE)


@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_vmap_names_the_axis(rule):
    """The same program on one device. (JAX's custom_vjp doesn't know the axis when the gradient is taken around vmap.)"""
    arrays = {**qkv(), "bias": SIDES["bias"]["bias"]}
    axes = {"query": None, "key": 0, "value": 0, "bias": 0}
    cut = {name: given if axes[name] is None else jnp.stack(jnp.split(given, 3, -1 if name == "bias" else 1))
           for name, given in arrays.items()}
    local = lambda arrays: attention(**arrays, rule=rule, is_causal=True, axis_name="x")
    found = jax.vmap(local, (axes,), out_axes=None, axis_name="x")(cut)
    np.testing.assert_allclose(found, attention(**arrays, rule=rule, is_causal=True), **TOLERANCE)


@pytest.mark.parametrize("varied", [("query",), ("key", "value"), ("query", "key", "value", "sinks")], ids="+".join)
@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_vmap(rule, varied):
    """One axis more of some operands."""
    arrays = {**qkv(), **SIDES["sinks"]}
    many = {name: jnp.stack([given, 0.5 * given, -given]) if name in varied else given for name, given in arrays.items()}
    axes = {name: 0 if name in varied else None for name in arrays}

    def gradient(function):
        loss = lambda arrays: (function(arrays)**2).sum()
        return jax.jit(jax.vmap(jax.value_and_grad(loss), (axes,)))(many)

    found, expected = (gradient(function) for function in (over_devices(rule=rule), lambda a: attention(**a, rule=rule)))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_scan_and_checkpoint():
    arrays = qkv()

    def layers(body, query, key, value):
        return (jax.lax.scan(body(key, value), query, None, length=2)[0]**2).sum()

    def loss(**more):
        step = lambda key, value: jax.checkpoint(
            lambda query, _: (attention(query, key, value, rule="paper", **more), None))
        return partial(layers, step)

    value = normal(B, S, K, H, seed=2)
    sharded = jax.shard_map(loss(axis_name="x"), mesh=mesh(), in_specs=(P(), KEYS, KEYS), out_specs=P())
    given = arrays["query"], arrays["key"], value
    for ours, theirs in zip(*(jax.jit(jax.grad(function, (0, 1, 2)))(*given) for function in (sharded, loss()))):
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)


def test_only_what_is_wanted_gets_a_gradient():
    arrays = {**qkv(), **SIDES["bias"]}
    text = str(jax.make_jaxpr(jax.grad(lambda query: over_devices()({**arrays, "query": query}).sum()))(arrays["query"]))
    assert "dquery" in text and "dbias" not in text and "dkey" not in text


# ---- errors


def refused(message, kind=ValueError, **options):
    with pytest.raises(kind, match=message):
        over_devices(**options)(qkv())


def test_errors_name_the_argument():
    refused("normalizer: is 'sparsemax', must be 'softmax' or 'hard'", normalizer="sparsemax")
    refused("normalizer: is 'entmax", normalizer=Entmax(1.5))
    refused("normalizer: is 'entmax", normalizer=Entmax(jnp.array(1.5)))
    for name in ("return_stats", "return_residual", "column_sums"):
        refused(f"{name}: given, must not be with axis_name", **{name: True})
    refused("top_k: given, must not be with axis_name", top_k=2)
    refused("query_starts: given, must not be with axis_name", query_starts=jnp.array([0, T]))
    refused("rule: 2 are given", rule=["none", "paper"])
    arrays = qkv()
    with pytest.raises(ValueError, match="axis_name: is 'y', must be an axis"):
        attention(**arrays, axis_name="y")
    with pytest.raises(ValueError, match="axis_name: is 3, must be an axis"):
        attention(**arrays, axis_name=3)
    with pytest.raises(ValueError, match="key: is the same on every device along 'x'"):
        over_devices(specs={"key": P(), "value": P()})(arrays)
    with pytest.raises(ValueError, match=r"bias: its shape is \(2, 4, 5, 12\), must broadcast to \(2, 4, 5, 3\)"):
        over_devices(specs={"bias": P()})({**arrays, **SIDES["bias"]})


def test_no_forward_mode_and_no_second_derivatives():
    arrays = qkv()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(over_devices(rule="paper"), (arrays,), (arrays,))
    loss = lambda query: over_devices()({**arrays, "query": query}).sum()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="differentiat"):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(arrays["query"])
