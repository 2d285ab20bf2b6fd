"""Calls run on torch's own OpenMP workers: no thread is added, and no bit depends on which threads there are."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
import whet
from whet import _core
from whet.torch import attention, softmax

on_openmp = pytest.mark.skipif(not _core.find_openmp(torch._C.__file__), reason="torch has no OpenMP workers")

PROGRAM = """
import os, signal, sys
import torch
from whet.torch import attention, softmax

signal.alarm(60)  # what hangs fails

def threads():
    return len(os.listdir("/proc/self/task"))

def of_torch():
    torch.ones(1 << 20).exp_()

def of_whet():
    return attention(q, k, v, rule="paper")

torch.manual_seed(0)
torch.set_num_threads(2)
q, k, v = torch.randn(3, 1, 4, 256, 32).unbind()
at_first = threads()
"""


def run(program, **environment):
    subprocess.run([sys.executable, "-c", PROGRAM + program], check=True, env=os.environ | environment, timeout=120)


@on_openmp
@pytest.mark.parametrize("first, second", [("of_torch", "of_whet"), ("of_whet", "of_torch")])
def test_whet_and_torch_share_workers(first, second):
    """Whichever comes first starts the second thread; the other one takes it."""
    run(f"{first}(); assert threads() == at_first + 1, threads(); {second}(); assert threads() == at_first + 1, threads()")


@on_openmp
def test_little_work_keeps_the_team():
    """libgomp would end the threads that a smaller team leaves over."""
    run("""
torch.set_num_threads(3)
of_whet()
assert threads() == at_first + 2
for rows in (1, 2, 3):  # as many tasks
    softmax(torch.ones(rows, 20000))
    assert threads() == at_first + 2
""")


def test_one_thread_starts_none():
    run("torch.set_num_threads(1); of_torch(); of_whet(); assert threads() == at_first")


@pytest.mark.parametrize("count", [2, 3])
def test_a_forked_child_uses_threads_of_its_own(count):
    """The child has none of OpenMP's workers, and OpenMP doesn't know: a parallel region would never end."""
    run(f"""
torch.set_num_threads({count})
expected = of_whet()
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(of_whet(), expected) and threads() == {count} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(of_whet(), expected)
""")


@on_openmp
def test_inside_a_parallel_region_a_call_is_serial():
    run("""
import ctypes
openmp = ctypes.CDLL(torch._C.__file__)
found = []
inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append((threads(), of_whet())))
expected = of_whet()
openmp.GOMP_parallel(inside, None, 2, 0)
assert [count for count, _ in found] == [at_first + 1] * 2
assert all(torch.equal(out, expected) for _, out in found)
assert threads() == at_first + 1
""", OMP_MAX_ACTIVE_LEVELS="2")


@pytest.fixture
def thread_count():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rule", ["none", "paper", "target-entropy:0.5"])
def test_same_bits_on_every_executor_and_number_of_threads(thread_count, rule):
    torch.manual_seed(1)
    x = torch.randn(60, 900)
    q, k, v, dout = torch.randn(4, 1, 4, 300, 32).unbind()
    arrays = [t.numpy() for t in (q, k, v)]
    expected_out = torch.from_numpy(whet.attention(*arrays, rule=rule, is_causal=True, threads=1))
    expected_weights = torch.from_numpy(whet.softmax(x.numpy(), rule=rule, threads=1))
    gradients = []
    for count in (1, 2, 3, 5):
        thread_count(count)
        given = [t.clone().requires_grad_() for t in (x, q, k, v)]
        weights, out = softmax(given[0], rule=rule), attention(*given[1:], is_causal=True, rule=rule)
        assert torch.equal(weights, expected_weights) and torch.equal(out, expected_out)
        gradients.append(torch.autograd.grad((weights.square().sum(), out), given, (torch.ones(()), dout)))
    for others in gradients[1:]:
        assert all(map(torch.equal, others, gradients[0]))


def test_a_library_that_is_not_loaded_has_no_workers():
    assert _core.find_openmp("libof_nobody.so") is False
    with pytest.raises(TypeError, match="path"):
        _core.find_openmp(None)
