"""The max-retrieval head of "softmax is not enough" in PyTorch, with weights that `whet train` made:

    whet train run --recipe sharp --steps 40000
    whet eval run --sizes 16,256,4096 --sets 64 --save-sets sets.safetensors
    python examples/torch_attention.py run sets.safetensors [--rule RULE]

Each set holds n items, a priority and a class; the head names the class of the item with the largest priority. On the
same sets it gives the answers that `whet eval` gives. Its attention is `whet.torch.attention`, which has the signature
of `scaled_dot_product_attention`. Layers have the names of the checkpoint's tensors.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from whet.torch import attention

CLASSES = 10
WIDTH = 128
LAYERS = {"item1": 1 + CLASSES, "item2": WIDTH, "query1": 1, "query2": WIDTH, "q": WIDTH, "k": WIDTH, "v": WIDTH,
          "o": WIDTH, "hidden": WIDTH, "output": WIDTH}  # and the size of what comes in


class Dense(nn.Module):
    """nn.Linear with its weight as the checkpoint has it: kernel (in, out)."""

    def __init__(self, size, out):
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.empty(size, out)), nn.Parameter(torch.empty(out))

    def forward(self, x):
        return x @ self.kernel + self.bias


class MaxRetrieval(nn.Module):
    def __init__(self, rule=None):
        super().__init__()
        self.rule = rule
        for name, size in LAYERS.items():
            self.add_module(name, Dense(size, CLASSES if name == "output" else WIDTH))

    def forward(self, items, query):
        """items (batch, n, 1 + classes), query (batch, 1): scores of the classes, and stats of the attention."""
        def gelu(x):
            return F.gelu(x, approximate="tanh")

        items = gelu(self.item2(gelu(self.item1(items))))[:, None]  # one head: (batch, 1, n, WIDTH)
        query = gelu(self.query2(gelu(self.query1(query))))[:, None, None]
        found, stats = attention(self.q(query), self.k(items), self.v(items), rule=self.rule, return_stats=True)
        return self.output(gelu(self.hidden(self.o(found[:, 0, 0])))), stats


def load_head(run, rule):
    """The head of a run; Adam's moments, which the checkpoint also holds, are for training on."""
    tensors = load_file(Path(run) / "checkpoint.safetensors")
    head = MaxRetrieval(rule)
    head.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("adam.")})
    return head


def load_sets(path):
    """Yields the sets of each size: items, queries, and the right answers."""
    tensors = load_file(path)
    for n in sorted(int(name.removesuffix(".targets")) for name in tensors if name.endswith(".targets")):
        priorities, classes, queries, targets = (tensors[f"{n}.{part}"]
                                                 for part in ("priorities", "classes", "queries", "targets"))
        yield torch.cat([priorities[..., None], F.one_hot(classes.long(), CLASSES)], -1), queries[:, None], targets


@torch.no_grad()
def evaluate(run, sets, rule):
    """Yields the number of items, the answers, the right answers and the stats of the attention."""
    head = load_head(run, rule)
    for items, queries, targets in load_sets(sets):
        scores, stats = head(items, queries)
        yield items.shape[1], scores.argmax(-1), targets, stats


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder made by 'whet train'")
    parser.add_argument("sets", help="file made by 'whet eval --save-sets'")
    parser.add_argument("--rule", default="none")
    given = parser.parse_args()
    print(f"{'items':>8}{'accuracy':>10}{'largest weight':>16}")
    for n, answers, targets, stats in evaluate(given.run, given.sets, given.rule):
        print(f"{n:8}{(answers == targets).double().mean():10.4f}{stats.sharp_peak.mean():16.4f}")


if __name__ == "__main__":
    main()
