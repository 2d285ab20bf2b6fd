"""make soak: random calls against the oracle, disturbed runs of the lab, and the fuzzers, for as long as wanted.

Most of the time goes to calls, on as many processes as there are processors. Prints what was found per million, writes
everything as JSON, and exits with 1 if anything was wrong; each failure is printed with the command that shows it again.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import lab

SHARES = {"calls": 0.7, "lab": 0.15, "fuzzers": 0.15}
FUZZERS = ["json", "npy", "rule", "safetensors"]
SEEDS = 10**10  # apart, so that no two processes draw the same case


def run_calls(build, seconds, seed, out):
    program = pathlib.Path(build, "tests/soak/whet_soak").resolve()
    path = out / f"calls-{seed}.json"
    path.unlink(missing_ok=True)
    result = subprocess.run([program, "--seconds", str(seconds), "--seed", str(seed), "--json", path], capture_output=True,
                            text=True)
    if path.exists():
        return json.loads(path.read_text())
    # It says itself in which seed it ended.
    return {"cases": 0, "calls": 0, "rows": 0, "checks": {}, "targets": [], "seconds": seconds, "failures": 1,
            "failed": [{"run": f"{program} --seed {seed}", "what": result.stderr[-2000:]}]}


def run_fuzzer(build, name, seconds):
    folder = pathlib.Path(build, "tests/fuzz").resolve()
    command = [folder / f"{name}_fuzz", f"-max_total_time={int(max(1, seconds))}", "-max_len=4096", "-timeout=5",
               "-malloc_limit_mb=16", "-print_final_stats=1", f"-artifact_prefix={name}-", f"corpus/{name}", f"seeds/{name}"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    inputs = re.search(r"stat::number_of_executed_units:\s*(\d+)", result.stderr)
    failures = [] if result.returncode == 0 else [{"run": " ".join(map(str, command)), "what": result.stderr[-2000:]}]
    return {"inputs": int(inputs[1]) if inputs else 0, "failures": failures}


def in_parallel(jobs, function, tasks):
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda task: function(*task), tasks))


def soak(arguments):
    jobs, seconds, seed = arguments.jobs, arguments.seconds, arguments.seed
    build, out = arguments.build, pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    calls = in_parallel(jobs, run_calls, [(build, SHARES["calls"] * seconds, seed + SEEDS * n, out) for n in range(jobs)])
    disturbed = in_parallel(jobs, lab.run, [(build, SHARES["lab"] * seconds, seed + SEEDS * n) for n in range(jobs)])
    fuzzed = {}
    if arguments.fuzzers:
        each = SHARES["fuzzers"] * seconds * jobs / len(FUZZERS)
        results = in_parallel(jobs, run_fuzzer, [(arguments.fuzzers, name, each) for name in FUZZERS])
        fuzzed = dict(zip(FUZZERS, results, strict=True))
    return {"calls": calls, "lab": disturbed, "fuzzers": fuzzed}


def rows_of(found):
    """(what, how many, failures) of every line of the table."""
    checks, disturbances = {}, {}
    for part in found["calls"]:
        for name, count in part["checks"].items():
            cases, failures = checks.get(name, (0, 0))
            checks[name] = cases + count["cases"], failures + count["failures"]
    for part in found["lab"]:
        for kind, count in part["disturbances"].items():
            disturbances[kind] = disturbances.get(kind, 0) + count
    yield from ((f"cases of {name}", *counts) for name, counts in checks.items())
    yield "calls of the library", sum(p["calls"] for p in found["calls"]), sum(p["failures"] for p in found["calls"])
    yield "rows compared", sum(p["rows"] for p in found["calls"]), sum(p["failures"] for p in found["calls"])
    yield from ((f"runs disturbed: {kind}", count, 0) for kind, count in sorted(disturbances.items()))
    yield "runs resumed", sum(p["cases"] for p in found["lab"]), sum(len(p["failures"]) for p in found["lab"])
    yield from ((f"inputs of {name}_fuzz", f["inputs"], len(f["failures"])) for name, f in found["fuzzers"].items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="default: another one every time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--build", default="build/release", help="with whet_soak and whet")
    parser.add_argument("--fuzzers", help="a build folder of clang with the fuzzers; default: none")
    parser.add_argument("--out", default="build/soak", help="a folder for soak.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # runs would inherit that a background shell ignores it
    begin = time.monotonic()
    found = soak(arguments)
    found |= {"seed": arguments.seed, "jobs": arguments.jobs, "seconds": time.monotonic() - begin}
    pathlib.Path(arguments.out, "soak.json").write_text(json.dumps(found, indent=1) + "\n")

    failed = [f for part in found["calls"] for f in part["failed"]]
    failed += [f for part in [*found["lab"], *found["fuzzers"].values()] for f in part["failures"]]
    for failure in failed:
        print(f"{failure['run']}\n{failure['what']}\n", file=sys.stderr)
    print(f"{'':32} {'count':>14} {'wrong':>6} {'per million':>12}")
    for what, count, wrong in rows_of(found):
        print(f"{what:32} {count:14,} {wrong:6,} {1e6 * wrong / max(count, 1):12.2f}")
    targets = ", ".join(found["calls"][0]["targets"])
    print(f"seed {arguments.seed}, {arguments.jobs} processes, {found['seconds']:.0f} s, SIMD targets {targets}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
