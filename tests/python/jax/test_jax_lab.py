"""Training in JAX and optax from the same weights on the same batches, beside `whet bench train --keep`.

JAX runs in float64: in float32 its own losses are off by 6e-4 after 74 steps, fifty times as much as whet's.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("optax", reason="needs jax and optax")
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from safetensors.numpy import load_file

from bench.training import max_retrieval_jax as peer

WHET = Path(os.environ.get("WHET_BUILD", ROOT / "build/release")) / "bin/whet"
FORMS = {"straightforward": peer.straightforward, "folded": peer.folded}
LAYERS = ["item1", "item2", "query1", "query2", "q", "k", "v", "o", "hidden", "output"]
TENSORS = {f"{layer}.{part}" for layer in LAYERS for part in ("kernel", "bias")}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lab") / "steps.safetensors"
    subprocess.run([WHET, "bench", "train", "--quick", "--keep", path], check=True, capture_output=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def kept(file):
    return peer.load(file)


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture(scope="module")
def trained(kept, form):
    """Losses and weights of the same steps."""
    with jax.enable_x64(True):
        exact = peer.in_float64(kept)
        training = peer.Training(exact, form)
        losses = np.asarray(training.run(peer.on_device(exact.batches)))
        assert losses.dtype == np.float64
        return losses, {name: np.asarray(t) for name, t in training.parameters.items()}


def test_the_package_safetensors_reads_the_file(file, kept):
    tensors = load_file(file)
    batches = {f"batches.{name}" for name in ("sizes", "priorities", "classes", "queries", "targets")}
    weights = {f"{when}.{name}" for when in ("before", "gradient", "after") for name in TENSORS}
    assert set(tensors) == weights | batches | {"losses"}
    assert sum(t.size for t in kept.before.values()) == 118_666
    assert len(kept.batches) == len(kept.losses) == 100
    assert tensors["batches.priorities"].size == sum(b.priorities.size for b in kept.batches)


def test_targets_are_the_classes_of_the_largest_priorities(kept):
    for batch in kept.batches:
        best = batch.priorities.argmax(1)[:, None]
        assert np.array_equal(np.take_along_axis(batch.classes, best, 1)[:, 0], batch.targets)


def test_losses_of_100_steps(kept, trained):
    assert np.abs(trained[0] - kept.losses).max() <= 1e-4


def test_gradient_of_the_first_step(kept, form):
    """Every tensor within 1e-5 of its norm. k's bias adds the same to every logit of a set: 0 but for rounding."""
    with jax.enable_x64(True):
        gradient = peer.first_gradient(peer.in_float64(kept), form)
    assert set(gradient) == TENSORS
    assert max(np.abs(g["k.bias"]).max() for g in (gradient, kept.gradient)) <= 1e-8
    errors = {name: peer.relative_error(g, kept.gradient[name]) for name, g in gradient.items() if name != "k.bias"}
    assert max(errors.values()) <= 1e-5, errors


def test_weights_after_100_steps(kept, trained):
    """Every weight within 1e-3, one step's length; every tensor's way within 1 %. Adam makes steps of k's bias of
    the rounding of a gradient of 0, so that no way is right: it just can't be longer than its steps."""
    away = {name: np.abs(t - kept.after[name]).max() for name, t in trained[1].items() if name != "k.bias"}
    assert max(away.values()) <= 1e-3, away
    ways = {name: peer.relative_error(trained[1][name] - kept.before[name], kept.after[name] - kept.before[name])
            for name in away}
    assert max(ways.values()) <= 1e-2, ways
    rate = kept.recipe["rate"]
    for after in (trained[1], kept.after):
        assert np.abs(after["k.bias"] - kept.before["k.bias"]).max() <= 100 * rate
