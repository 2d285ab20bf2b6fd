"""The official generator of CLRS-Text, dm-clrs, without the libraries that generating text doesn't use.

`import clrs` brings TensorFlow, its datasets and Haiku along; the modules that make text need of them one class, for one
isinstance test. They are imported here without the package's own __init__, and with a stand-in for TensorFlow where the
real one isn't installed. Both are in sys.modules while these modules are imported, and not afterwards.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from whet.clrs.errors import ClrsError, one_line

INSTALL = "pip install --no-deps dm-clrs==2.0.3 && pip install 'whet[clrs]'"
_TEXT = "clrs._src.clrs_text"


class Official(NamedTuple):
    """The modules of dm-clrs that make text."""

    samplers: Any
    text: Any
    specs: Any


class Tables(NamedTuple):
    """What the published data is made of."""

    sizes: dict[str, list[int]]
    samples: int  # of each size and seed
    seeds: list[int]


@functools.cache
def official() -> Official:
    """The generator's modules. ClrsError, with the lines to run, where they can't be imported."""
    if _TEXT in sys.modules:  # imported as a whole by someone else: those are the modules
        return _modules()
    root = _root()
    before = {name for name in sys.modules if _is_clrs(name)}
    try:
        with _standing_in(root):
            return _modules()
    except ImportError as error:
        raise ClrsError(f"dm-clrs can't be imported ({one_line(error)}): run {INSTALL}") from None
    finally:
        for name in [name for name in sys.modules if _is_clrs(name) and name not in before]:
            del sys.modules[name]


def tables(split: str) -> Tables:
    """The sizes, samples per size and seeds of the published `train` or `val` split, as the package's own script has them.

    Read from its source, since importing that script needs TensorFlow and defines flags of the process.
    """
    wanted = {f"_DEFAULT_{split.upper()}_{name}": name for name in ("ALGOS_AND_LENGTHS", "NUMBER_OF_SAMPLES", "SEEDS")}
    script = _root() / "_src" / "clrs_text" / "generate_clrs_text.py"
    found = {}
    for statement in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in wanted:
                found[wanted[name]] = _value(statement.value)
    return Tables(found["ALGOS_AND_LENGTHS"], found["NUMBER_OF_SAMPLES"], found["SEEDS"])


def _value(node: ast.expr) -> Any:
    """A literal, or list(range(...)) of literals."""
    if isinstance(node, ast.Dict):
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values) if key is not None}
    if isinstance(node, ast.Call) and isinstance(node.args[0], ast.Call):
        return list(range(*map(_value, node.args[0].args)))
    return ast.literal_eval(node)


def _root() -> Path:
    """The folder of the package, which isn't imported."""
    spec = importlib.util.find_spec("clrs")
    if spec is None or not spec.submodule_search_locations:
        raise ClrsError(f"needs the Python package dm-clrs: run {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def _modules() -> Official:
    names = "clrs._src.samplers", f"{_TEXT}.clrs_utils", "clrs._src.specs"
    found = Official(*map(importlib.import_module, names))
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every sampler
    return found


def _is_clrs(name: str) -> bool:
    return name == "clrs" or name.startswith("clrs.")


@contextmanager
def _standing_in(root: Path) -> Iterator[None]:
    """The two packages whose __init__ isn't wanted, and TensorFlow where it is missing."""
    added = {"clrs": _package("clrs", root), _TEXT: _package(_TEXT, root / "_src" / "clrs_text")}
    if importlib.util.find_spec("tensorflow") is None:
        tensorflow = types.ModuleType("tensorflow")
        tensorflow.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]  # nothing is one
        added["tensorflow"] = tensorflow
    sys.modules.update(added)
    try:
        yield
    finally:
        for name, module in added.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _package(name: str, folder: Path) -> types.ModuleType:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    return package
