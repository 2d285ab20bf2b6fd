"""Runs of the lab that are disturbed: killed, interrupted, out of space. Each must end in the same bytes as one that
was left alone.

A case is a seed. It draws the command, then disturbances one after the other, each of the same command in the same
folder; the last time the command is left alone. One case again: python tests/soak/lab.py build/release --seed N
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SMALL = ["--batch", "4", "--items", "5..6"]
COMMANDS = [
    ["train", "--steps", "300", *SMALL],
    ["train", "--steps", "2500", *SMALL],  # past a checkpoint on the way
    ["train", "--steps", "300", "--recipe", "sharp", *SMALL],
    ["reproduce", "--seeds", "2", "--steps", "100", "--sizes", "16,64", "--sets", "16", "--threads", "2", *SMALL],
]
KINDS = ["kill", "interrupt", "terminate", "file too large"]
# A small tmpfs gives ENOSPC; only root may mount one.
MOUNTS = os.geteuid() == 0 and sys.platform == "linux"
if MOUNTS:
    KINDS.append("no space")
PLENTY = "64m"


class Wrong(Exception):
    """What a disturbed run did and must not."""


def mount(folder, *options):
    return subprocess.run(["mount", "-t", "tmpfs", *options, "whet-soak", folder], check=True, capture_output=True)


def content(folder):
    """Every file by name: its hash, or for results.json what it says without its provenance."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name == "report.html":
            continue
        if path.name == "results.json":
            results = json.loads(path.read_text())
            results.pop("provenance")
            found[str(path.relative_to(folder))] = json.dumps(results, sort_keys=True)
        else:
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Lab:
    def __init__(self, build, scratch):
        self.whet = str(pathlib.Path(build).resolve() / "bin" / "whet")
        self.scratch = pathlib.Path(scratch)
        self.disturbances = collections.Counter()
        self.references = {}

    def start(self, command, folder, *before):
        return subprocess.Popen([*before, self.whet, command[0], str(folder), *command[1:]], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)

    def finish(self, command, folder):
        process = self.start(command, folder)
        _, errors = process.communicate(timeout=600)
        if process.returncode != 0:
            raise Wrong(f"left alone it exits with {process.returncode}: {errors[-300:]}")

    def reference(self, index):
        """What the command leaves when nothing disturbs it, and how long that takes."""
        if index not in self.references:
            folder = self.scratch / f"reference-{index}"
            begin = time.monotonic()
            self.finish(COMMANDS[index], folder)
            self.references[index] = content(folder), time.monotonic() - begin
        return self.references[index]

    def disturb(self, kind, command, folder, seconds, dice):
        """One disturbed run. It may also end before it is disturbed."""
        before, expected = [], {0}
        if kind == "file too large":
            before = ["prlimit", f"--fsize={int(2 ** dice.uniform(4, 21))}"]
            expected.add(1)
        elif kind == "no space":
            subprocess.run(["mount", "-o", f"remount,size={dice.randint(1, 1500)}k", str(folder.parent)], capture_output=True)
            expected.add(1)
        process = self.start(command, folder, *before)
        sent = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}.get(kind)
        if sent:
            time.sleep(dice.uniform(0, seconds))
            process.send_signal(sent)
            expected |= {-sent, 128 + sent}
        _, errors = process.communicate(timeout=600)
        if kind == "no space":
            subprocess.run(["mount", "-o", f"remount,size={PLENTY}", str(folder.parent)], check=True, capture_output=True)
        self.disturbances[kind] += process.returncode != 0  # those that were too late for it count for nothing
        if process.returncode not in expected:
            raise Wrong(f"{kind}: exits with {process.returncode}: {errors[-300:]}")
        if process.returncode == 1 and not errors.splitlines()[-1].startswith("whet"):
            raise Wrong(f"{kind}: says {errors[-300:]!r}")
        if kind in ("interrupt", "terminate", "file too large", "no space") and list(folder.rglob(".whet-*")):
            raise Wrong(f"{kind}: leaves {[str(path) for path in folder.rglob('.whet-*')]}")

    def case(self, seed):
        dice = random.Random(seed)
        index = dice.randrange(len(COMMANDS))
        expected, seconds = self.reference(index)
        disk = self.scratch / "case"
        disk.mkdir()
        if MOUNTS:
            mount(disk, "-o", f"size={PLENTY}")
        try:
            folder = disk / "run"
            for _ in range(dice.randint(1, 5)):
                self.disturb(dice.choice(KINDS), COMMANDS[index], folder, seconds, dice)
            self.finish(COMMANDS[index], folder)
            found = content(folder)
            if found != expected:
                different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
                raise Wrong(f"other bytes in {', '.join(different)}")
        except Wrong as wrong:
            raise Wrong(f"whet {' '.join(COMMANDS[index])}: {wrong}") from None
        finally:
            if MOUNTS:
                subprocess.run(["umount", "--lazy", disk], check=True)
            shutil.rmtree(disk)


def run(build, seconds, seed):
    """Cases for this long, at least one: counts and what was wrong."""
    failures, cases, begin = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="whet-soak-") as scratch:
        lab = Lab(build, scratch)
        while cases == 0 or time.monotonic() - begin < seconds:
            try:
                lab.case(seed + cases)
            except Wrong as wrong:
                failures.append({"run": f"python tests/soak/lab.py {build} --seed {seed + cases}", "what": str(wrong)})
            cases += 1
    return {"cases": cases, "disturbances": dict(lab.disturbances), "failures": failures,
            "seconds": time.monotonic() - begin}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", help="a build folder, e.g. build/release")
    parser.add_argument("--seconds", type=float, default=0, help="how long; 0: one case")
    parser.add_argument("--seed", type=int, default=1, help="of the first case; those after it count up")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # runs would inherit that a background shell ignores it
    result = run(arguments.build, arguments.seconds, arguments.seed)
    print(json.dumps(result, indent=1))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
