"""Text as tokens: characters, or one token per number.

With one token per number, `[0.5 0.123]` is four tokens: between two numbers that follow each other there is a space, which
has no token of its own. Decoding gives back the very text that was encoded, whatever it was: what the vocabulary doesn't
have, a longer number or another word, is spelled in characters.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from typing import Any

from whet.clrs.errors import ClrsError

KINDS = ("numbers", "characters")
PADDING = 0
_CHARACTERS = "\n " + string.digits + string.ascii_letters + "_.,:;|()[]{}<>+-*/=?!'\"#&%@$^~`\\"
_PIECES = re.compile(r"-?\d+\.\d+|-?\d+|[A-Za-z_]\w*|\n\n|:\n| \| |, |: |[\[(]+|[\])]+|.", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
END = "\n\n"


class Tokens:
    """A vocabulary, and text to and from its numbers.

    Args:
        kind: "numbers" or "characters".
        words: pieces of text that have a token of their own. Unused by characters.
        thousandths: (lowest, highest) number with three decimals that has a token, in thousandths.
        integers: (lowest, highest) integer that has one.
    """

    def __init__(self, kind: str, words: Iterable[str] = (), thousandths: tuple[int, int] = (0, 1000),
                 integers: tuple[int, int] = (0, 256)) -> None:
        if kind not in KINDS:
            raise ClrsError(f"tokens: are {kind!r}, must be one of {', '.join(KINDS)}")
        self.kind, self.words = kind, tuple(sorted(set(words))) if kind == "numbers" else ()
        self.thousandths, self.integers = tuple(thousandths), tuple(integers)
        numbers: list[str] = []
        if kind == "numbers":
            numbers += [str(value / 1000) for value in range(self.thousandths[0], self.thousandths[1] + 1)]
            numbers += [str(value) for value in range(self.integers[0], self.integers[1] + 1)]
        # One-digit integers are characters too: the longer list decides.
        taken = {*numbers, *self.words}
        singles = [one for one in dict.fromkeys(_CHARACTERS) if one not in taken]
        # What a number begins with is spelled by the same characters; `digits` are those that are not numbers.
        digits = [f"\0{digit}" for digit in string.digits if digit in taken]
        ends = [END] if END not in taken else []
        self._texts = ["", *ends, *singles, *digits, *self.words, *numbers]
        self._ids = {text: number for number, text in enumerate(self._texts)}
        self._first_number = len(self._texts) - len(numbers)
        self.end = self._ids[END]

    def __len__(self) -> int:
        return len(self._texts)

    def encode(self, text: str) -> list[int]:
        if self.kind == "characters":
            return [self._character(one) for one in _characters(text)]
        ids: list[int] = []
        pieces = _PIECES.findall(text)
        for before, piece, after in zip(["", *pieces], pieces, [*pieces[1:], ""]):
            if piece == " " and self._is_number(before) and self._is_number(after):
                continue
            known = self._ids.get(piece)
            if known is not None and not (self._is_number(before) and self._is_number(piece)):  # as 5-3: no space between
                ids.append(known)
            else:
                ids.extend(self._character(one) for one in piece)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text; padding is nothing."""
        text, after_number = [], False
        for one in ids:
            is_number = one >= self._first_number
            text.append((" " if after_number and is_number else "") + self._texts[one].removeprefix("\0"))
            after_number = is_number
        return "".join(text)

    def fractions(self) -> dict[int, float]:
        """The value of each token that is a number with decimals."""
        low, high = self.thousandths if self.kind == "numbers" else _NONE
        return {self._ids[str(value / 1000)]: value / 1000 for value in range(low, high + 1)}

    def breaks(self) -> tuple[int, ...]:
        """The tokens that end a line."""
        return tuple(number for number, text in enumerate(self._texts) if "\n" in text)

    def settings(self) -> dict[str, Any]:
        """What makes the same vocabulary again."""
        return {"kind": self.kind, "words": list(self.words), "thousandths": list(self.thousandths),
                "integers": list(self.integers)}

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Tokens:
        return cls(settings["kind"], settings["words"], tuple(settings["thousandths"]), tuple(settings["integers"]))

    def _is_number(self, piece: str) -> bool:
        known = self._ids.get(piece)
        return known is not None and known >= self._first_number

    def _character(self, one: str) -> int:
        known = self._ids.get(f"\0{one}", self._ids.get(one))
        if known is None:
            raise ClrsError(f"text: has the character {one!r}, which no problem of CLRS-Text has")
        return known


def vocabulary_of(kind: str, algorithms: Iterable[str], texts: Iterable[str]) -> Tokens:
    """For the problems of these algorithms, of each of which `texts` has one at least: their words, and the kinds of numbers
    that they have."""
    pieces = {piece for text in texts for piece in _PIECES.findall(text)}
    has_integers = any(_NUMBER.fullmatch(piece) and "." not in piece for piece in pieces)
    has_fractions = any(_NUMBER.fullmatch(piece) and "." in piece for piece in pieces)
    words = (piece for piece in pieces if len(piece) > 1 and not _NUMBER.fullmatch(piece))
    return Tokens(kind, words, _range_of(algorithms) if has_fractions else _NONE, (0, 256) if has_integers else _NONE)


_NONE = (0, -1)


def _range_of(algorithms: Iterable[str]) -> tuple[int, int]:
    """The lowest and highest number that the inputs of these algorithms have, in thousandths."""
    lowest, highest = 0, 1000
    for algorithm in algorithms:
        if algorithm == "find_maximum_subarray_kadane":
            lowest = min(lowest, -1000)
        elif algorithm in ("graham_scan", "jarvis_march"):  # points of a disk of radius 2
            lowest, highest = -2000, 2000
    return lowest, highest


def _characters(text: str) -> list[str]:
    """Single characters, but for the end, which has one token in both kinds."""
    return re.findall(r"\n\n|.", text, re.DOTALL)
