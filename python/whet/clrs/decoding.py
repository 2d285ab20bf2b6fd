"""Greedy answers of a decoder, in batches, with a cache of keys and values over whet's decode path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whet.clrs.model import Decoder
from whet.clrs.tokens import PADDING


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows of numbers as (B, N), and how many each has."""
    lengths = torch.tensor([len(row) for row in rows])
    table = torch.full((len(rows), int(lengths.max())), PADDING)
    for number, row in enumerate(rows):
        table[number, :len(row)] = torch.tensor(row)
    return table, lengths


@torch.no_grad()
def greedy(model: Decoder, questions: Sequence[Sequence[int]], most: int, end: int) -> list[list[int]]:
    """The most likely token after each question, and after that, until `end` (which is included) or `most` tokens.

    Questions may differ in length. A sequence that has ended goes on until all have; what follows its end is left out.
    """
    tokens, lengths = padded(questions)
    cache = model.empty_cache(len(questions), tokens.shape[1] + most)
    last = torch.arange(len(questions)) * tokens.shape[1] + lengths - 1
    following = model(tokens, last, cache).argmax(-1)
    cache = cache._replace(lengths=lengths)
    found, ended = [following], following == end
    while len(found) < most and not bool(ended.all()):
        following = model(following[:, None], cache=cache)[:, 0].argmax(-1)
        cache = cache._replace(lengths=cache.lengths + 1)
        found.append(following)
        ended |= following == end
    return [_until(row, end) for row in torch.stack(found, 1).tolist()]


def _until(row: list[int], end: int) -> list[int]:
    return row[:row.index(end) + 1] if end in row else row
