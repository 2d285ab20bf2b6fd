"""Wrong arguments: each is refused with its name, and nothing is written. Unusual but right ones work."""

import mmap

import numpy as np
import pytest
import whet
from whet import _core

F32 = 0


def refused(kind, name, function, *arguments, **keywords):
    with pytest.raises(kind) as caught:
        function(*arguments, **keywords)
    text = str(caught.value)
    assert text.startswith((f"{name}:", f"{name} ")), text


@pytest.fixture
def x():
    return np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)


@pytest.fixture
def qkv():
    rng = np.random.default_rng(2)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 5, 8)))


WRONG_TYPES = [np.zeros((4, 6), complex), np.zeros((4, 6), object), np.zeros((4, 6), "S4"), np.zeros((4, 6), ">f4"),
               np.zeros((4, 6), "longdouble"), np.zeros((4, 6), "V2"), np.zeros((4, 6), "M8[s]"), "text", None]


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=lambda w: str(getattr(w, "dtype", w)))
def test_types_of_x(wrong):
    refused(TypeError, "x", whet.softmax, wrong)
    refused(TypeError, "x", whet.states, wrong)
    refused(TypeError, "p", whet.sharpen, wrong)
    refused(TypeError, "dout", whet.softmax_backward, np.zeros((4, 6)), wrong)


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=lambda w: str(getattr(w, "dtype", w)))
def test_types_of_attention(qkv, wrong):
    q, k, v = qkv
    for name in ("query", "key", "value"):
        # With as many axes as the others, it can only be the type that is wrong.
        four_axes = wrong[None, None] if isinstance(wrong, np.ndarray) else wrong
        given = {"query": q, "key": k, "value": v, name: four_axes}
        refused((TypeError, ValueError), name, whet.attention, **given)
    if wrong is not None:
        refused(TypeError, "bias", whet.attention, q, k, v, bias=wrong)


@pytest.mark.parametrize("out", [np.empty((4, 6), int), np.empty((4, 6), object), [[0.0] * 6] * 4, "text"])
def test_types_of_out(x, out):
    refused(TypeError, "out", whet.softmax, x, out=out)


def test_out_of_another_shape_type_or_memory(x):
    refused(ValueError, "out", whet.softmax, x, out=np.empty((4, 5), np.float32))
    refused(ValueError, "out", whet.softmax, x, out=np.empty((4, 6)))
    both = np.zeros((4, 7), np.float32)
    refused(ValueError, "out", whet.softmax, both[:, 1:], out=both[:, :-1])
    refused(ValueError, "out", whet.softmax, x, out=np.broadcast_to(np.empty(6, np.float32), (4, 6)))


def test_read_only(x, qkv):
    locked = np.zeros_like(x)
    locked.flags.writeable = False
    refused(ValueError, "out", whet.softmax, x, out=locked)
    assert np.all(locked == 0)
    out = np.empty_like(qkv[0])
    out.flags.writeable = False
    refused(ValueError, "out", whet.attention, *qkv, out=out)
    x.flags.writeable = False
    np.testing.assert_array_equal(whet.softmax(x), whet.softmax(x.copy()))


