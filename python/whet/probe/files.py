"""Files that appear whole or not at all, and the numbers in them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from whet.probe.errors import ProbeError


def write_json(path: Path, content: Any) -> None:
    """Replaces a file in one step, safe on the disk before it has its name. Numbers that aren't finite become null."""
    text = json.dumps(_plain(content), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"
    try:
        handle, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(unfinished, 0o644)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    except OSError as error:
        raise ProbeError(f"{path}: can't be written ({error.strerror or error}); give another --out") from None


def check_writable(path: Path) -> None:
    """ProbeError if write_json couldn't write there: wrong names should be known before the work."""
    if path.is_dir():
        raise ProbeError(f"{path}: is a folder; give the name of a file as --out")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ProbeError(f"{path}: can't be written ({error.strerror or error}); give another --out") from None


def read_json(path: Path) -> Any:
    """What a file holds, None where it holds no JSON: it will be written again."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProbeError(f"{path}: can't be made a folder ({error.strerror or error}); give another --out") from None


def _plain(value: Any) -> Any:
    """Lists, dictionaries, strings and finite numbers only."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
