"""Versions of torch differ in their private names. Without those that whet.torch looks for, everything still holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from whet.torch import _tensors

HERE = Path(__file__).parent
# What goes past the dispatcher, or would. The rest of the tests, of shapes and modules, use the same functions.
FILES = ["test_torch_gradients.py", "test_torch_forward_mode.py", "test_torch_rows.py", "test_torch_subclasses.py",
         "test_torch_transforms.py"]


def test_this_torch_has_them():
    assert _tensors.KNOWS_WHEN_TO_SKIP, "every call is slower than it has to be"
    assert _tensors.skips_dispatcher([torch.zeros(1)])


def test_without_them():
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "without_private_names",
                          "-W", "ignore", "-k", "not compile and not operator", *(HERE / file for file in FILES)],
                         env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr
