"""Arguments drawn at random, mostly wrong: a result, or an error that names an argument; never a crash."""

import inspect

import ml_dtypes
import numpy as np
import pytest
import whet

DTYPES = ["f4", "f8", "f2", ml_dtypes.bfloat16, ">f4", "i4", "i8", "?", "c8", "O", "V2", "U1"]


def drawn_array(rng, axes, sizes):
    shape = tuple(int(rng.choice(sizes)) for _ in range(axes))
    values = np.asarray(rng.integers(-3, 9, shape)).astype(DTYPES[min(rng.geometric(0.35) - 1, len(DTYPES) - 1)])
    if values.ndim and rng.random() < 0.2:
        values = values[..., :: int(rng.choice([-1, 2, -2]))]
    if values.ndim and rng.random() < 0.1:
        values = np.broadcast_to(values, (3, *values.shape))
    if rng.random() < 0.1:
        values = values.view()
        values.flags.writeable = False
    return values


def drawn_value(rng):
    values = [None, True, False, 0, 1, -1, 2, 5, 2**40, 2**70, 0.5, -2.0, np.nan, np.inf, "paper", "none", "end",
              "text", "fixed:2", b"", (1, 2), (), [0, 3], ["paper"] * 4, np.int64(1), np.True_, object(), {},
              whet.Paper()]
    return values[rng.integers(len(values))]


def check(function, arguments, options):
    names = set(inspect.signature(function).parameters)
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        text = str(error)
        name = text.replace(":", " ").split()[0]
        assert name in names or any(n in text for n in ("rule", "polynomial")), text
    return None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("function", [whet.softmax, whet.sharpen, whet.states, whet.softmax_backward])
def test_rows(function, seed):
    rng = np.random.default_rng(seed)
    arrays = 2 if function is whet.softmax_backward else 1
    optional = [n for n in inspect.signature(function).parameters if n not in ("x", "p", "dout")]
    for _ in range(100):
        given = [drawn_array(rng, rng.integers(0, 4), [0, 1, 3, 4]) for _ in range(arrays)]
        options = {name: drawn_array(rng, rng.integers(0, 4), [1, 3, 4]) if rng.random() < 0.3 else drawn_value(rng)
                   for name in optional if rng.random() < 0.15}
        check(function, given, options)


@pytest.mark.parametrize("seed", range(16))
def test_attention(seed):
    rng = np.random.default_rng(seed)
    optional = [n for n in inspect.signature(whet.attention).parameters if n not in ("query", "key", "value")]
    results = 0
    for _ in range(100):
        q, k, v = (rng.normal(size=shape) for shape in ((2, 4, 3, 5), (2, 2, 4, 5), (2, 2, 4, 6)))
        given = [q, k, v] if rng.random() < 0.8 else [drawn_array(rng, 4, [1, 2, 4]) for _ in range(3)]
        options = {name: drawn_array(rng, rng.integers(0, 5), [1, 2, 3, 4]) if rng.random() < 0.3 else drawn_value(rng)
                   for name in optional if rng.random() < 0.05}
        results += check(whet.attention, given, options) is not None
    assert results > 10
