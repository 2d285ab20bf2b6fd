"""Documentation that runs: docstrings, and the example in Flax."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax.numpy", reason="needs jax")
import whet.jax

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/flax_attention.py"


@pytest.mark.parametrize("name", ["whet.jax", "whet.jax.rows", "whet.jax.attention"])
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


def test_flax(example, tmp_path, monkeypatch, capsys):
    """As a program, with and without a file of weights."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *map(str, arguments)])
        example.main()
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(example, "SIZES", (16, 8192))
    head, _, _, *table = run()
    assert head == "118,666 parameters"
    for n, plain, ruled, peak, sharp_peak in (map(float, line.split()) for line in table):
        assert abs(ruled - 0.2) < 1e-3 and plain > ruled and sharp_peak > peak
    assert n == 8192

    example.save_untrained(tmp_path / "model.safetensors")
    head, _, _, *plain = run(tmp_path / "model.safetensors", "--rule", "none")
    assert [line.split()[1] for line in plain] == [line.split()[1] for line in table]
    assert all(line.split()[1] == line.split()[2] for line in plain)
