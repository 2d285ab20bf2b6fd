"""What is written about whet.torch is true: docstrings and the examples. (tests/python/test_docs.py runs the page.)"""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
import whet.torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["whet.torch", "whet.torch.rows", "whet.torch.attention", "whet.torch.modules"])
def test_examples_in_docstrings(name):
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name])
    assert result.attempted and not result.failed


def test_every_public_name_has_an_example():
    for name in whet.torch.__all__:
        assert ">>>" in getattr(whet.torch, name).__doc__, name


def test_answers_as_whet_eval_does(trained_head):
    pytest.importorskip("safetensors", reason="needs safetensors")
    for name in ("softmax", "target_entropy"):
        run = subprocess.run([sys.executable, ROOT / "examples/torch_attention.py", trained_head.run, trained_head.sets,
                              "--rule", trained_head.rules[name]], capture_output=True, text=True, check=True)
        _, *lines = run.stdout.splitlines()
        assert [line.split()[:2] for line in lines] == trained_head.lines(name)


def test_example():
    run = subprocess.run([sys.executable, ROOT / "examples/train_with_a_rule.py", "40"], capture_output=True, text=True,
                         check=True)
    assert len(re.findall(r"\d+% / \d\.\d\d", run.stdout)) == 12, run.stdout
