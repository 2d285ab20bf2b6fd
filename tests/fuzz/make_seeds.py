#!/usr/bin/env python3
"""Writes the seed corpora of the fuzzers: make_seeds.py FOLDER makes FOLDER/json, FOLDER/npy,
FOLDER/rule and FOLDER/safetensors."""

import json
import pathlib
import struct
import sys

ITEM_BYTES = {"<f4": 4, "<f8": 8, "<f2": 2, "<V2": 2, "|b1": 1, "<i8": 8}

RULES = [
    "none", "paper", "fixed:1.5", "log-length:16", "log-length:16,0.5", "ssmax:0.4", "log-power:1,0.5,2",
    "llama4:8192", "llama4:8192,0.2",
    "target-entropy:0.2", "target-peak:0.9", "polynomial:-0.037,0.481,-2.3,4.917,-1.791",
    "polynomial:1,2:gate=0:hold=5.5", "polynomial:1e300,-1e-300,0:hold=inf", "fixed:", "fixed:nan",
    "fixed:-1", "target-peak:1", "polynomial:1,,2", "polynomial:1:gate", "log-length:16,0.5,3", "log-power:0,0,1",
    "log-power:1,2", "llama4:0.5", "",
]

HEADS = json.dumps({"mean": [[0.5]], "error": [[None]]})
STATISTICS = ("entropy", "relative_entropy", "peak", "first", "spread", "beta", "sharp_entropy", "sharp_peak")

SHARE = json.dumps({"mean": 0.5, "low": 0.25, "high": None})
TEST = json.dumps({"difference": 0.5, "low": -0.5, "high": 1, "p": None})

JSON = [
    '{"format": "whet run 1", "recipe": {"seed": 0, "items": [5, 16], "rate": 1e-3, "rule": "none"}}',
    '{"schema": "whet results", "version": 1, "kind": "benchmark", "provenance": {"command": "make bench", "whet": "0.1.0", '
    '"machine": "a", "target": "AVX2", "threads": 2}, "facts": {"a": "b"}, "sections": [{"title": "a", "note": "b", '
    '"headers": ["c"], "rows": [["1"]], "bars": [{"text": "d", "value": 0.5, "limit": 1, "at_most": true}]}]}',
    '{"schema": "whet results", "version": 1, "kind": "probe", "provenance": {"command": "whet probe", "whet": "0.1.0", '
    '"machine": "a", "target": "AVX2", "threads": 2}, "model": {"name": "a", "architecture": "b", "layers": 1, "heads": 1, '
    '"key_heads": 1, "parameters": 3, "context": 8}, "prompts": {"kind": "max", "example": "c", "per_length": 1, "seed": 0}, '
    '"rule": "paper", "horizon_weight": 0.5, "thresholds": {"sink": 0.5, "uniform": 0.9, "dispersing": 0.2}, "lengths": '
    '[{"tokens": 8.5, "prompts": 1, "statistics": {' + ", ".join(f'"{name}": {HEADS}' for name in STATISTICS) + "}}], "
    '"heads": [{"layer": 0, "head": 0, "class": "sink", "slope": null, "low": null, "high": null, "horizon": 12}]}',
    '{"schema": "whet results", "version": 1, "kind": "clrs", "provenance": {"command": "whet-clrs", "whet": "0.1.0", '
    '"machine": "a", "target": "AVX2", "threads": 2}, "runs": [{"name": "a", "variant": "b", "seed": 0, "step": 1, "parameters": 2, '
    '"recipe": {}, "metrics": [[1, 0.5, 0.5]]}], "tasks": [{"algorithm": "c", "hints": false, "trained_sizes": [4], "sizes": '
    '[{"size": 4, "problems": 1, "chance": {"exact": 0, "tokens": 0}, "copy": {"exact": 0, "tokens": 0}, "variants": [{"variant": "b", '
    f'"setting": "as trained", "runs": 1, "exact": {SHARE}, "tokens": {SHARE}, "forced": 1, "errors": [0.5], "entropy": [1], '
    f'"sharp_entropy": [0.5], "against_softmax": {{"exact": {TEST}, "tokens": {TEST}}}}}]}}]}}]}}',
    '[null, true, -1, 18446744073709551615, 1.5e-300, "\\ud83d\\ude00\\n\u00e9"]', "3", "", '{"a": 1, "a": 2}', "1e999",
    "[" * 32 + "]" * 32, "[" * 33 + "]" * 33, "[1]\0", "[1] 2", '{"a": [',
]