def test_inputs_are_read_where_they_lie(tmp_path):
    """A file mapped read-only can't be written, and a copy of it would show in no other way than speed: what shows is
    that the extension takes it as it is."""
    values = np.random.default_rng(3).normal(size=(8, 32)).astype(np.float32)
    (tmp_path / "x").write_bytes(values.tobytes())
    with open(tmp_path / "x", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        x = np.frombuffer(mapped, np.float32).reshape(8, 32)
        out = np.empty_like(x)
        _core.softmax(x, out)
        np.testing.assert_array_equal(out, whet.softmax(values))
        del x


def test_out_is_what_comes_back(x, qkv):
    out = np.empty_like(x)
    assert whet.softmax(x, out=out) is out
    expected = out.copy()
    assert whet.softmax(x, out=x) is x
    np.testing.assert_array_equal(x, expected)
    out = np.empty_like(qkv[0])
    assert whet.attention(*qkv, out=out) is out


@pytest.mark.parametrize("view", [
    lambda a: a[:, ::-1], lambda a: a[::-1, ::2], lambda a: a.T, lambda a: a[1::2], lambda a: a[:, 1:2],
    lambda a: np.broadcast_to(a[:1], (5, a.shape[1])), lambda a: np.asfortranarray(a), lambda a: a[None, :, None]])
def test_strides(x, view):
    given = view(x)
    before = x.copy()
    np.testing.assert_array_equal(whet.softmax(given, rule="paper"), whet.softmax(given.copy(), rule="paper"))
    np.testing.assert_array_equal(x, before)
    out = view(np.zeros_like(x))
    if out.flags.writeable:
        whet.softmax(given, rule="paper", out=out)
        np.testing.assert_array_equal(out, whet.softmax(given.copy(), rule="paper"))


def test_strides_that_are_no_whole_elements():
    record = np.zeros(6, np.dtype({"names": ["a", "b"], "formats": ["f4", "u1"], "itemsize": 5}))
    refused(ValueError, "x", whet.softmax, record["a"])
    crooked = np.zeros(25, np.uint8)[1:].view(np.float32)
    refused(ValueError, "x", whet.softmax, crooked)


def test_axes(x):
    for axis in (2, -3, 2**40):
        refused(ValueError, "axis", whet.softmax, x, axis)
    for axis in (0.5, "0", None, (0, 1)):
        refused(TypeError, "axis", whet.softmax, x, axis)
    refused(ValueError, "x", whet.softmax, 1.0)
    refused(ValueError, "x", whet.softmax, np.zeros((1,) * 9))
    refused(ValueError, "x", whet.softmax, [[1.0], [1.0, 2.0]])


def test_where_and_lengths(x):
    refused(TypeError, "where", whet.softmax, x, where=np.ones((4, 6), int))
    refused(ValueError, "where", whet.softmax, x, where=np.ones((4, 5), bool))
    refused(ValueError, "where", whet.softmax, x, where=np.ones((1, 4, 6), bool))
    refused(TypeError, "lengths", whet.softmax, x, lengths=[1.0] * 4)
    refused(ValueError, "lengths", whet.softmax, x, lengths=[1] * 3)
    refused(ValueError, "lengths", whet.softmax, x, lengths=[7] * 4)


def test_threads(x):
    refused(TypeError, "threads", whet.softmax, x, threads="two")
    refused(ValueError, "threads", whet.softmax, x, threads=-1)
    before = whet.get_num_threads()
    try:
        whet.set_num_threads(3)
        assert whet.get_num_threads() == 3
    finally:
        whet.set_num_threads(before)
    refused(TypeError, "count", whet.set_num_threads, 1.5)
    with pytest.raises(ValueError):
        whet.set_num_threads(-1)


def test_merge():
    refused(TypeError, "a", whet.merge, np.zeros(3), whet.states([1.0]))
    refused(ValueError, "b", whet.merge, whet.states(np.zeros((2, 1))), whet.states(np.zeros((3, 1))))


@pytest.mark.parametrize("kind, name, options", [
    (TypeError, "scale", {"scale": "1"}), (ValueError, "scale", {"scale": np.inf}),
    (TypeError, "is_causal", {"is_causal": "no"}), (TypeError, "is_causal", {"is_causal": np.ones(3)}),
    (TypeError, "align", {"align": 0}), (ValueError, "align", {"align": "middle"}),
    (TypeError, "window", {"window": "3"}), (TypeError, "window", {"window": (1, 2, 3)}),
    (ValueError, "window", {"window": (-2, 0)}), (TypeError, "mask", {"mask": np.zeros((3, 5))}),
    (ValueError, "mask", {"mask": np.ones((3, 4), bool)}), (ValueError, "bias", {"bias": np.zeros((3, 4), np.float32)}),
    (ValueError, "bias", {"bias": np.zeros((3, 5))}), (TypeError, "lengths", {"lengths": [0.5]}),
    (ValueError, "lengths", {"lengths": [6]}),
    (ValueError, "query_starts", {"query_starts": [0, 2], "key_starts": [0, 5]}),
    (ValueError, "softcap", {"softcap": -1}), (ValueError, "sinks", {"sinks": [0.0]}),
    (ValueError, "query_scale", {"query_scale": [[1.0, 2.0]]}), (ValueError, "rule", {"rule": ["paper"] * 3}),
    (TypeError, "rule", {"rule": [1, 2, 3, 4]}), (ValueError, "rule", {"rule": "sharp"}),
    (ValueError, "skip_epsilon", {"skip_epsilon": 2}), (ValueError, "top_k", {"top_k": -1}),
    (TypeError, "top_k", {"top_k": 1.5}), (ValueError, "weight_rows", {"weight_rows": [[0, 4, 0]]}),
    (ValueError, "weight_rows", {"weight_rows": [[0, 0]]}),
    (ValueError, "out", {"out": np.empty((1, 4, 3, 7), np.float32)}),
    (TypeError, "out", {"out": [1.0]}), (ValueError, "threads", {"threads": -1})])
def test_options_of_attention(qkv, kind, name, options):
    refused(kind, name, whet.attention, *qkv, **options)


def test_shapes_of_attention(qkv):
    q, k, v = qkv
    refused(ValueError, "key", whet.attention, q, k[0], v)
    refused(ValueError, "key", whet.attention, q[:, :3], k, v)
    refused(ValueError, "key", whet.attention, q, k[..., :4], v)
    refused(ValueError, "value", whet.attention, q, k, v[:, :, :4])
    refused(ValueError, "value", whet.attention, q, k, v.astype(np.float64))
    refused(ValueError, "query", whet.attention, q[0, 0, 0], k, v)
    refused(ValueError, "dout", whet.attention_backward, q, k, v, q[..., :4])
    with pytest.raises(TypeError, match="colour"):
        whet.attention_backward(q, k, v, q, colour="red")


# ---- masked arrays


def masked(values):
    return np.ma.masked_array(values, mask=np.zeros(np.shape(values), bool))


def test_masked_arrays_are_refused_not_stripped(x):
    """Also where nothing is masked, so that it doesn't depend on the data."""
    hidden = np.ma.masked_array(x, mask=x > 0)
    states, (_, saved) = whet.states(x), whet.softmax(x, return_saved=True)
    for given in (hidden, masked(x), list(hidden), [list(hidden)[:1]]):
        refused(TypeError, "x", whet.softmax, given)
        refused(TypeError, "x", whet.softmax_backward, given, x)
        refused(TypeError, "dout", whet.softmax_backward, x, given)
        refused(TypeError, "p", whet.sharpen, given)
        refused(TypeError, "x", whet.states, given)
        refused(TypeError, "x", whet.spread, given)
    refused(TypeError, "where", whet.softmax, x, where=masked(x > 0))
    refused(TypeError, "lengths", whet.softmax, x, lengths=masked([1, 2, 3, 4]))
    refused(TypeError, "out", whet.softmax, x, out=masked(np.empty_like(x)))
    refused(TypeError, "out", whet.softmax_backward, x, x, out=masked(np.empty_like(x)))
    refused(TypeError, "saved", whet.softmax_backward, x, x, saved=masked(saved))
    refused(TypeError, "a", whet.merge, np.ma.masked_array(states), states)
    refused(TypeError, "states", whet.Paper().beta, np.ma.masked_array(states))
    refused(TypeError, "spread", whet.horizon, masked([6.0]), 0.5)
    refused(TypeError, "keys", whet.largest_weight, masked([6]), 0.5)
    with pytest.raises(TypeError, match=r"give np.ma.getdata\(x\), and say which keys are visible with where or mask"):
        whet.softmax(hidden)


def test_masked_arrays_in_attention(qkv):
    q, k, v = qkv
    for name, given in (("query", q), ("key", k), ("value", v)):
        refused(TypeError, name, whet.attention, **{"query": q, "key": k, "value": v, name: masked(given)})
    refused(TypeError, "dout", whet.attention_backward, q, k, v, masked(q))
    refused(TypeError, "saved", whet.attention_backward, q, k, v, q, saved=masked(np.empty((1, 4, 3, 3), np.float32)))
    sides = {"mask": np.ones((3, 5), bool), "bias": np.zeros((3, 5)), "lengths": [5], "sinks": np.zeros(4),
             "query_scale": np.ones(3), "query_starts": [0, 3], "key_starts": [0, 5], "weight_rows": [[0, 0, 0]],
             "out": np.empty_like(q)}
    for name, given in sides.items():
        refused(TypeError, name, whet.attention, q, k, v, **{name: masked(given)})


# ---- arrays by address


def addressed(a):
    codes = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3, "bool": 4, "int64": 5}
    return (a.ctypes.data, codes[a.dtype.name], a.shape, tuple(s // a.itemsize for s in a.strides))


def test_by_address(x, qkv):
    out, stats, saved = np.empty_like(x[::-1]), np.empty((4, 12)), np.empty((4, 6), np.float32)
    lengths = np.array([6, 3, 1, 0])
    _core.softmax(addressed(x[::-1]), addressed(out), rule="paper", mask=addressed(np.ones((1, 6), bool)),
                  lengths=addressed(lengths), stats=addressed(stats), saved=addressed(saved))
    expected, expected_stats, expected_saved = whet.softmax(x[::-1], rule="paper", lengths=lengths, return_stats=True,
                                                            return_saved=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(stats, np.stack(expected_stats, -1))
    np.testing.assert_array_equal(saved, expected_saved)

    out = np.empty_like(qkv[0])
    _core.attention(*map(addressed, qkv), (out.ctypes.data, F32, out.shape, None), causal=True)
    np.testing.assert_array_equal(out, whet.attention(*qkv, is_causal=True))


@pytest.mark.parametrize("kind, wrong", [
    (TypeError, ()), (TypeError, (1, 2, 3)), (TypeError, ("a", 0, (4, 6), None)), (ValueError, (0, 0, (4, 6), None)),
    (ValueError, (64, 6, (4, 6), None)), (ValueError, (64, -1, (4, 6), None)), (TypeError, (64, 5, (4, 6), None)),
    (TypeError, (64, 0, [4, 6], None)), (TypeError, (64, 0, (4, 6.0), None)), (ValueError, (64, 0, (4, 6), (1,))),
    (ValueError, (64, 0, (-4, 6), None)), (ValueError, (66, 0, (4, 6), None)), (ValueError, (64, 0, (4,) * 9, None)),
    (ValueError, (64, 0, (2**40, 2**40), None))])
def test_bad_addresses(x, kind, wrong):
    refused(kind, "in", _core.softmax, wrong, x)


def test_records_of_the_wrong_kind(x):
    out = np.empty_like(x)
    refused(ValueError, "stats", _core.softmax, x, out, stats=np.empty((4, 9)))
    refused(ValueError, "stats", _core.softmax, x, out, stats=np.empty((3, 12)))
    refused(ValueError, "stats", _core.softmax, x, out, stats=np.empty((10, 4)).T)
    refused(TypeError, "stats", _core.softmax, x, out, stats=np.empty((4, 12), np.float32))
    refused(TypeError, "lengths", _core.softmax, x, out, lengths=np.ones(4, np.int32))
    refused(TypeError, "colour", _core.softmax, x, out, colour="red")


def test_rows_of_weights_are_triples(rng):
    q = rng.normal(size=(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"^weight_rows: its shape is \(3, 2\), must be \(R, 3\)"):
        whet.attention(q, q, q, weight_rows=[[0, 0], [1, 0], [0, 1]])


def test_what_was_saved_belongs_to_the_rows(rng):
    x = rng.normal(size=(4, 6))
    _, saved = whet.softmax(x, axis=0, rule="paper", return_saved=True)
    with pytest.raises(ValueError, match=r"^saved: its sizes are .* must be 4 rows of 6"):
        whet.softmax_backward(x, x, rule="paper", saved=saved)
    with pytest.raises(TypeError, match="^saved: its dtype is int64"):
        whet.softmax_backward(x, x, saved=3)


def test_horizon_of_small_types():
    assert whet.horizon(np.float16(12), np.float16(0.5)) == pytest.approx(1 + np.exp(12.0))
