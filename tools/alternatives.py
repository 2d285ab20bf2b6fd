#!/usr/bin/env python3
"""Trains and evaluates the max-retrieval head with every alternative to plain softmax, in both recipes:

    tools/alternatives.py --steps-scale 0.25

Each variant is one `whet reproduce` in build/alternatives/RECIPE-VARIANT, its output beside it in RECIPE-VARIANT.log. One
that was stopped is resumed. results/alternatives/RECIPE-VARIANT.json gets its results without pictures: heat map, points of
the fit, and all but every tenth line of the metrics. One whose results are there already, by the same command, is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = {"paper": 100_000, "sharp": 200_000}
SIZES = {"paper": "16,64,256,1024,4096,16384", "sharp": "16,64,256,1024,4096,16384,131072"}
VARIANTS = {
    "softmax": [],
    "paper-rule": ["--rule", "paper"],
    "log-length": ["--rule", "log-length:16"],
    "ssmax": ["--rule", "ssmax:0.43"],
    "log-power": ["--rule", "log-power:1,0.5,2"],
    "sparsemax": ["--normalizer", "sparsemax"],
    "entmax15": ["--normalizer", "entmax15"],
    "entmax1.3": ["--normalizer", "entmax:1.3"],
    "top-k": ["--normalizer", "top-k:4"],
    "straight-through": ["--normalizer", "straight-through"],
    "sigmoid": ["--normalizer", "sigmoid"],
    "relu": ["--normalizer", "relu"],
    "softpick": ["--normalizer", "softpick"],
    "asentmax": ["--normalizer", "entmax15", "--rule", "log-power:1,0.5,2"],
    "step": ["--activation", "step"],
    "two-heads": ["--heads", "2"],
}


def names(known):
    def parse(text):
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"has '{name}', must be of {', '.join(known)}")
        return chosen

    return parse


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=names(VARIANTS), default=list(VARIANTS), metavar="A,B,..")
    parser.add_argument("--recipes", type=names(STEPS), default=list(STEPS), metavar="A,B")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="heads of each variant (default 3)")
    parser.add_argument("--steps-scale", type=float, default=1.0, metavar="X", help="share of a recipe's steps (default 1)")
    parser.add_argument("--sets", type=int, default=512, metavar="N", help="evaluation sets of each size (default 512)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), metavar="N", help="variants at a time, a thread each")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/alternatives", metavar="DIR", help="of the runs")
    parser.add_argument("--results", type=Path, default=ROOT / "results/alternatives", metavar="DIR")
    parser.add_argument("--whet", default=ROOT / "build/release/bin/whet", metavar="FILE", help="the command")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser.parse_args()


def command_of(recipe, variant, options):
    steps = max(1, round(STEPS[recipe] * options.steps_scale))
    folder = os.path.relpath(options.folder / f"{recipe}-{variant}", ROOT)  # results name the command, but no machine
    command = [options.whet, "reproduce", folder, "--recipe", recipe, "--steps", steps]
    command += ["--seeds", options.seeds, "--sizes", SIZES[recipe], "--sets", options.sets]
    command += ["--threads", 1, "--no-calibration"]
    return [str(part) for part in command + VARIANTS[variant]]


def without_pictures(results):
    results["fit_scatter"] = []
    results["heat_map"]["frames"] = []
    for model in results["models"]:
        metrics = model["metrics"]
        model["metrics"] = metrics[9:-1:10] + metrics[-1:]
    return results


def is_complete(path, command):
    """Whether results of this very command are there; which program it was, and where, doesn't count."""
    if not path.is_file():
        return False
    return json.loads(path.read_text())["provenance"]["command"].split()[2:] == command[2:]


def run(recipe, variant, options):
    """One line on how it went, and whether it went well."""
    name = f"{recipe}-{variant}"
    if is_complete(options.results / f"{name}.json", command_of(recipe, variant, options)):
        print(f"{name}: complete", flush=True)
        return True
    start = time.monotonic()
    with (options.folder / f"{name}.log").open("w") as log:
        command = command_of(recipe, variant, options)
        status = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, check=False).returncode
    took = f"{time.monotonic() - start:.0f} s"
    if status != 0:
        print(f"{name}: failed, see {options.folder / f'{name}.log'}", flush=True)
        return False
    results = json.loads((options.folder / name / "results.json").read_text())
    (options.results / f"{name}.json").write_text(json.dumps(without_pictures(results), separators=(",", ":")) + "\n")
    trained = [(size["items"], size["rules"].get("trained", size["rules"]["softmax"])) for size in results["summary"]]
    accuracies = " ".join(f"{items}: {100 * rule['accuracy']:.1f}" for items, rule in trained)
    failed = sum("did_not_learn" in model for model in results["models"])
    print(f"{name}: {accuracies} %{f'; {failed} did not learn' if failed else ''} ({took})", flush=True)
    return True


def main():
    options = arguments()
    for name in ("folder", "results", "whet"):
        setattr(options, name, Path(getattr(options, name)).resolve())
    work = [(recipe, variant) for variant in options.variants for recipe in options.recipes]
    if options.dry_run:
        for recipe, variant in work:
            print(*command_of(recipe, variant, options))
        return 0
    for folder in (options.folder, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.threads) as pool:
        return 0 if all(list(pool.map(lambda pair: run(*pair, options), work))) else 1


if __name__ == "__main__":
    sys.exit(main())
