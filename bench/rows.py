"""Row functions of whet beside what people use: python bench/rows.py [options].

Every contender is verified against float64 (bounds: rows_reference.py), then timed interleaved
(timing.py). Speed bars are printed as ok or missed; only --strict makes a miss an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from report import document
from timing import BenchmarkError, machine_facts, prepare_process, progress
from whet_c import Whet, WhetError

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((4096, 1024), (512, 8192), (64, 65536), (8, 131072), (1, 131072), (32, 49152))
QUICK_SHAPES = ((4096, 1024), (64, 65536), (1, 131072))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="whet's row functions beside torch and JAX")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--lib", type=Path, metavar="libwhet.so",
                        default=ROOT / "build/release/libwhet.so")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="three shapes, seven rounds")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a bar is missed")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    cpus = prepare_process()
    import rows_sections  # imports torch and jax, which read the environment once

    library = options.lib.resolve()
    whet = Whet(library)
    facts = machine_facts(cpus) | {"whet": f"{whet.version()}, target {whet.target()}"}
    setting = rows_sections.Setting(
        whet=whet,
        library=library,
        shapes=QUICK_SHAPES if options.quick else SHAPES,
        rounds=7 if options.quick else 21,
        cpus=cpus,
    )
    sections = []
    start = time.perf_counter()
    for run in rows_sections.ALL:
        sections.append(run(setting))
    progress(f"done after {time.perf_counter() - start:.0f} s")

    command = "python bench/rows.py" + (" --quick" if options.quick else "")
    text = document(facts, sections, command)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        everything = {"command": command, "facts": facts, "sections": [asdict(s) for s in sections]}
        options.json.write_text(json.dumps(everything, indent=1))
    missed = any(not bar.reached for section in sections for bar in section.bars)
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BenchmarkError, WhetError, OSError) as error:
        sys.exit(f"bench/rows.py: {error}")
