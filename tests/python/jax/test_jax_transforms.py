"""What JAX does with functions: jit, vmap, scan, checkpoint, shard_map, threads; and what it can't do with these."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from memory import growth

pytest.importorskip("jax.numpy", reason="needs jax")
import jax
import jax.numpy as jnp
import whet
from whet import _core
from whet.jax import attention, softmax

RULES = ["none", "paper", "target-entropy:0.3"]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def same(a, b):
    np.testing.assert_array_equal(a, b)


def close(a, b, tolerance=2e-6):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_jit_gives_the_same_bits(rule):
    x, c = normal(5, 33), normal(5, 33, seed=1)
    function = partial(softmax, rule=rule)
    same(jax.jit(function)(x), function(x))
    gradient = jax.grad(lambda x: (function(x) * c).sum())
    same(jax.jit(gradient)(x), gradient(x))
    weights, stats = jax.jit(partial(function, return_stats=True))(x)
    same(weights, function(x))
    assert isinstance(stats, whet.Stats)


# ---- vmap


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, 0), (2, 1)])
def test_vmap_of_softmax(in_axes):
    """Beside jax.nn.softmax, whatever varies and whatever doesn't."""
    x = normal(4, 4, 4)
    where = jnp.asarray(np.random.default_rng(1).random((4, 4)) < 0.7).at[:, 0].set(True)
    x = x[0] if in_axes[0] is None else x
    where = where[0] if in_axes[1] is None else where
    axis = 0 if in_axes == (2, 1) else -2  # also where the axis isn't the last

    def run(function):
        def loss(x, where):
            out = function(x, axis, where[:, None])
            return (out**2).sum(), out
        return jax.vmap(jax.grad(loss, has_aux=True), in_axes)(x, where)

    for ours, theirs in zip(run(softmax), run(jax.nn.softmax)):
        close(ours, theirs)


def test_vmap_of_vmap_and_stats():
    x = normal(2, 3, 4, 10)
    weights, stats = jax.vmap(jax.vmap(partial(softmax, rule="paper", return_stats=True), in_axes=1), in_axes=0)(x)
    expected, numbers = softmax(x.swapaxes(1, 2), rule="paper", return_stats=True)
    same(weights, expected)
    same(stats.beta, numbers.beta)


ATTENTION = {
    "query": normal(3, 2, 5, 4, 8), "key": normal(3, 2, 7, 2, 8, seed=1), "value": normal(3, 2, 7, 2, 8, seed=2),
    "bias": normal(3, 1, 4, 5, 7, seed=3), "mask": jnp.asarray(np.random.default_rng(4).random((3, 2, 1, 5, 7)) < 0.8),
    "sinks": normal(3, 4, seed=5), "query_seq_lengths": jnp.array([[5, 2], [0, 3], [4, 4]]),
    "key_value_seq_lengths": jnp.array([[7, 2], [5, 3], [0, 7]]),
}
VARIED = [("query",), ("key", "value"), ("query", "key", "value"), ("bias",), ("mask",), ("sinks",),
          ("query_seq_lengths",), ("key_value_seq_lengths",), tuple(ATTENTION)]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("varied", VARIED, ids=lambda names: "+".join(names)[:30])
def test_vmap_of_attention(varied, batch):
    """One axis more, of some arrays, is the same as a loop: output, stats and every gradient."""
    wanted = ("query", "key", "value", "bias", "sinks")
    arrays = {name: given if name in ("bias", "sinks") else given[:, :batch] for name, given in ATTENTION.items()}

    def run(arrays):
        def loss(*floats):
            out, stats = attention(**{**arrays, **dict(zip(wanted, floats))}, rule="paper", return_stats=True)
            return (out**2).sum(), (out, stats)
        return jax.grad(loss, tuple(range(5)), has_aux=True)(*(arrays[name] for name in wanted))

    given = {name: array if name in varied else array[0] for name, array in arrays.items()}
    gradients, (out, stats) = jax.vmap(run, ({name: 0 if name in varied else None for name in given},))(given)
    for i in range(3):
        one = {name: array[i] if name in varied else array for name, array in given.items()}
        expected, (expected_out, expected_stats) = run(one)
        close(out[i], expected_out)
        close(stats.beta[i], expected_stats.beta)
        for ours, theirs in zip(gradients, expected):
            close(ours[i], theirs, 1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_jacrev(rule):
    """Many gradients of one forward pass: rows are saved once and the cotangents vary."""
    x = normal(2, 6)
    jacobian = jax.jacrev(partial(softmax, rule=rule))(x)
    rows = jnp.stack([jax.grad(lambda x: softmax(x, rule=rule)[0, i])(x) for i in range(6)])
    close(jacobian[0], rows)
    q, k = normal(1, 3, 2, 4), normal(1, 5, 2, 4, seed=1)
    jacobian = jax.jacrev(lambda q: attention(q, k, k, rule=rule)[0, 1, 1])(q)
    rows = jnp.stack([jax.grad(lambda q: attention(q, k, k, rule=rule)[0, 1, 1, i])(q) for i in range(4)])
    close(jacobian, rows)


# ---- scan, checkpoint, other derivatives


def test_scan_and_checkpoint():
    x = normal(4, 12)

    def step(carry, _):
        return softmax(3 * carry, rule="paper"), carry.sum()

    def loss(x, body):
        carry, _ = jax.lax.scan(body, x, None, length=3)
        return (carry**2).sum()

    plain, again = (jax.jit(jax.grad(partial(loss, body=body)))(x) for body in (step, jax.checkpoint(step)))
    same(plain, again)
    once = partial(softmax, rule="paper")
    unrolled = jax.grad(lambda x: (once(3 * once(3 * once(3 * x)))**2).sum())(x)
    close(plain, unrolled)
    q = normal(1, 4, 2, 8)
    function = lambda q: (attention(q, q, q, is_causal=True, rule="paper")**2).sum()
    same(jax.grad(jax.checkpoint(function))(q), jax.grad(function)(q))


def test_second_derivatives_are_refused():
    x = normal(3)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="differentiat"):
        jax.grad(lambda x: jax.grad(lambda x: softmax(x)[0])(x)[0])(x)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match="differentiat"):
        jax.jacfwd(jax.jacfwd(softmax))(x)


