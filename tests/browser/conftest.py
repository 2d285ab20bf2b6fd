"""What the tests of the page share: a browser, results, and pages made of them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from browser import Browser

WHET = Path(os.environ["WHET_BUILD"]).resolve() / "bin/whet"


def whet(*arguments):
    result = subprocess.run([WHET, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def reproduction(tmp_path_factory):
    """A folder that 'whet reproduce' made: two heads, four sizes."""
    folder = tmp_path_factory.mktemp("page") / "reproduction"
    whet("reproduce", folder, "--seeds", 2, "--steps", 1000, "--sizes", "16,64,256,1024", "--sets", 64, "--batch", 16)
    return folder


@pytest.fixture
def results(reproduction):
    return json.loads((reproduction / "results.json").read_text())


@pytest.fixture
def drawn(tmp_path):
    """Draws results, by file name, and returns the page."""

    def draw(**results):
        for name, content in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        page = tmp_path / "page.html"
        whet("report", *(tmp_path / f"{name}.json" for name in results), "--out", page)
        return page

    return draw
