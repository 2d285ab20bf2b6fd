"""Trains a small decoder on sequences of which each process holds a part:

    torchrun --nproc-per-node 2 examples/context_parallel.py

One token among hundreds says a number, and the last token asks for it. The asking token lies with the last process, the
answer mostly with another: attention over the keys of all of them (whet.torch.distributed) brings it over, with the paper's
rule in all heads, and the gradient back. No process ever has the activations or keys of the others.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from whet.torch.distributed import attention

WORDS, ANSWERS = 64, 16  # what fills a sequence, and what may be asked for
QUESTION = WORDS + ANSWERS


class Block(nn.Module):
    """Attention over the whole sequence and a feed-forward layer, each behind a norm and beside a sum."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.inward(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = attention(q, k, v, is_causal=True, rule="paper", shard_queries=True)
        x = x + self.outward(mixed.transpose(1, 2).flatten(2))
        return x + self.hidden(self.norms[1](x))


def sequences(batch, tokens, random):
    """The same on every process: words, one of them replaced by a number, and the question at the end."""
    x = torch.randint(WORDS, (batch, tokens), generator=random)
    answer = torch.randint(ANSWERS, (batch,), generator=random)
    place = torch.randint(tokens - 1, (batch,), generator=random)
    x[torch.arange(batch), place] = WORDS + answer
    x[:, -1] = QUESTION
    return x, answer


def main():
    parser = argparse.ArgumentParser(description="a decoder on sequences that several processes hold together")
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence (default: 256)")
    parser.add_argument("--steps", type=int, default=300, help="(default: 300)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    own = slice(options.tokens * rank // processes, options.tokens * (rank + 1) // processes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(QUESTION + 1, 64), Block(64, 4), nn.RMSNorm(64), nn.Linear(64, ANSWERS))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    random, start = torch.Generator().manual_seed(1), time.monotonic()
    for step in range(1, options.steps + 1):
        x, answer = sequences(32, options.tokens, random)
        logits = model(x[:, own])
        # The last process has the question; the others take part in its backward pass.
        asks = rank == processes - 1
        loss = F.cross_entropy(logits[:, -1], answer) if asks else 0 * logits.sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if asks and (step % 25 == 0 or step == options.steps):
            right = (logits[:, -1].argmax(-1) == answer).sum().item()
            print(f"step {step}: loss {loss.item():.3f}, {right} of 32 right, {time.monotonic() - start:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
