"""GGUF files, llama.cpp's format: checked before anything trusts them, and converted once into a folder that loads fast."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from whet.probe.errors import ProbeError, one_line

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each scalar type
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_STRING, _ARRAY = 8, 9
_LEFTOVER_AFTER = 3600.0  # seconds: no conversion writes nothing for so long


class Header(NamedTuple):
    """What is needed of a GGUF file's header to trust the rest of it."""

    values: dict[str, str | int]  # strings and integers; others are skipped
    keys: set[str]
    tensors: int
    elements: int  # of all tensors


def read_header(path: str | os.PathLike[str]) -> Header:
    """Walks through the header, every length checked against the size of the file.

    The `gguf` package trusts lengths: an array said to have 2^60 elements keeps it busy until memory is full. A file
    that gets through here can be given to it. ProbeError if the file is none, is cut short or contradicts itself.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != _MAGIC:
                raise ProbeError(f"{path}: is not a GGUF file; give a .gguf file of llama.cpp or a Hugging Face folder")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(data, size).header()
    except (struct.error, UnicodeDecodeError, _Broken) as error:
        raise ProbeError(f"{path}: is cut short or damaged ({one_line(error)}); download it again") from None
    except OSError as error:
        raise ProbeError(f"{path}: can't be read ({error.strerror or error})") from None


class _Broken(Exception):
    pass


class _Walk:
    """A position in the header."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data, self._size, self._at = data, size, 4

    def header(self) -> Header:
        version, tensors, pairs = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in (2, 3):
            raise _Broken(f"version {version}, must be 2 or 3")
        values: dict[str, str | int] = {}
        keys = set()
        for _ in range(self._fits(pairs, 13, "keys")):
            key, kind = self._string(), self._number("<I")
            keys.add(key)
            self._value(key, kind, values)
        infos = [self._tensor() for _ in range(self._fits(tensors, 24, "tensors"))]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Broken(f"alignment {alignment}")
        start = -(-self._at // alignment) * alignment
        for tensor in infos:
            if start + tensor.offset + tensor.size > self._size:
                raise _Broken(f"tensor {tensor.name!r} ends after the file")
        if start + sum(tensor.size for tensor in infos) > self._size:  # else a small file could fill the memory
            raise _Broken("tensors overlap")
        return Header(values, keys, len(infos), sum(tensor.elements for tensor in infos))

    def _fits(self, count: int, least: int, what: str) -> int:
        if count * least > self._size - self._at:
            raise _Broken(f"{count} {what}")
        return count

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise _Broken(f"{size} bytes expected at {self._at}")
        self._at += size
        return self._data[self._at - size:self._at]

    def _number(self, form: str) -> int:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode()

    def _value(self, key: str, kind: int, values: dict[str, str | int]) -> None:
        if kind == _STRING:
            values[key] = self._string()
        elif kind in _INTEGERS:
            values[key] = self._number(_INTEGERS[kind])
        elif kind in _SIZES:
            self._take(_SIZES[kind])
        elif kind == _ARRAY:
            self._array()
        else:
            raise _Broken(f"a value of type {kind}")

    def _array(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind in _SIZES:
            self._take(_SIZES[kind] * count)
        elif kind == _STRING:
            for _ in range(self._fits(count, 8, "strings")):
                self._take(self._number("<Q"))
        else:
            raise _Broken(f"an array of type {kind}")

    def _tensor(self) -> _Tensor:
        name, axes = self._string(), self._number("<I")
        if axes > 4:
            raise _Broken(f"tensor {name!r} of {axes} dimensions")
        elements = math.prod(self._number("<Q") for _ in range(axes))
        block, size = _block(self._number("<I"))
        return _Tensor(name, elements, -(-elements // block) * size, self._number("<Q"))


class _Tensor(NamedTuple):
    name: str
    elements: int
    size: int  # bytes
    offset: int


def _block(kind: int) -> tuple[int, int]:
    """Elements and bytes of a block of a quantized type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise _Broken(f"a tensor of type {kind}") from None


def convert(path: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as safetensors in float32, with its tokenizer, into `folder`.

    The folder appears whole or not at all. ProbeError says why a file can't be converted.
    """
    header = read_header(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
        if time.time() - leftover.stat().st_mtime > _LEFTOVER_AFTER:
            shutil.rmtree(leftover, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _convert(path, header, unfinished)
        for file in unfinished.iterdir():  # on the disk before it has its name
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        if not folder.exists():  # another process may have been faster
            os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(path: Path, header: Header, folder: Path) -> None:
    if "tokenizer.ggml.tokens" not in header.keys:
        raise ProbeError(f"{path}: holds no tokenizer; give the Hugging Face folder of the model instead")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        model = _model(path, header)
    except ProbeError:
        raise
    except MemoryError:
        raise ProbeError(f"{path}: needs more memory than there is; give a smaller model") from None
    except Exception as error:  # whatever transformers, tokenizers or gguf stumble over in a damaged file
        raise ProbeError(f"{path}: can't be converted ({one_line(error)}); give a file of another quantization, or the "
                         "Hugging Face folder of the model") from None
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _model(path: Path, header: Header) -> Any:
    """The model in float32. transformers' from_pretrained would need the package accelerate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    layers = header.values.get(f"{header.values.get('general.architecture')}.block_count", 0)
    if not isinstance(layers, int) or not 0 < layers <= header.tensors:
        raise ProbeError(f"{path}: says {layers} layers and holds {header.tensors} tensors; download it again")
    # Not AutoConfig.from_pretrained: it marks the model as quantized.
    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    with torch.device("meta"):  # costs nothing, whatever sizes the file claims
        wanted = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if wanted > header.elements:
        raise ProbeError(f"{path}: holds {header.elements} weights where the model has {wanted}; download it again")
    model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    lost = sorted(set(missing) - tied) or sorted(unexpected)
    if lost:
        raise ProbeError(f"{path}: {lost[0]} and the architecture don't match; give the Hugging Face folder instead")
    return model
