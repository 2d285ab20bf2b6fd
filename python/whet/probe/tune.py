"""`whet-tune`: a rule for each head, chosen on one part of a text, verified on a second, judged on a third."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import whet
from whet.probe import files, models, program
from whet.probe.advise import clearly, piece_length
from whet.probe.intervals import Interval, mean_interval
from whet.probe.losses import Rules, by_layer, rules_of, slopes, text_losses
from whet.probe.models import Loaded
from whet.probe.prompts import pieces, read_text

NAME = "whet-tune"
MOST_PIECES = 18
CANDIDATES = "paper+fixed:1.1+fixed:0.9"  # names of rules have commas in them

_DESCRIPTION = """\
Chooses a rule for each attention head of a model on a text, and writes a file that
whet.transformers.enable(model, rule="rules.json") reads. The slope of the loss in each head's β, on a third of the
text, says which heads to sharpen or to flatten; the loss on the second third says how many of them, and with which
rule; the last third says what it gained. If nothing helps there, no head has a rule, and the sentence says so.
"""

_EPILOG = """\
MODEL is the folder of a Hugging Face model, a name in the local cache, a .gguf file, or smollm2.

example:
  whet-tune smollm2 book.txt --out rules.json
"""


class Tuned(NamedTuple):
    """The rules, and what they change on text that had no part in choosing them: loss against none, in nats."""

    rules: Rules
    change: Interval
    chosen: str  # what was found best before the last third was looked at
    kept: bool


def tune(loaded: Loaded, text: str, candidates: Sequence[str],
         progress: Callable[[str], None] = lambda text: None) -> Tuned:
    """A rule per head so that held-out text is not worse than without any beyond its interval."""
    length = piece_length(loaded, text, 9)
    cut = pieces(loaded.tokenizer, text, length, MOST_PIECES)
    third = len(cut) // 3
    choosing, verifying, judging = cut[:third], cut[third:2 * third], cut[2 * third:]
    progress(f"slopes of the loss on {third} pieces of {length} tokens")
    slope = slopes(loaded, choosing)
    none = rules_of(loaded)
    plain = text_losses(loaded, verifying, none)
    best, lowest, chosen = none, 0.0, "none"
    for name, rules in proposals(loaded, slope, candidates):
        progress(f"verifying {name}")
        change = float((text_losses(loaded, verifying, rules) - plain).mean())
        if change < lowest:
            best, lowest, chosen = rules, change, name
    if chosen == "none":
        return Tuned(none, Interval(0.0, 0.0, 0.0), chosen, False)
    progress(f"judging {chosen}")
    change = mean_interval(text_losses(loaded, judging, best) - text_losses(loaded, judging, none))
    worse = change.low > 0 or change.mean >= 0
    return Tuned(none if worse else best, change, chosen, not worse)


def proposals(loaded: Loaded, slope: np.ndarray, candidates: Sequence[str]) -> Iterator[tuple[str, Rules]]:
    """What to verify: each candidate, and each pair of one that sharpens and one that flattens, in the heads whose
    slope asks for it, and in the half and the quarter of them whose slope is steepest."""
    flattening = [rule for rule in candidates if _flattens(rule)]
    sharpening = [rule for rule in candidates if rule not in flattening]
    steepness = np.abs(slope.mean(axis=0))
    seen = set()
    for sharp, flat in [(rule, None) for rule in sharpening] + [(None, rule) for rule in flattening] + \
            [(one, other) for one in sharpening for other in flattening]:
        wanted = [(rule, clearly(slope, sign)) for rule, sign in ((sharp, -1), (flat, 1)) if rule is not None]
        for part in (1, 2, 4):
            rules = rules_of(loaded)
            for rule, where in wanted:
                rules[_steepest(steepness, where, part)] = rule
            key = tuple(rules.reshape(-1))
            if key not in seen and any(rule != "none" for rule in key):
                seen.add(key)
                names = [f"{rule} in {np.count_nonzero(rules == rule)} heads" for rule, _ in wanted]
                yield " and ".join(names), rules


def _steepest(steepness: np.ndarray, where: np.ndarray, part: int) -> np.ndarray:
    """Of the heads where `where` is True, one in `part`, at least one."""
    count = -(-int(where.sum()) // part)
    if count == 0:
        return where
    least = np.sort(steepness[where])[-count]
    return where & (steepness >= least)


def _flattens(rule: str) -> bool:
    given = whet.rule(rule)
    return isinstance(given, whet.Fixed) and given.value < 1


def sentence(tuned: Tuned) -> str:
    """What was gained."""
    if tuned.chosen == "none":
        return "Nothing helps: no rule lowers the loss on the second third of the text, so no head has one."
    change = f"{tuned.change.mean:+.4f} nats per token (95 %: {tuned.change.low:+.4f} to {tuned.change.high:+.4f})"
    if not tuned.kept:
        return f"Nothing helps: {tuned.chosen} changes the loss on held-out text by {change}, so no head has a rule."
    clear = "" if tuned.change.high < 0 else ", which may be chance"
    return f"{tuned.chosen} changes the loss on held-out text by {change}{clear}."


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    program.run(NAME, _main, arguments)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(NAME, description=_DESCRIPTION, epilog=_EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("model", metavar="MODEL", help="see below")
    result.add_argument("text", metavar="TEXT", help="like what the model will read; some 10,000 tokens are used")
    result.add_argument("--out", type=Path, default=Path("rules.json"), metavar="FILE", help="(default: rules.json)")
    result.add_argument("--rules", type=_rules, default=_rules(CANDIDATES), metavar="RULE+RULE...",
                        help=f"what a head may have, separated by + (default: {CANDIDATES})")
    result.add_argument("--version", action="version", version=whet.version())
    program.add_model_options(result)
    return result


def _rules(text: str) -> list[str]:
    try:
        return [whet.rule(part).name for part in text.split("+")]
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    text = read_text(options.text)
    files.check_writable(options.out)
    progress = program.Progress()
    progress.step(f"loading {options.model}")
    loaded = models.load(options.model, dtype=options.dtype, download=options.download,
                         consent=program.consent(options.yes), say=progress.say)
    program.set_threads(options.threads)
    tuned = tune(loaded, text, options.rules, progress.step)
    progress.done()
    files.write_json(options.out, {"whet": whet.version(), "kind": "rules", "model": loaded.name, "layers": loaded.layers,
                                   "heads": loaded.heads,
                                   "rules": {str(layer): rules for layer, rules in by_layer(tuned.rules).items()}})
    print(sentence(tuned))
    progress.say(f'{options.out} is written; whet.transformers.enable(model, rule="{options.out}") uses it')


if __name__ == "__main__":
    main()
