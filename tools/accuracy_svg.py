#!/usr/bin/env python3
"""Draws README's picture, accuracy against the number of items, from the results in results/:

    tools/accuracy_svg.py > docs/accuracy.svg

`whet report --format svg` draws every figure of a page; this one has the few curves that a first look needs, their names
beside them, and follows the reader's light or dark mode. tests/layout/test_layout.py says when it is stale.
"""

import json
import math
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
WIDTH, HEIGHT = 780, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 566, 56, 322  # of the plot
SIZES = [16, 64, 256, 1024, 4096, 16384]
FEWEST, MOST = 5, 16  # items of a training set
# Results, rule, class, the name beside the end of the curve and how far below the end it stands.
CURVES = [
    ("sharp", "target_entropy", "sharp", "target entropy", 4),
    ("paper", "target_entropy", "held", "target entropy", -6),
    ("paper", "paper", "rule", "the paper's rule", 4),
    ("paper", "softmax", "plain", "plain softmax", 14),
]
HEADS = [("heads of the sharp recipe", 24), ("heads of the paper's recipe", 180)]  # and how far down that stands

STYLE = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #424a53; }
    .card { fill: #ffffff; stroke: #d1d9e0; }
    .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
    .grid { stroke: #d1d9e0; stroke-width: 1; }
    .trained { fill: #818b9826; }
    .curve { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
    .sharp { --color: #0969da; } .held { --color: #1a7f37; } .rule { --color: #9a6700; } .plain { --color: #cf222e; }
    .curve { stroke: var(--color); } .dot, .name { fill: var(--color); }
    .name { font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      text { fill: #b7bdc8; }
      .card { fill: #0d1117; stroke: #3d444d; }
      .title { fill: #f0f6fc; }
      .grid { stroke: #3d444d; }
      .sharp { --color: #58a6ff; } .held { --color: #3fb950; } .rule { --color: #d29922; } .plain { --color: #f85149; }
    }
"""


def x_of(items):
    return LEFT + math.log(items / FEWEST) / math.log(SIZES[-1] / FEWEST) * (RIGHT - LEFT)


def y_of(accuracy):
    return BOTTOM - accuracy * (BOTTOM - TOP)


def axes():
    width, height = x_of(MOST) - LEFT, BOTTOM - TOP
    yield f'<rect class="trained" x="{LEFT}" y="{TOP}" width="{width:.1f}" height="{height}"/>'
    for text, y in (("trained", BOTTOM - 28), ("here", BOTTOM - 12)):
        yield f'<text x="{LEFT + width / 2:.1f}" y="{y}" text-anchor="middle">{text}</text>'
    for percent in range(0, 101, 25):
        y = y_of(percent / 100)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
    for items in SIZES:
        yield f'<text x="{x_of(items):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{items:,}</text>'
    yield f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{BOTTOM + 42}" text-anchor="middle">items to choose from</text>'


def curve(name, rule, kind, text, shift):
    """A line through the means over the heads, with its name at the end."""
    summary = json.loads((RESULTS / name / "results.json").read_text())["summary"]
    means = [(x_of(size["items"]), size["rules"][rule]["accuracy"]) for size in summary]
    x, last = means[-1]
    yield f'<g class="{kind}">'
    yield f'  <polyline class="curve" points="{" ".join(f"{x:.1f},{y_of(mean):.1f}" for x, mean in means)}"/>'
    yield f'  <circle class="dot" cx="{x:.1f}" cy="{y_of(last):.1f}" r="4"/>'
    yield f'  <text class="name" x="{x + 12:.1f}" y="{y_of(last) + shift:.1f}">{100 * last:.1f} % {text}</text>'
    yield "</g>"


def picture():
    what = "Correct answers against the number of items in a set, mean of ten heads: paper's recipe and sharp recipe"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
             f'role="img" aria-label="{what}">',
             f"  <style>{STYLE}  </style>",
             f'  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>',
             f'  <text class="title" x="{LEFT - 32}" y="30">Correct answers, mean of ten heads</text>']
    lines += [f"  {line}" for line in axes()]
    lines += [f'  <text x="{RIGHT + 12}" y="{TOP + y}">{text}</text>' for text, y in HEADS]
    for entry in CURVES:
        lines += [f"  {line}" for line in curve(*entry)]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    print(picture(), end="")
