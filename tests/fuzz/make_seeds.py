#!/usr/bin/env python3
"""Writes the seed corpora of the fuzzers: make_seeds.py FOLDER makes FOLDER/npy and FOLDER/rule."""

import pathlib
import struct
import sys

ITEM_BYTES = {"<f4": 4, "<f8": 8, "<f2": 2, "<V2": 2, "|b1": 1, "<i8": 8}

RULES = [
    "none", "paper", "fixed:1.5", "log-length:16", "log-length:16,0.5", "ssmax:0.4",
    "target-entropy:0.2", "target-peak:0.9", "polynomial:-0.037,0.481,-2.3,4.917,-1.791",
    "polynomial:1,2:gate=0:hold=5.5", "polynomial:1e300,-1e-300,0:hold=inf", "fixed:", "fixed:nan",
    "fixed:-1", "target-peak:1", "polynomial:1,,2", "polynomial:1:gate", "log-length:16,0.5,3", "",
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


def save(folder, seeds):
    folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds):
        (folder / f"seed_{i:03d}").write_bytes(seed)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_seeds.py FOLDER")
    folder = pathlib.Path(sys.argv[1])
    save(folder / "npy", npy_seeds())
    save(folder / "rule", (rule.encode() for rule in RULES))


if __name__ == "__main__":
    main()
