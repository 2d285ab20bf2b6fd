"""What the tests of the Python package share. It is the installed one, or that of a build on PYTHONPATH."""

import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(0)
