"""A plausible results.json of kind "clrs", for the tests of tables and page (docs/results.md)."""

import math
import random

TRAINED = (4, 7, 11, 13, 16)
SIZES = (4, 5, 7, 9, 11, 13, 16, 20, 24, 32, 40, 48, 56, 64)
REACH = {"softmax": 22.0, "paper": 30.0, "paper (train only)": 19.0, "learned log-power": 34.0}  # sizes up to which answers are right


def clrs_results(algorithms=("insertion_sort", "minimum", "binary_search"), variants=tuple(REACH), settings=("paper", "log-length:32"),
                 sizes=SIZES, seeds=3, layers=3, seed=0):
    """Decoders that are right at trained sizes and, depending on their variant, some way beyond."""
    draw = random.Random(seed)
    return {
        "schema": "whet results", "version": 1, "kind": "clrs",
        "provenance": {"command": "whet-clrs report sweep", "whet": "0.1.0", "machine": "a machine", "target": "AVX2", "threads": 2},
        "runs": [_run(variant, i, draw) for variant in variants for i in range(seeds)],
        "tasks": [{"algorithm": algorithm, "hints": False, "trained_sizes": list(TRAINED),
                   "sizes": [_size(n, k, variants, settings, seeds, layers, draw) for n in sizes]}
                  for k, algorithm in enumerate(algorithms)],
    }


def _run(variant, seed, draw):
    steps = range(100, 4001, 100)
    return {"name": f"{variant.replace(' ', '-')}-{seed}", "variant": variant, "seed": seed, "step": 4000, "parameters": 315264,
            "recipe": {"seed": seed, "variant": variant, "algorithms": ["insertion_sort"], "width": 96, "layers": 3, "rate": 2e-3},
            "metrics": [[step, 0.01 + 2.2 * math.exp(-step / 900) * draw.uniform(0.9, 1.1), 1 - 0.6 * math.exp(-step / 900)] for step in steps]}


def _size(n, task, variants, settings, seeds, layers, draw):
    places = min(n + 1, 64)
    chance = {"exact": 0.01, "tokens": 2 / n}
    made = [_variant(one, "as trained", REACH.get(one, 25.0) * (1 + task / 2), n, places, seeds, layers, draw) for one in variants]
    made[1:1] = [_variant(variants[0], one, REACH["softmax"] * factor, n, places, seeds, layers, draw)
                 for one, factor in zip(settings, (1.1, 1.25, 0.9, 0.8, 1.0))]
    for one in made[1:]:
        one["against_softmax"] = {name: _difference(one[name]["mean"] - made[0][name]["mean"], seeds, draw) for name in ("exact", "tokens")}
    return {"size": n, "problems": 625, "chance": chance, "copy": {"exact": 0.0, "tokens": 3 / n}, "variants": made}


def _variant(variant, setting, reach, n, places, seeds, layers, draw):
    exact = min(1.0, max(0.0, 1 / (1 + math.exp((n - reach) / 3)) + draw.gauss(0, 0.01)))
    tokens = min(1.0, 0.1 + 0.9 / (1 + math.exp((n - 1.6 * reach) / 8)))
    entropy = [round(0.4 + 0.3 * layer + 0.4 * math.log(n), 5) for layer in range(layers)]
    plain = variant == "softmax" and setting == "as trained"
    return {"variant": variant, "setting": setting, "runs": seeds, "exact": _share(exact, draw), "tokens": _share(tokens, draw),
            "forced": min(1.0, tokens + 0.05), "errors": [min(1.0, 2 * (1 - tokens) * (i + 0.5) / places) for i in range(places)],
            "entropy": entropy, "sharp_entropy": entropy if plain else [round(0.7 * one, 5) for one in entropy]}


def _share(mean, draw):
    half = 4 * mean * (1 - mean) * draw.uniform(0.04, 0.12)
    return {"mean": round(mean, 5), "low": round(mean - half, 5), "high": round(mean + half, 5)}


def _difference(difference, seeds, draw):
    half = 0.02 + abs(difference) * draw.uniform(0.2, 0.8)
    p = min(1.0, math.exp(-3 * abs(difference) / half))
    known = {"low": round(difference - half, 5), "high": round(difference + half, 5), "p": float(f"{p:.3g}")}
    return {"difference": round(difference, 5), **known}
