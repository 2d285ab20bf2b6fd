"""A plausible results.json of kind "probe", for the tests of tables and page (docs/results.md)."""

import math
import random

CLASSES = ("sink", "sharp", "dispersing", "uniform")
THRESHOLDS = {"sink": 0.5, "uniform": 0.9, "dispersing": 0.2}


def probe_results(layers=6, heads=4, tokens=(64.0, 128.25, 256.0, 1024.5, 4096.0), settings=True, seed=0):
    """Heads of all classes: sinks in the middle layers, uniform ones in the first, the others by chance."""
    draw = random.Random(seed)
    kinds = [[_class_of(layer, layers, draw) for _ in range(heads)] for layer in range(layers)]
    slopes = [[_slope(kind, draw) for kind in row] for row in kinds]
    spreads = [[draw.uniform(5, 16) if kind == "dispersing" else draw.uniform(7, 30) for kind in row] for row in kinds]
    results = {
        "schema": "whet results", "version": 1, "kind": "probe",
        "provenance": {"command": "whet probe smollm2", "whet": "0.1.0", "machine": "a machine", "target": "AVX2", "threads": 2},
        "model": {"name": "smollm2", "architecture": "llama", "layers": layers, "heads": heads, "key_heads": max(1, heads // 3),
                  "parameters": 134515008, "context": 8192},
        "prompts": {"kind": "max", "example": "What is the maximum in the following sequence? 4, 17, 8. The maximum is:",
                    "per_length": 4, "seed": 0},
        "rule": "paper", "horizon_weight": 0.5, "thresholds": THRESHOLDS,
        "lengths": [{"tokens": n, "prompts": 4, "statistics": _statistics(n, kinds, slopes, spreads, draw)} for n in tokens],
        "heads": [{"layer": i, "head": j, "class": kinds[i][j], "slope": slopes[i][j], "low": slopes[i][j] - 0.05,
                   "high": slopes[i][j] + 0.05, "horizon": 1 + math.exp(spreads[i][j])}
                  for i in range(layers) for j in range(heads)],
    }
    if settings:
        results["settings"] = [_setting(*line) for line in (
            ("none", 0.0, 0.0, 0.83), ("paper, all heads", 0.061, 0.012, 0.71), ("paper, layers 0 to 9", 0.034, 0.011, 0.79),
            ("paper, layers 10 to 19", 0.004, 0.006, 0.83), ("paper, dispersing heads", -0.003, 0.005, 0.88),
            ("log-length", 0.002, 0.004, 0.85), ("target-entropy", 0.118, 0.02, 0.46))]
        results["verdict"] = "Don't sharpen this model: the paper's rule in all heads raises perplexity from 18.70 to 19.88 (+6.3 % ± 1.2)."
    return results


def _class_of(layer, layers, draw):
    weights = (1, 2, 3, 3) if layer < layers / 5 else (5, 2, 3, 0.2)
    return draw.choices(CLASSES, weights)[0]


def _slope(kind, draw):
    return {"sink": draw.uniform(0, 0.3), "sharp": draw.uniform(-0.1, 0.15), "dispersing": draw.uniform(0.25, 0.8),
            "uniform": draw.uniform(0.6, 1.0)}[kind]


def _statistics(n, kinds, slopes, spreads, draw):
    def entropy(i, j):
        if kinds[i][j] == "uniform":
            return (0.9 + slopes[i][j] / 12) * math.log(n) - 0.1 * slopes[i][j]
        start = {"sink": 0.5, "sharp": 0.6, "dispersing": 1.2}[kinds[i][j]] + 0.2 * j
        return min(0.97 * math.log(n), max(0.02, start + slopes[i][j] * math.log(n / 64) + draw.gauss(0, 0.05)))

    entropies = [[entropy(i, j) for j in range(len(row))] for i, row in enumerate(kinds)]

    def grid(value, error):
        means = [[value(i, j) for j in range(len(row))] for i, row in enumerate(kinds)]
        return {"mean": means, "error": [[error * (0.5 + draw.random()) for _ in row] for row in means]}

    def beta(i, j):
        return 1.0 if entropies[i][j] <= 0.5 else 1 + 0.4 * entropies[i][j]

    return {
        "entropy": grid(lambda i, j: entropies[i][j], 0.05),
        "relative_entropy": grid(lambda i, j: entropies[i][j] / math.log(n), 0.01),
        "peak": grid(lambda i, j: math.exp(-entropies[i][j]), 0.02),
        "first": grid(lambda i, j: draw.uniform(0.55, 0.95) if kinds[i][j] == "sink" else draw.uniform(0, 0.2), 0.02),
        "spread": grid(lambda i, j: spreads[i][j] * (1 + 0.02 * math.log(n / 64)), 0.3),
        "beta": grid(beta, 0.02),
        "sharp_entropy": grid(lambda i, j: entropies[i][j] / beta(i, j) ** 2, 0.04),
        "sharp_peak": grid(lambda i, j: math.exp(-entropies[i][j] / beta(i, j) ** 2), 0.03),
    }


def _setting(name, difference, error, needle):
    perplexity = 18.7 * math.exp(difference)
    return {"name": name, "perplexity": perplexity, "perplexity_low": perplexity - 0.6, "perplexity_high": perplexity + 0.6,
            "difference": difference, "low": difference - error, "high": difference + error,
            "needle": needle, "needle_low": needle - 0.09, "needle_high": min(1.0, needle + 0.07), "tokens": 1500}