# ---- several devices

SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import Mesh, PartitionSpec as P
from whet.jax import attention, softmax
assert jax.device_count() == 4
mesh = Mesh(np.array(jax.devices()), ("d",))
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)

x, where = normal(8, 40), jnp.arange(40) % 3 > 0
rows = lambda x, where: softmax(x, where=where, rule="paper")
sharded = jax.shard_map(rows, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
assert jnp.array_equal(sharded(x, where), rows(x, where))
assert jnp.array_equal(jax.jit(sharded)(x, where), rows(x, where))
gradients = [jax.jit(jax.grad(lambda x: (f(x, where)**2).sum()))(x) for f in (sharded, rows)]
assert jnp.array_equal(*gradients)

q, k, bias = normal(8, 5, 2, 8), normal(8, 7, 2, 8), normal(1, 2, 5, 7)
heads = partial(attention, is_causal=True, rule="paper")
plain = lambda q, k, bias: heads(q, k, k, bias)
sharded = jax.shard_map(plain, mesh=mesh, in_specs=(P("d"), P("d"), P()), out_specs=P("d"))
np.testing.assert_array_equal(sharded(q, k, bias), plain(q, k, bias))
loss = lambda f: jax.jit(jax.grad(lambda *a: (f(*a)**2).sum(), (0, 1, 2)))
for ours, expected in zip(loss(sharded)(q, k, bias), loss(plain)(q, k, bias)):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)

unsharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("d")))
assert jnp.array_equal(jax.jit(rows)(unsharded, where), rows(x, where))
print("done")
"""


def test_shard_map():
    """The gradient of what all devices share, here the bias, is summed over them."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr[-3000:]


def test_another_platform_is_refused():
    """What a GPU's program would call, called here."""
    jax.ffi.register_ffi_target("whet_refuse", _core._jax_handlers()["whet_refuse"], platform="cpu")
    call = jax.ffi.ffi_call("whet_refuse", jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(Exception, match="runs on CPUs only"):
        jax.block_until_ready(call(jnp.zeros(3), operands="x", results="out"))


# ---- threads


def test_same_bits_from_many_threads():
    x, q = normal(50, 700), normal(1, 40, 4, 16)
    rows = jax.jit(partial(softmax, rule="target-entropy:0.5"))
    heads = jax.jit(jax.grad(lambda q: (attention(q, q, q, is_causal=True, rule="paper")**2).sum()))
    expected = np.asarray(rows(x)), np.asarray(heads(q))

    def work(_):
        return all(np.array_equal(rows(x), expected[0]) and np.array_equal(heads(q), expected[1]) for _ in range(10))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    before = whet.get_num_threads()
    try:
        for count in (1, 3):
            whet.set_num_threads(count)
            assert work(0)
    finally:
        whet.set_num_threads(before)


MEMORY = """
import jax, jax.numpy as jnp
from whet.jax import attention, softmax
x, q = jnp.ones((2, 16)), jnp.ones((1, 4, 2, 8))
weights = jax.jit(lambda x: softmax(x, rule="paper"))
gradient = jax.jit(jax.grad(lambda q: attention(q, q, q, rule="paper").sum()))

def calls(count):
    for i in range(count):
        jax.block_until_ready(gradient(q) if i % 10 == 0 else weights(x))
"""


def test_memory_is_stable():
    assert growth(MEMORY) < 500_000, "5 bytes a call"
