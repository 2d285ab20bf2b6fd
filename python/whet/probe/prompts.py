"""Prompts of about as many tokens as asked, drawn from a seed: the same seed, length and number give the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from whet.probe.errors import ProbeError

KINDS = ("max", "needle", "text")
LARGEST_TEXT = 16 << 20  # bytes of a text that are read

_FILLER = (
    "The grass is green and the sky is blue.", "A train leaves the station every morning at six.",
    "The old bridge across the river was built of stone.", "Bread is baked before the sun comes up.",
    "Nobody had opened the window since the summer.", "The library keeps its newspapers in the cellar.",
    "A cat slept on the wall behind the garden.", "Rain fell on the roofs for most of the week.",
    "The market sells apples, onions and honey.", "Children were playing in front of the school.",
    "The clock in the hall is five minutes slow.", "Two boats were lying at the end of the pier.",
)


class Prompt(NamedTuple):
    """Tokens to run a model on, and those it should answer with (needle only)."""

    tokens: list[int]
    text: str
    answer: list[int]


class Prompts:
    """All prompts of a kind.

    Args:
        kind: "max", the paper's question for the maximum of a sequence; "needle", a pass key hidden among sentences;
            "text", pieces of a text.
        tokenizer: of the model.
        seed: another seed, other prompts.
        text: of kind "text": what the pieces are cut from.
        most: tokens that a model has positions for, a prompt and its answer together. Default: any number.
    """

    def __init__(self, kind: str, tokenizer: Any, seed: int = 0, text: str | None = None, most: int | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: is {kind!r}, must be one of {', '.join(KINDS)}")
        if kind == "text" and text is None:
            raise ValueError("text: not given, prompts of kind 'text' are cut from it")
        self.kind, self.seed = kind, seed
        self._tokenizer, self._most = tokenizer, most
        self._text = tokenizer(text, add_special_tokens=False).input_ids if text is not None else []

    def draw(self, length: int, index: int) -> Prompt:
        """Prompt number `index` of as near as can be to `length` tokens.

        ProbeError, naming both lengths, if the text or the question alone doesn't fit.
        """
        random = np.random.default_rng([self.seed, KINDS.index(self.kind), length, index])
        return {"max": self._max, "needle": self._needle, "text": self._piece}[self.kind](length, random)

    def _max(self, length: int, random: np.random.Generator) -> Prompt:
        numbers = random.integers(0, 1000, size=length)  # a number is a token or more

        def write(count: int) -> str:
            sequence = ", ".join(str(number) for number in numbers[:count])
            return f"What is the maximum in the following sequence? {sequence}. The maximum is:"

        text, tokens = self._nearest(write, length)
        return Prompt(tokens, text, [])

    def _needle(self, length: int, random: np.random.Generator) -> Prompt:
        key = str(random.integers(10_000, 100_000))
        sentences = random.choice(_FILLER, size=length)
        depth = random.uniform()

        def write(count: int) -> str:
            before = round(depth * count)
            hidden = f"The pass key is {key}. Remember it: {key} is the pass key."
            return " ".join([*sentences[:before], hidden, *sentences[before:count],
                             "What is the pass key? The pass key is"])

        room = len(self._answer("", key)) - 1  # the last token of an answer is never run
        text, tokens = self._nearest(write, length, room)
        return Prompt(tokens, text, self._answer(text, key))

    def _answer(self, text: str, key: str) -> list[int]:
        """The tokens of a key that follows a text, as the tokenizer writes both together."""
        before, whole = ([*self._tokenizer(part).input_ids] for part in (text, f"{text} {key}"))
        if whole[:len(before)] != before:  # the seam fell into a token, or a text ends with a token of its own
            return list(self._tokenizer(f" {key}", add_special_tokens=False).input_ids)
        answer = whole[len(before):]
        return answer[:-1] if answer[-1:] == [self._tokenizer.eos_token_id] else answer

    def _nearest(self, write: Callable[[int], str], length: int, room: int = 0) -> tuple[str, list[int]]:
        """The text, of as many parts as needed, whose tokens come nearest to this many, with room for so many more in
        what the model has positions for."""
        def tokens(count: int) -> list[int]:
            return list(self._tokenizer(write(count)).input_ids)

        if self._most is not None:
            length = min(length, self._most - room)
        least = tokens(1)
        if len(least) > length:
            raise ProbeError(f"a prompt of {length} tokens can't be written: the shortest of kind {self.kind!r} has "
                             f"{len(least)}; give --lengths from {len(least)} on")
        low, high = 1, length
        while high - low > 1:  # the first `low` parts fit, the first `high` don't or needn't be tried
            middle = (low + high) // 2
            low, high = (middle, high) if len(tokens(middle)) <= length else (low, middle)
        longer = tokens(low + 1)
        fits = self._most is None or len(longer) + room <= self._most
        best = low + 1 if fits and len(longer) - length < length - len(tokens(low)) else low
        return write(best), tokens(best)

    def _piece(self, length: int, random: np.random.Generator) -> Prompt:
        if len(self._text) < length:
            raise ProbeError(f"the text has {len(self._text)} tokens where a length of {length} is asked for; give a "
                             "longer text or shorter --lengths")
        start = int(random.integers(0, len(self._text) - length + 1))
        return self._cut(start, length)

    def _cut(self, start: int, length: int) -> Prompt:
        tokens = list(self._text[start:start + length])
        bos = self._tokenizer.bos_token_id
        if bos is not None and self._tokenizer("a").input_ids[:1] == [bos]:
            tokens = [bos, *tokens[:-1]]  # as the model's own prompts begin
        return Prompt(tokens, self._tokenizer.decode(tokens), [])


def read_text(path: str | Path) -> str:
    """The text of a file, its first 16 MiB. ProbeError if it is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_TEXT)
    except OSError as error:
        raise ProbeError(f"{path}: can't be read ({error.strerror or error})") from None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) < LARGEST_TEXT or error.start < len(data) - 4:  # else the cut went through a character
            raise ProbeError(f"{path}: is not text in UTF-8 (byte {error.start}); convert it first") from None
        text = data[:error.start].decode()
    if not text.strip():
        raise ProbeError(f"{path}: holds no text")
    return text


def pieces(tokenizer: Any, text: str, length: int, most: int) -> list[list[int]]:
    """Up to `most` pieces of `length` tokens that don't overlap, spread evenly over a text, each starting as the
    model's prompts start.

    ProbeError, naming both lengths, if the text has fewer than two such pieces: differences need several.
    """
    cutter = Prompts("text", tokenizer, text=text)
    total = len(cutter._text)
    count = min(most, total // length)
    if count < 2:
        raise ProbeError(f"the text has {total} tokens where at least {2 * length}, two pieces of {length}, are needed; "
                         "give a longer text")
    starts: Sequence[int] = [round(i * (total - length) / (count - 1)) for i in range(count)]
    return [cutter._cut(start, length).tokens for start in starts]
