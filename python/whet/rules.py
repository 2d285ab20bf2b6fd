"""Rules: each chooses the inverse temperature beta of a row. With n the visible keys of the row and H its entropy:

=====================  ======================  =====================================================
class                  name                    beta
=====================  ======================  =====================================================
``NoRule()``           ``none``                1
``Paper()``            ``paper``               the published polynomial of H, at least 1
``Fixed(b)``           ``fixed:b``             b
``LogLength(n0, s)``   ``log-length:n0,s``     s ln n / ln n0, at least 1
``SSMax(s)``           ``ssmax:s``             s ln n
``LogPower(d, b, g)``  ``log-power:d,b,g``     d + b (ln n)^g
``Llama4(n0, s)``      ``llama4:n0,s``         1 + s ln(floor(n / n0) + 1)
``TargetEntropy(h)``   ``target-entropy:h``    the one, at least 1, at which the entropy is h
``TargetPeak(w)``      ``target-peak:w``       the one, at least 1, at which the largest weight is w
``Polynomial(...)``    ``polynomial:...``      a polynomial of H, at least 1
=====================  ======================  =====================================================

Wherever a function takes a rule, it takes an object of these classes, its name, or None for no rule.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from whet import _core
from whet._arguments import array


@dataclass(frozen=True)
class Rule:
    """What all rules have in common. Rules are values: frozen, hashable, equal if they do the same.

    ``name`` is the name the rule has on the command line; ``whet.rule(name)`` is an equal rule.

    >>> import whet
    >>> whet.TargetEntropy(0.2).name
    'target-entropy:0.2'
    >>> whet.rule("target-entropy:0.2") == whet.TargetEntropy(0.2)
    True
    """

    kind: ClassVar[str]
    adaptive: ClassVar[bool] = False  # whether beta depends on the logits, not only on how many there are
    name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The extension checks the parameters, and knows the one way to write them.
        _, name, _ = _core.rule_parts(self._text())
        object.__setattr__(self, "name", name)

    def _text(self) -> str:
        return self.kind

    def beta(self, states: np.ndarray) -> np.ndarray:
        """The beta of each row of which these are the states (see whet.states), in their shape.

        ValueError for TargetEntropy and TargetPeak, which need the rows themselves.

        >>> import whet
        >>> float(whet.LogLength(10).beta(whet.states([0.0] * 100)))
        2.0
        """
        states = array(states, "states")
        betas = np.empty(states.shape)
        _core.betas(np.ascontiguousarray(states).view(np.int64), betas, self.name)
        return betas


@dataclass(frozen=True)
class NoRule(Rule):
    """beta = 1: plain softmax."""

    kind = "none"


@dataclass(frozen=True)
class Paper(Rule):
    """The rule of "softmax is not enough": a polynomial of the entropy, at most 2.42. Off above 5.945 nats."""

    kind = "paper"
    adaptive = True


@dataclass(frozen=True)
class Fixed(Rule):
    """The same beta for every row, from 2^-60 to 2^60."""

    value: float
    kind = "fixed"

    def _text(self) -> str:
        return _text(self.kind, self.value)


@dataclass(frozen=True)
class LogLength(Rule):
    """s ln n / ln n0, at least 1: for a head trained at about n0 keys. n0 > 1, s > 0."""

    n0: float
    s: float = 1.0
    kind = "log-length"

    def _text(self) -> str:
        return _text(self.kind, self.n0, self.s)


@dataclass(frozen=True)
class SSMax(Rule):
    """s ln n, for a model trained that way. s > 0."""

    s: float
    kind = "ssmax"

    def _text(self) -> str:
        return _text(self.kind, self.s)


@dataclass(frozen=True)
class LogPower(Rule):
    """d + b (ln n)^g, the scale of ASEntmax, for a model trained that way. d, b, g >= 0, d and b not both 0.

    >>> import whet
    >>> float(whet.LogPower(1, 0.5, 2).beta(whet.states([0.0] * 100)).round(3))
    11.604
    """

    d: float
    b: float
    g: float
    kind = "log-power"

    def _text(self) -> str:
        return _text(self.kind, self.d, self.b, self.g)


@dataclass(frozen=True)
class Llama4(Rule):
    """1 + s ln(floor(n / n0) + 1), as Llama 4 scales its queries: 1 below n0 keys. n0 a whole number >= 1, s > 0.

    >>> import whet
    >>> float(whet.Llama4(8192).beta(whet.states([0.0] * 8192)).round(4))
    1.0693
    """

    n0: float
    s: float = 0.1
    kind = "llama4"

    def _text(self) -> str:
        return _text(self.kind, self.n0, self.s)


@dataclass(frozen=True)
class TargetEntropy(Rule):
    """Whatever brings the entropy down to h nats. h > 0."""

    h: float
    kind = "target-entropy"
    adaptive = True

    def _text(self) -> str:
        return _text(self.kind, self.h)


@dataclass(frozen=True)
class TargetPeak(Rule):
    """Whatever gives the best key the weight w. 0 < w < 1."""

    w: float
    kind = "target-peak"
    adaptive = True

    def _text(self) -> str:
        return _text(self.kind, self.w)


@dataclass(frozen=True)
class Polynomial(Rule):
    """A polynomial of the entropy, at least 1: 1 to 8 coefficients, highest power first.

    Rows of entropy up to `gate` keep beta = 1; beyond `hold` the polynomial keeps its value there, so give the
    largest entropy it was fitted on.

    >>> import whet
    >>> whet.Polynomial([0.5, 1.0], hold=4.0)
    Polynomial(coefficients=(0.5, 1.0), gate=0.5, hold=4.0)
    """

    coefficients: tuple[float, ...]
    gate: float = 0.5
    hold: float = math.inf
    kind = "polynomial"
    adaptive = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", tuple(float(c) for c in self.coefficients))
        if not self.coefficients:
            raise ValueError("coefficients: none given, must be 1 to 8")
        super().__post_init__()

    def _text(self) -> str:
        return f"{_text(self.kind, *self.coefficients)}:gate={float(self.gate)!r}:hold={float(self.hold)!r}"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Polynomial:
        """From a file: a line ``polynomial:C4,C3,...[:gate=G][:hold=H]``; lines that start with # are skipped."""
        # An absolute path can't be taken for coefficients.
        _, _, values = _core.rule_parts(f"polynomial:{os.path.abspath(os.fspath(path))}")
        return cls(*values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes what `load` and the command line's ``--rule polynomial:FILE`` read."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.name + "\n")


RuleLike = str | Rule | None

_CLASSES = {c.kind: c for c in (NoRule, Paper, Fixed, LogLength, SSMax, LogPower, Llama4, TargetEntropy, TargetPeak,
                                Polynomial)}


def _text(kind: str, *values: float) -> str:
    return f"{kind}:{','.join(repr(float(value)) for value in values)}"


def rule(rule: RuleLike) -> Rule:
    """The rule of this name. A rule is given back as it is, None gives NoRule().

    ValueError if there is none of that name; the text lists all.

    >>> import whet
    >>> whet.rule("log-length:16")
    LogLength(n0=16.0, s=1.0)
    """
    if isinstance(rule, Rule):
        return rule
    kind, _, values = _core.rule_parts(rule_name(rule))
    return _CLASSES[kind](*values)


def rule_name(rule: RuleLike) -> str | None:
    """What the extension takes for a rule."""
    if rule is None or isinstance(rule, str):
        return rule
    if isinstance(rule, Rule):
        return rule.name
    raise TypeError(f"rule: is a {type(rule).__name__}, must be a Rule, the name of one or None")


def rule_names(rule: RuleLike | Sequence[RuleLike]) -> str | list[str] | None:
    """The same where one rule per head may be given."""
    if not isinstance(rule, str | None) and isinstance(rule, Sequence):
        return [rule_name(one) or "none" for one in rule]
    return rule_name(rule)
