"""What every benchmark command shares: its options, the run of its sections, what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench import timing
from bench.report import Section, document, results
from bench.timing import BenchmarkError, machine_facts, prepare_process, progress
from bench.whet_c import Whet, WhetError

ROOT = Path(__file__).resolve().parent.parent

# Of the library, its file, whether quick, and the processors: the sections, not run yet.
Sections = Callable[[Whet, Path, bool, Sequence[int]], Sequence[partial[Section]]]


def _arguments(what: str, quick: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"whet's {what} beside torch and JAX")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--lib", type=Path, metavar="libwhet.so",
                        default=ROOT / "build/release/libwhet.so")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--sections", nargs="+", metavar="NAME", help="only these (functions of sections.py)")
    parser.add_argument("--cpu-time", action="store_true",
                        help="CPU seconds of this process: one-thread sections on a machine that others use")  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    return parser.parse_args()


def _run(options: argparse.Namespace, title: str, command: str, sections_of: Sections) -> int:
    cpus = prepare_process()
    library = options.lib.resolve()
    whet = Whet(library)
    facts = machine_facts(cpus)
    start = time.perf_counter()
    if options.cpu_time:
        timing.clock = time.process_time
    every = sections_of(whet, library, options.quick, cpus)
    known = [section.func.__name__ for section in every]
    for name in options.sections or ():
        if name not in known:
            raise BenchmarkError(f"--sections: {name} is none of {', '.join(known)}")
    chosen = zip(every, known, strict=True)
    sections = [run() for run, name in chosen if name in (options.sections or known)]
    progress(f"done after {time.perf_counter() - start:.0f} s")

    command += " --quick" if options.quick else ""
    command += " --cpu-time" if options.cpu_time else ""
    command += f" --sections {' '.join(options.sections)}" if options.sections else ""
    text = document(title, facts | {"whet": f"{whet.version()}, target {whet.target()}"}, sections, command)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        provenance = {"command": command, "whet": whet.version(), "machine": facts.pop("CPU"),
                      "target": whet.target(), "threads": len(cpus)}  # fmt: skip
        options.json.write_text(json.dumps(results(provenance, facts, sections), indent=1))
    missed = any(not bar.reached for section in sections for bar in section.bars)
    return 1 if options.strict and missed else 0


def main(module: str, what: str, quick: str, sections_of: Sections) -> None:
    """Runs a benchmark and exits. `sections_of` is called once torch and jax may be imported."""
    try:
        sys.exit(_run(_arguments(what, quick), what.capitalize(), f"python -m {module}", sections_of))
    except (BenchmarkError, WhetError, OSError) as error:
        sys.exit(f"{module}: {error}")
