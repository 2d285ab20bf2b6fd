"""What a model makes of a text and of hidden pass keys while its heads have rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.probe.measure import refusals
from whet.probe.models import Loaded
from whet.probe.prompts import Prompt

Rules = np.ndarray  # (layers, heads) of names of rules


def rules_of(loaded: Loaded, rule: str = "none", where: np.ndarray | None = None) -> Rules:
    """One rule for all heads, or for those where `where`, (layers, heads), is True."""
    rules = np.full((loaded.layers, loaded.heads), "none", dtype=object)
    rules[... if where is None else where] = rule
    return rules


def by_layer(rules: Rules) -> dict[int, list[str]]:
    """As whet.transformers.enable takes them: only layers that have a rule."""
    return {layer: [str(rule) for rule in row] for layer, row in enumerate(rules) if any(rule != "none" for rule in row)}


def text_losses(loaded: Loaded, pieces: Sequence[list[int]], rules: Rules) -> np.ndarray:
    """The mean loss per token of each piece of text, in nats: -ln of the probability given to what comes next."""
    import torch

    from whet.transformers import enable

    with refusals(loaded.name), torch.no_grad(), enable(loaded.model, rule=by_layer(rules)):
        return np.array([float(_loss(loaded.model, piece)) for piece in pieces])


def recalled(loaded: Loaded, prompts: Sequence[Prompt], rules: Rules) -> int:
    """In how many prompts the most likely token is the right one all along the answer, each given those before it.

    No text is sampled: the first tokens of a small model's answers are near ties, and one that falls the other way
    changes all that follow.
    """
    import torch

    from whet.transformers import enable

    hits = 0
    with refusals(loaded.name), torch.no_grad(), enable(loaded.model, rule=by_layer(rules)):
        for prompt in prompts:
            tokens = torch.tensor([prompt.tokens + prompt.answer[:-1]])
            count = len(prompt.answer)
            logits = loaded.model(tokens, use_cache=False, **loaded.last_logits(count)).logits[0, -count:]
            hits += logits.argmax(-1).tolist() == prompt.answer
    return hits


def slopes(loaded: Loaded, pieces: Sequence[list[int]]) -> np.ndarray:
    """d loss / d beta of every head at beta = 1, (pieces, layers, heads): below 0 where sharpening the head a little
    lowers the loss.

    One forward and one backward pass per piece for all heads at once. It is the first order only: beta = 2 is far.
    """
    import torch

    from whet.transformers import enable

    found = []
    with refusals(loaded.name):
        for piece in pieces:
            scale = torch.ones(loaded.layers, loaded.heads, requires_grad=True)
            with enable(loaded.model, query_scale=scale), torch.enable_grad():
                (slope,) = torch.autograd.grad(_loss(loaded.model, piece), scale)
            found.append(slope.to(torch.float64).numpy())
    return np.stack(found)


def _loss(model: Any, piece: list[int]) -> Any:
    import torch

    tokens = torch.tensor([piece])
    logits = model(tokens, use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
