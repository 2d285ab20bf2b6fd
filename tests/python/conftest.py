"""What the tests of the Python package share. It is the installed one, or that of a build on PYTHONPATH."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
WHET = Path(os.environ.get("WHET_BUILD", ROOT / "build/release")) / "bin/whet"


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@dataclass(frozen=True)
class TrainedHead:
    """A head that `whet train` made, and what `whet eval` found of it."""

    run: str
    sets: str  # the file with the sets it was evaluated on
    rules: dict  # by their names in results
    sizes: list

    def lines(self, rule):
        """Items and accuracy of each size, as the examples print them."""
        return [[str(size["items"]), f"{size['rules'][rule]['accuracy']:.4f}"] for size in self.sizes]


@pytest.fixture(scope="session")
def trained_head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    run, sets = str(folder / "run"), str(folder / "sets.safetensors")

    def whet(*arguments):
        return subprocess.run([WHET, *arguments], check=True, capture_output=True, text=True, timeout=300).stdout

    whet("train", run, "--recipe", "sharp", "--steps", "1500")
    results = json.loads(whet("eval", run, "--sizes", "16,64,1024", "--sets", "64", "--no-calibration", "--json",
                              "--save-sets", sets))
    model = results["models"][0]
    return TrainedHead(run, sets, {**model["rules"], "softmax": "none"}, model["sizes"])
