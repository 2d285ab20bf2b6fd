"""Every ```python block of the README and of a page in docs/ runs, in order and in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A submodule, since a folder of tests may carry the name of a library that isn't there.
NEEDS = {"jax": "jax.numpy", "torch": "torch.nn", "transformers": "transformers.utils"}


def blocks_of(page):
    text = (ROOT / page).read_text()
    blocks = re.finditer(r"```python\n(.*?)```", text, re.S)
    return [(text[:block.start()].count("\n") + 1, block[1]) for block in blocks]


PAGES = [page for page in ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
         if blocks_of(page)]


def test_there_are_pages():
    assert "README.md" in PAGES and "docs/numpy.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(block for _, block in blocks_of(page))
    for library in re.findall(r"^(?:import|from) (\w+)", code, re.M):
        if library in NEEDS:
            pytest.importorskip(NEEDS[library], reason=f"needs {library}")
    namespace = {"__name__": "__main__"}
    for line, block in blocks_of(page):
        # Lines as they are in the page, for what goes wrong.
        exec(compile("\n" * line + block, str(ROOT / page), "exec"), namespace)
