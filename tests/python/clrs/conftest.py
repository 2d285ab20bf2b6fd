"""What the tests of whet.clrs share. Without the libraries it needs, none of them is collected."""

import importlib.util
import os

import pytest

# Submodules, since a folder of tests may carry the name of a library that isn't there.
MISSING = [name for name in ("torch", "safetensors", "jax", "chex", "attr", "clrs")
           if importlib.util.find_spec(name) is None or importlib.util.find_spec(name).origin is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that tests start
    import torch
    from whet.clrs.data import algorithms
    from whet.clrs.workers import Joined, Published, Workers

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def problems():
    """Two problems of every algorithm, without and with hints: {(algorithm, hints): [...]}."""
    wanted = [(name, hints) for name in algorithms() for hints in (False, True)]
    with Workers(Joined([Published([(name, 5, 3)], 2, hints) for name, hints in wanted])) as found:
        return dict(zip(wanted, found))


@pytest.fixture
def ready_vocabulary(problems, monkeypatch):
    """That of insertion_sort, without a process that makes a problem for it: as many tests train."""
    from whet.clrs import training
    from whet.clrs.tokens import vocabulary_of

    texts = [one.question + one.answer for one in problems["insertion_sort", False]]
    monkeypatch.setattr(training, "_vocabulary", lambda recipe: vocabulary_of(recipe.tokens, recipe.algorithms, texts))


@pytest.fixture
def often(monkeypatch):
    """Metrics and checkpoints every few steps."""
    from whet.clrs import loop

    monkeypatch.setattr(loop, "METRICS_EVERY", 2)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 4)
