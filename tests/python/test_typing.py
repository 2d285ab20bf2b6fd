"""The program that mypy checks (make lint-python) uses everything that is public."""

import ast
from pathlib import Path

import pytest
import whet

PACKAGE = Path(whet.__file__).parent


def public_names(path):
    tree = ast.parse(path.read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return ast.literal_eval(lists[0])


@pytest.mark.parametrize("face", ["whet", "whet.torch", "whet.jax"])
def test_every_public_name_is_used(face):
    program = (Path(__file__).parent / "typing/calls.py").read_text()
    names = public_names(PACKAGE.joinpath(*face.split(".")[1:], "__init__.py"))
    used = {ast.unparse(node) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Attribute)}
    assert [name for name in names if f"{face}.{name}" not in used] == []
