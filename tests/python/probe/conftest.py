"""What the tests of the probe share. Without the libraries it needs, none of them is collected."""

import importlib.util
import os

import numpy as np
import pytest

# Submodules, since a folder of tests may carry the name of a library that isn't there.
MISSING = [name for name in ("torch", "transformers", "gguf")
           if importlib.util.find_spec(name) is None or importlib.util.find_spec(name).origin is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tiny_models import make_model, make_tokenizer
    from whet.probe import models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(tiny):
    return models.load(str(tiny))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of some 6,000 letters."""
    random = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "birds", "far", "away"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.choice(words, 1600)) + ".")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
