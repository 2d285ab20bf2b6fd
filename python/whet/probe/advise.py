"""Does sharpening help this model? Loss on a text and recall of a pass key under several settings, and one sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from whet.probe.errors import ProbeError
from whet.probe.intervals import mean_interval, share_interval, t_quantile
from whet.probe.losses import Rules, recalled, rules_of, slopes, text_losses
from whet.probe.models import Loaded
from whet.probe.prompts import Prompt, Prompts, pieces

PIECE_TOKENS, MOST_PIECES = 512, 12  # of the text
SLOPE_SHARE = 3  # every third piece chooses heads by slope, the others measure
NEEDLES = 12


class Setting(NamedTuple):
    """A rule for every head, and what to call that."""

    name: str
    rules: Rules


class Outcome(NamedTuple):
    """What a setting gave."""

    name: str
    losses: np.ndarray  # by piece
    hits: int  # pass keys recalled


class Advice(NamedTuple):
    """All outcomes, `none` first, of the same pieces and pass keys."""

    outcomes: list[Outcome]
    needles: int
    tokens: int  # of text under each setting

    def results(self) -> dict[str, Any]:
        """`settings` and `verdict` of results.json."""
        return {"settings": [self._entry(outcome) for outcome in self.outcomes], "verdict": self.verdict()}

    def _entry(self, outcome: Outcome) -> dict[str, Any]:
        loss = mean_interval(outcome.losses)
        difference = mean_interval(outcome.losses - self.outcomes[0].losses)
        needle = share_interval(outcome.hits, self.needles)
        return {"name": outcome.name, "perplexity": _exp(loss.mean), "perplexity_low": _exp(loss.low),
                "perplexity_high": _exp(loss.high), "difference": difference.mean, "low": difference.low,
                "high": difference.high, "needle": needle.mean, "needle_low": needle.low, "needle_high": needle.high,
                "tokens": self.tokens}

    def verdict(self) -> str:
        """One sentence. A setting helps only if its gain is clear of 0 though it was picked among several: the
        intervals that decide are widened for that (Bonferroni)."""
        none, others = self.outcomes[0], self.outcomes[1:]
        best = min(others, key=lambda outcome: float(outcome.losses.mean()))
        gain = best.losses - none.losses
        half = t_quantile(gain.size - 1, 1 - 0.05 / len(others)) * float(gain.std(ddof=1)) / math.sqrt(gain.size)
        helps = float(gain.mean()) + half < 0
        recall = f"recalls {best.hits} of {self.needles} pass keys (none: {none.hits})"
        if helps and best.hits >= none.hits:
            return (f"Sharpen with {best.name}: it lowers the loss by {_change(-gain)} and {recall}; perplexity "
                    f"{_perplexity(none)} becomes {_perplexity(best)}.")
        if helps:
            return (f"Don't sharpen for recall: {best.name} lowers the loss by {_change(-gain)} but {recall}.")
        worst = max(others, key=lambda outcome: float(outcome.losses.mean()))
        return (f"Don't sharpen this model: none of {len(others)} settings lowers the loss beyond its interval; the best, "
                f"{best.name}, changes it by {_change(gain)} and {recall}, the worst, {worst.name}, takes perplexity from "
                f"{_perplexity(none)} to {_perplexity(worst)} and recalls {worst.hits}.")


def advise(loaded: Loaded, text: str, heads: Sequence[dict[str, Any]], shortest: dict[str, Any], seed: int = 0,
           progress: Callable[[str], None] = lambda text: None) -> Advice:
    """Measures every setting on the same pieces of a text and the same pass keys.

    Args:
        heads: `heads` of results.json: its dispersing heads are a setting.
        shortest: the first of `lengths` of results.json: what entropy target-entropy holds each head at.
        seed: of the pass keys.
        progress: called with what is going on.
    """
    length = check_text(loaded, text)
    cut = pieces(loaded.tokenizer, text, length, MOST_PIECES)
    choosing, measuring = cut[::SLOPE_SHARE], [piece for i, piece in enumerate(cut) if i % SLOPE_SHARE]
    needles = _needles(loaded, length, seed)
    progress(f"slopes of the loss on {len(choosing)} pieces of {length} tokens")
    chosen = settings(loaded, heads, shortest, slopes(loaded, choosing))
    outcomes = []
    for i, setting in enumerate(chosen):
        progress(f"setting {i + 1} of {len(chosen)}: {setting.name}")
        outcomes.append(Outcome(setting.name, text_losses(loaded, measuring, setting.rules),
                                recalled(loaded, needles, setting.rules)))
    return Advice(outcomes, len(needles), sum(len(piece) - 1 for piece in measuring))


def check_text(loaded: Loaded, text: str) -> int:
    """The tokens of a piece of a text to advise on. ProbeError if it is too short for that."""
    return piece_length(loaded, text, 4 * SLOPE_SHARE)


def piece_length(loaded: Loaded, text: str, least: int) -> int:
    """Tokens of a piece, so that a text gives `least` of them; 32 at least. ProbeError if it is too short for that."""
    total = len(loaded.tokenizer(text, add_special_tokens=False).input_ids)
    length = min(PIECE_TOKENS, loaded.context or PIECE_TOKENS, total // least)
    if length < 32:
        raise ProbeError(f"the text has {total} tokens where at least {32 * least} are needed; give a longer text")
    return length


def settings(loaded: Loaded, heads: Sequence[dict[str, Any]], shortest: dict[str, Any],
             slope: np.ndarray) -> list[Setting]:
    """What is compared; `slope` is that of the loss by piece, layer and head."""
    layers = np.arange(loaded.layers)[:, None]
    dispersing = np.zeros((loaded.layers, loaded.heads), bool)
    for head in heads:
        dispersing[head["layer"], head["head"]] = head["class"] == "dispersing"
    found = [Setting("none", rules_of(loaded)), Setting("paper in all heads", rules_of(loaded, "paper"))]
    bounds = [round(third * loaded.layers / 3) for third in range(4)]
    for first, end in itertools.pairwise(bounds):
        if end > first:
            where = np.broadcast_to((layers >= first) & (layers < end), dispersing.shape)
            found.append(Setting(f"paper in layers {first} to {end - 1}", rules_of(loaded, "paper", where)))
    if dispersing.any():
        found.append(Setting(f"paper in {dispersing.sum()} dispersing heads", rules_of(loaded, "paper", dispersing)))
    start = round(shortest["tokens"])
    found.append(Setting(f"log-length:{start}", rules_of(loaded, f"log-length:{start}")))
    entropy = np.maximum(np.nan_to_num(np.asarray(shortest["statistics"]["entropy"]["mean"], np.float64)), 0.01)
    held = np.array([[f"target-entropy:{value:.4g}" for value in row] for row in entropy], dtype=object)
    found.append(Setting(f"target-entropy as at {start} tokens", held))
    helpful = clearly(slope, -1)
    if helpful.any():
        found.append(Setting(f"paper in {helpful.sum()} heads by slope", rules_of(loaded, "paper", helpful)))
    return found


def clearly(slope: np.ndarray, sign: int) -> np.ndarray:
    """Where the mean over pieces has this sign, and so has its whole 95 % interval."""
    half = t_quantile(len(slope) - 1) * slope.std(axis=0, ddof=1) / math.sqrt(len(slope))
    return sign * slope.mean(axis=0) > half


def table(found: dict[str, Any]) -> str:
    """`settings` and `verdict` for people."""
    lines = ["  setting                            perplexity  loss against none, nats     pass keys"]
    for entry in found["settings"]:
        change = f"{entry['difference']:+.3f} ({entry['low']:+.3f} to {entry['high']:+.3f})"
        lines.append(f"  {entry['name']:<34} {entry['perplexity']:10.2f}  {change:<26}  {entry['needle']:.2f}")
    return "\n".join([*lines, "", found["verdict"]])


def _needles(loaded: Loaded, length: int, seed: int) -> list[Prompt]:
    prompts = Prompts("needle", loaded.tokenizer, seed, most=loaded.most_tokens)
    # Short pieces come from short texts; the question for a pass key needs some room.
    length = min(max(length, 192), loaded.context or PIECE_TOKENS)
    return [prompts.draw(length, index) for index in range(NEEDLES)]


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _change(differences: np.ndarray) -> str:
    mean, low, high = mean_interval(differences)
    return f"{mean:.3f} nats per token (95 %: {low:.3f} to {high:.3f})"


def _perplexity(outcome: Outcome) -> str:
    return f"{_exp(float(outcome.losses.mean())):.2f}"
