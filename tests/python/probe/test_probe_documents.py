"""docs/probe.md shows what results/probe holds."""

import importlib.util
import json
from pathlib import Path

import numpy as np

from whet.probe import advise, report

ROOT = Path(__file__).resolve().parents[3]
PAGE = " ".join((ROOT / "docs/probe.md").read_text().split())


def results():
    found = json.loads((ROOT / "results/probe/smollm2.json").read_text())
    for length in found["lengths"]:
        for parts in length["statistics"].values():
            parts["mean"] = np.array(parts["mean"], np.float64)
    return found


def shows(text):
    return " ".join(text.split()) in PAGE


def test_the_table_of_heads():
    assert shows(report.table(results()))


def test_the_advice():
    assert shows(advise.table(results()))


def test_what_was_found():
    found = results()
    heads = found["heads"]
    dispersing, uniform = ([head for head in heads if head["class"] == name] for name in ("dispersing", "uniform"))
    known = sum(head["layer"] in {*range(12), 21, 28, 29} for head in dispersing)
    assert shows(f"{len(dispersing)} of {len(heads)} heads disperse. {known} of them lie in layers 0 to 11, 21, 28 and 29")
    assert sorted((head["layer"], head["head"]) for head in uniform) == [(0, 0), (0, 2), (0, 6)]
    slopes = np.array([head["slope"] for head in heads]).reshape(30, 9)
    largest = np.argsort(slopes.mean(axis=1))[::-1][:2]
    assert largest.tolist() == [0, 21] and shows(f"a slope of {slopes.mean():.2f}")
    assert shows("layer 0 ({:.2f}) and 21 ({:.2f})".format(*slopes.mean(axis=1)[largest]))
    near = sorted(round(head["horizon"]) for head in heads if head["horizon"] < 8192)
    assert len(near) == 4 and shows(f"({', '.join(f'{keys:,}' for keys in near[:3])} and {near[3]:,} keys)")
    entropy = found["lengths"][-1]["statistics"]["entropy"]["mean"]
    assert shows(f"{100 * (entropy > 5.945).mean():.0f} % of the heads are there")
    lost = sum(entropy[head["layer"], head["head"]] > 5.945 for head in dispersing)
    assert shows(f"among them {lost} of those that disperse")


def test_past_the_trained_context():
    spec = importlib.util.spec_from_file_location("long_context", ROOT / "tools/long_context.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    settings = json.loads((ROOT / "results/probe/long-context.json").read_text())["settings"]
    possible = {" ".join(line.split()) for line in tool.table(settings).splitlines()[2:]}
    section = (ROOT / "docs/probe.md").read_text().split("## Past the trained context")[1].split("\n## ")[0]
    shown = [" ".join(line.split()) for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(shown) == 9 and set(shown) <= possible
