"""The max-retrieval head of "softmax is not enough" in PyTorch, with weights that `whet train` made:

    whet train run --recipe sharp --steps 40000
    whet eval run --sizes 16,256,4096 --sets 64 --save-sets sets.safetensors
    python examples/torch_attention.py run sets.safetensors [--rule RULE]

Each set holds n items, a priority and a class; the head names the class of the item with the largest priority. On the
same sets it gives the answers that `whet eval` gives. Its attention is `whet.torch.attention`, which has the signature
of `scaled_dot_product_attention`. Layers have the names of the checkpoint's tensors.
"""

import max_retrieval
import torch
from max_retrieval import CLASSES, WIDTH
from torch import nn
from torch.nn import functional as F
from whet.torch import attention

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


@torch.no_grad()
def evaluate(run, sets, rule):
    """Yields the number of items, the answers, the right answers and the largest weights."""
    head = MaxRetrieval(rule)
    head.load_state_dict({name: torch.from_numpy(t) for name, t in max_retrieval.load_weights(run).items()})
    for items, queries, targets in max_retrieval.load_sets(sets):
        scores, stats = head(torch.from_numpy(items), torch.from_numpy(queries))
        yield items.shape[1], scores.argmax(-1), targets, stats.sharp_peak


def main():
    max_retrieval.main(__doc__, evaluate)


if __name__ == "__main__":
    main()
