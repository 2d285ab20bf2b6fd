"""What torch_attention.py and flax_attention.py share: the files of `whet`, and the command line."""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

CLASSES = 10
WIDTH = 128


def load_weights(run):
    """The weights of a run by name; Adam's moments, which the checkpoint also holds, are for training on."""
    tensors = load_file(Path(run) / "checkpoint.safetensors")
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("adam.")}


def load_sets(path):
    """Yields the sets of each size: items (sets, n, 1 + classes), queries (sets, 1) and the right answers (sets)."""
    tensors = load_file(path)
    for n in sorted(int(name.removesuffix(".targets")) for name in tensors if name.endswith(".targets")):
        priorities, classes, queries, targets = (tensors[f"{n}.{part}"]
                                                 for part in ("priorities", "classes", "queries", "targets"))
        one_hot = np.eye(CLASSES, dtype=np.float32)[classes]
        yield np.concatenate([priorities[..., None], one_hot], -1), queries[:, None], targets


def main(description, evaluate):
    """Prints the accuracy at each size. evaluate(run, sets, rule) yields items, answers, right answers, largest weights."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder made by 'whet train'")
    parser.add_argument("sets", help="file made by 'whet eval --save-sets'")
    parser.add_argument("--rule", default="none")
    given = parser.parse_args()
    print(f"{'items':>8}{'accuracy':>10}{'largest weight':>16}")
    for n, answers, targets, weights in evaluate(given.run, given.sets, given.rule):
        print(f"{n:8}{(np.asarray(answers) == targets).mean():10.4f}{np.asarray(weights).mean():16.4f}")
