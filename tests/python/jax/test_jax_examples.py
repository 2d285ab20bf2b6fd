"""Documentation that runs: docstrings, and the example in Flax with weights of the lab."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import whet.jax

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/flax_attention.py"


@pytest.mark.parametrize("name", ["whet.jax", "whet.jax.rows", "whet.jax.attention", "whet.jax.normalizers"])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0 and result.attempted > 0


def test_every_public_function_has_an_example():
    for name in whet.jax.__all__:
        assert ">>>" in getattr(whet.jax, name).__doc__, name


@pytest.fixture
def example(monkeypatch):
    pytest.importorskip("flax", reason="needs flax")
    pytest.importorskip("safetensors", reason="needs safetensors")
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return importlib.import_module(EXAMPLE.stem)


def test_flax_answers_as_whet_eval_does(example, trained_head, monkeypatch, capsys):
    for name in ("softmax", "target_entropy"):
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, trained_head.run, trained_head.sets, "--rule", trained_head.rules[name]])
        example.main()
        _, *lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == trained_head.lines(name)
