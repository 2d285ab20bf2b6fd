"""What a running program sees: threads, memory, the installed command, documentation."""

import ast
import doctest
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import whet
from memory import growth
from whet import _core

PACKAGE = Path(whet.__file__).parent


def test_version_and_targets():
    assert whet.__version__ == whet.version() == _core.version()
    assert whet.simd_target() in whet.simd_targets()


def test_other_threads_run_meanwhile():
    """The GIL is released: a thread ticks within one call. (Between calls it would tick in any case.)"""
    x = np.random.default_rng(0).normal(size=(64, 1 << 15))
    out, ticks, done = np.empty_like(x), [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    _core.softmax(x, out, rule="target-entropy:2", threads=1)
    end = time.perf_counter()
    done.set()
    thread.join()
    margin = (end - begin) / 4
    assert any(begin + margin < t < end - margin for t in ticks)


def test_same_bits_from_many_threads():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 700)).astype(np.float32)
    q, k, v = (rng.normal(size=(1, 4, 40, 16)).astype(np.float32) for _ in range(3))
    rows = whet.softmax(x, rule="target-entropy:0.5")
    heads = whet.attention(q, k, v, rule="paper", is_causal=True)

    def work(i):
        for _ in range(20):
            if not np.array_equal(whet.softmax(x, rule="target-entropy:0.5", threads=1 + i % 3), rows):
                return False
            if not np.array_equal(whet.attention(q, k, v, rule="paper", is_causal=True, threads=1 + i % 3), heads):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


MEMORY = """
import sys
import numpy as np
import whet
from whet import _core

x = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
out, stats, where, lengths = np.empty_like(x), np.empty((2, 12)), np.ones((1, 16), bool), np.array([16, 3])
saved = np.empty((2, 6), np.float32)
by_address = (x.ctypes.data, 0, x.shape, None)
q = x[None, None]

def refused(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (TypeError, ValueError):
        return
    sys.exit("not refused")

def calls(count):
    for i in range(count // 5):
        _core.softmax(x, out, rule="paper", mask=where, lengths=lengths, stats=stats, saved=saved)
        _core.softmax(by_address, out)
        refused(_core.softmax, x, out, axis=5)
        refused(_core.softmax, lengths, out)
        refused(_core.softmax, (0, 0, "sizes", None), out)
        if i % 20 == 0:
            whet.softmax(x, rule=whet.Paper(), return_stats=True)
            whet.attention(q, q, q, return_stats=True, top_k=1)
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory")
def test_memory_is_stable():
    assert growth(MEMORY) < 300_000, "3 bytes a call"


def test_the_command_came_along():
    """`whet` of the installed package, if it is that which is tested and not a build on PYTHONPATH."""
    if not PACKAGE.is_relative_to(sysconfig.get_path("platlib")):
        pytest.skip("not an installed package")
    command = shutil.which("whet", path=sysconfig.get_path("scripts"))
    assert command
    run = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"whet {whet.__version__}\n"


def modules():
    names = [m.name for m in pkgutil.iter_modules([str(PACKAGE)]) if m.name != "_core"]
    return ["whet", *(f"whet.{name}" for name in names if name not in ("torch", "jax"))]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_every_public_function_has_an_example():
    for name in whet.__all__:
        item = getattr(whet, name)
        if callable(item) and not isinstance(item, type) and item.__module__ != "whet._core":
            assert ">>>" in item.__doc__, name


def test_stub_names_what_the_extension_has():
    tree = ast.parse((PACKAGE / "_core.pyi").read_text())
    stub = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stub |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in stub if name[0] != "_"} == {name for name in dir(_core) if name[0] != "_"}
    assert (PACKAGE / "py.typed").exists()


def test_import_takes_numpy_alone():
    program = "import sys, whet; print('torch' in sys.modules, 'jax' in sys.modules, 'ml_dtypes' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False False False\n"
