"""The files of a run: written whole or not at all, and read by readers that trust nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.clrs.errors import ClrsError, one_line
from whet.probe.files import make_folder, read_json

CHECKPOINT = "checkpoint.safetensors"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
_FORMAT = "whet clrs checkpoint 1"
_KEY = "whet"  # of the metadata
__all__ = ["CHECKPOINT", "CONFIG", "METRICS", "check_tensors", "locked", "make_folder", "of_kind", "read_checkpoint",
           "read_json", "read_lines", "read_settings", "remove_leftovers", "write_bytes", "write_checkpoint"]


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file in one step, safe on the disk before it has its name."""
    try:
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(unfinished, 0o644)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    except OSError as error:
        raise ClrsError(f"{path}: can't be written ({error.strerror or error}); make room or give another --out, and run "
                        "the same line again") from None


def remove_leftovers(folder: Path) -> None:
    """Unfinished files of writers that were killed. Only for who has the folder's lock."""
    for name in (CHECKPOINT, CONFIG, METRICS):
        for path in folder.glob(f".{name}.*"):
            path.unlink(missing_ok=True)


def write_checkpoint(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Tensors, with facts about them (as JSON) and a checksum in the metadata."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    content = {"format": _FORMAT, **facts, "checksum": _checksum(tensors, facts)}
    write_bytes(path, save(tensors, {_KEY: json.dumps(content)}))  # one key: several would be in any order


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What write_checkpoint wrote, with the checksum among the facts. ClrsError if it is missing, damaged or foreign."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise ClrsError(f"{path}: no such file; train first, or give the folder of a run") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ClrsError(f"{path}: is no safetensors file, or damaged ({one_line(error, 80)}); train again in another "
                        "--out") from None
    try:
        content = json.loads(metadata.get(_KEY, "null"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ClrsError(f"{path}: is no checkpoint of whet clrs; give the folder of a run that whet clrs train made")
    facts = {name: value for name, value in content.items() if name != "checksum"}
    if content.get("checksum") != _checksum(tensors, facts):
        raise ClrsError(f"{path}: is damaged, its checksum differs; train again in another --out")
    return tensors, content


def of_kind(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Those whose names begin with `kind.`, without it."""
    return {name.removeprefix(f"{kind}."): tensor for name, tensor in tensors.items() if name.startswith(f"{kind}.")}


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    """ClrsError if names or shapes are those of another model."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected or name not in found or expected[name].shape != found[name].shape:
            shape = tuple(found[name].shape) if name in found else "missing"
            raise ClrsError(f"{path}: is of another model, its {name} is {shape}; give the folder of a run with its own "
                            "config.json")


def read_settings(path: Path, name: str) -> dict[str, Any]:
    """The object of a JSON file whose `format` is `name`."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ClrsError(f"{path}: no such file; give the folder of a run that whet clrs made") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ClrsError(f"{path}: can't be read as JSON ({one_line(error, 80)})") from None
    if not isinstance(found, dict) or found.get("format") != name:
        raise ClrsError(f"{path}: is none of whet clrs; give the folder of a run that whet clrs made")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; none if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ClrsError(f"{path}: is damaged ({one_line(error, 80)}); remove it, and run the same line again") from None


@contextmanager
def locked(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process alone has the lock of this name in a folder, while the block lasts. It goes with the process."""
    path = folder / name
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ClrsError(f"{path}: can't be written ({error.strerror}); give another --out") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        os.close(handle)


def _checksum(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