# Dictionaries that must be refused: a fuzzer gets further from near misses.
WRONG_DICTIONARIES = [
    "{}", "{'descr': '>f4', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1), }",
    "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,), }",
]

TENSOR_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
}

# The same for safetensors, each before four bytes of data.
WRONG_HEADERS = [
    "", "[]", "{}", '{"a":1}', '{"a":[[[[', '{"a":{}}', '{"__metadata__":{"a":1}}',
    '{"__metadata__":{"a":"b","a":"b"}}', '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[4,0]}}',
    '{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}',
    '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
    '"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
    '{"a\\u0000\\n":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8"}}',
]


def npy(version, dictionary, data):
    text = dictionary.encode("latin1")
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def npy_seeds():
    for version in (1, 2, 3):
        for descr, item in ITEM_BYTES.items():
            for order in (False, True):
                text = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': (2, 3), }}\n"
                yield npy(version, text, bytes(6 * item))
    for shape, count in (((), 1), ((5,), 5), ((0, 4), 0), ((1,) * 8, 1), ((1,) * 9, 1)):
        yield npy(1, f"{{'shape': {shape}, \"fortran_order\" : False, 'descr':'<f4'}}", bytes(4 * count))
    for text in WRONG_DICTIONARIES:
        yield npy(1, text, bytes(8))
    yield b"\x93NUMPY"
    yield npy(2, " " * 65536, b"")


def safetensors(header, data=b""):
    text = header.encode()
    return struct.pack("<Q", len(text)) + text + data


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


# What write_safetensors writes for one tensor: the fuzzer can't find a checksum by itself.
def checked_safetensors(name, dtype, sizes, data, metadata):
    number = struct.Struct("<Q").pack
    metadata = {**metadata, "whet.checksum.method": "fnv1a-64"}
    texts = [text.encode() for item in sorted(metadata.items()) for text in item]
    content = number(len(metadata)) + b"".join(
        number(len(text)) + text for text in (*texts, name.encode(), dtype.encode()))
    content += b"".join(map(number, (len(sizes), *sizes))) + data
    metadata["whet.checksum"] = f"{fnv1a(content):016x}"
    entry = {"dtype": dtype, "shape": sizes, "data_offsets": [0, len(data)]}
    return safetensors(json.dumps({"__metadata__": metadata, name: entry}), data)


def safetensors_seeds():
    for dtype, item in TENSOR_BYTES.items():
        entry = {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, 6 * item]}
        yield safetensors(json.dumps({"w": entry}), bytes(6 * item))
        yield checked_safetensors("w", dtype, [2, 3], bytes(6 * item), {"step": "1"})
    yield checked_safetensors("empty", "F32", [0, 4], b"", {})
    yield safetensors(json.dumps({
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [4, 7]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "": {"dtype": "I64", "shape": [0], "data_offsets": [4, 4]},
        "__metadata__": {"format": "pt", "\u00e9\n": "\U0001f600"}}) + "   ", bytes(7))
    for header in WRONG_HEADERS:
        yield safetensors(header, bytes(4))
    yield struct.pack("<Q", 2**63) + b"{}"


def save(folder, seeds):
    folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds):
        (folder / f"seed_{i:03d}").write_bytes(seed)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_seeds.py FOLDER")
    folder = pathlib.Path(sys.argv[1])
    save(folder / "json", (text.encode() for text in JSON))
    save(folder / "npy", npy_seeds())
    save(folder / "rule", (rule.encode() for rule in RULES))
    save(folder / "safetensors", safetensors_seeds())


if __name__ == "__main__":
    main()
