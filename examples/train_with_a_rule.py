"""Trains a small attention model to find the largest of a set of items, with and without a rule, then tests it on sets
far larger than those it saw: python examples/train_with_a_rule.py

An item is a class and a priority; the answer is the class of the item with the highest priority. One query attends
to all items. In a softmax over more and more items every weight falls; a rule keeps the head sharp.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from whet.torch import attention

CLASSES = 10
TRAINED_ON = 16  # at most as many items
TESTED_ON = (16, 64, 256, 1024)


class MaxRetrieval(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.items = nn.Sequential(nn.Linear(1 + CLASSES, size), nn.GELU(), nn.Linear(size, size))
        self.query = nn.Parameter(torch.randn(size))
        self.key, self.value = nn.Linear(size, size), nn.Linear(size, size)
        self.answer = nn.Sequential(nn.GELU(), nn.Linear(size, CLASSES))

    def forward(self, items, rule):  # (batch, n, 1 + CLASSES)
        x = self.items(items)
        query = self.query.expand(len(x), 1, 1, -1)
        out, stats = attention(query, self.key(x)[:, None], self.value(x)[:, None], rule=rule, return_stats=True)
        return self.answer(out[:, 0, 0]), stats


def draw(batch, n, random):
    priority = torch.rand(batch, n, 1, generator=random)
    kind = torch.randint(CLASSES, (batch, n), generator=random)
    best = priority[..., 0].argmax(-1, keepdim=True)
    return torch.cat([priority, F.one_hot(kind, CLASSES)], -1), kind.gather(1, best)[:, 0]


def train(rule, steps):
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    model = MaxRetrieval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        items, answer = draw(64, 5 + step % (TRAINED_ON - 4), random)
        loss = F.cross_entropy(model(items, rule)[0], answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def test(model, rule, n):
    items, answer = draw(128, n, torch.Generator().manual_seed(n))
    logits, stats = model(items, rule)
    return (logits.argmax(-1) == answer).double().mean().item(), stats.sharp_peak.mean().item()


def main(steps):
    torch.set_num_threads(1)  # on tensors this small, threads wait for each other
    start = time.perf_counter()
    plain = train(None, steps)
    trained = train("target-entropy:0.2", steps)
    cases = {
        "no rule": (plain, None),
        "no rule in training, then target-entropy:0.2": (plain, "target-entropy:0.2"),
        "target-entropy:0.2 in both": (trained, "target-entropy:0.2"),
    }
    print(f"{'accuracy / mean largest weight, by items':46}" + "".join(f"{n:>13}" for n in TESTED_ON))
    for name, (model, rule) in cases.items():
        cells = (test(model, rule, n) for n in TESTED_ON)
        print(f"{name:46}" + "".join(f"  {accuracy:4.0%} / {peak:4.2f}" for accuracy, peak in cells))
    print(f"{time.perf_counter() - start:.0f} s, {steps} steps each, sets of 5 to {TRAINED_ON} items in training")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
