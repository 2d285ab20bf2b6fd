"""The page of a probe in a real browser: what it shows, what it survives, and that people can use it."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from probe_results import probe_results

SCREENSHOTS = ROOT / "build/screenshots"
FIGURES = ["probe-loss", "probe-needles", "probe-entropy", "probe-map", "probe-horizons"]


@pytest.fixture
def probe():
    return probe_results()


def figures(browser):
    return browser.run("[...document.querySelectorAll('figure')].map((f) => f.id)")


def picture(browser, figure):
    return browser.run(f"document.querySelector('#{figure} svg').outerHTML")


def number(text):
    return float(text.replace("−", "-").replace(",", ""))


# ---- what it shows


def test_everything_is_drawn(browser, drawn, probe):
    browser.open(drawn(probe=probe))
    assert browser.problems() == []
    assert figures(browser) == FIGURES
    assert browser.texts("h1") == [probe["verdict"]]
    assert browser.run("document.querySelectorAll('#probe-entropy path.thin').length") == 24
    assert browser.run("document.querySelectorAll('#probe-map rect.zero').length") == 24 + 1  # and one in the legend
    assert browser.run("document.querySelectorAll('#probe-horizons .head-dot').length") == 24
    assert browser.run("document.querySelectorAll('#probe-loss .estimate').length") == len(probe["settings"])
    for name in ("dispersing", "sink", "uniform", "sharp"):
        count = sum(head["class"] == name for head in probe["heads"])
        assert browser.texts(f'td[data-class="{name}"]') == [str(count)]


def test_without_settings_the_headline_counts(browser, drawn):
    probe = probe_results(settings=False)
    browser.open(drawn(probe=probe))
    assert browser.problems() == [] and figures(browser) == FIGURES[2:]
    dispersing = sum(head["class"] == "dispersing" for head in probe["heads"])
    assert browser.texts("h1") == [f"{dispersing} heads of 24 disperse as inputs grow to 4,096 tokens"]


def test_of_a_long_verdict_the_reasons_stand_below(browser, drawn, probe):
    reasons = "none of 8 settings lowers the loss beyond its interval; the best, log-length, changes it by 0.0020 ± 0.0040 nats a token, " \
              "the worst, target-entropy, takes perplexity from 18.70 to 21.04."
    browser.open(drawn(probe=probe | {"verdict": f"Don't sharpen this model: {reasons}"}))
    assert browser.problems() == []
    assert browser.texts("h1") == ["Don't sharpen this model"] and browser.texts(".reasons") == ["N" + reasons[1:]]


def test_dispersing_heads_are_listed_first_and_steepest(browser, drawn, probe):
    browser.open(drawn(probe=probe))
    rows = browser.run("[...document.querySelectorAll('details table tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))")
    rows = [row for row in rows if len(row) == 12]
    order = ["dispersing", "sink", "uniform", "sharp"]
    expected = sorted(probe["heads"], key=lambda head: (order.index(head["class"]), -head["slope"]))
    assert [(int(r[0]), int(r[1]), r[2]) for r in rows] == [(h["layer"], h["head"], h["class"]) for h in expected]
    longest = probe["lengths"][-1]["statistics"]
    for row, head in zip(rows, expected, strict=True):
        at = head["layer"], head["head"]
        for cell, name, digits in ((4, "entropy", 3), (5, "relative_entropy", 2), (7, "peak", 3), (8, "first", 3), (9, "spread", 1), (11, "beta", 2)):
            assert row[cell] == f"{longest[name]['mean'][at[0]][at[1]]:.{digits}f}", (row, name)
        assert number(row[6].split(" ")[0]) == pytest.approx(head["slope"], abs=6e-3)


def test_the_layer_is_chosen_by_keyboard(browser, drawn, probe):
    browser.open(drawn(probe=probe))
    before = browser.texts("#probe-entropy h3")
    browser.focus("#probe-entropy select")
    browser.press("ArrowDown")
    assert browser.run("document.querySelectorAll('#probe-entropy path.thin').length") == 4
    assert "in layer 0" in browser.texts("#probe-entropy h3")[0] and browser.texts("#probe-entropy h3") != before
    ends = [sum(length["statistics"]["entropy"]["mean"][0]) / 4 for length in (probe["lengths"][0], probe["lengths"][-1])]
    assert re.findall(r"([\d.]+)\u00a0nats", browser.texts("#probe-entropy h3")[0]) == [f"{end:.3g}" for end in ends]
    assert browser.problems() == []


def test_slider_and_statistic_change_the_map(browser, drawn, probe):
    browser.open(drawn(probe=probe))
    opacity = "[...document.querySelectorAll('#probe-map svg > rect.cell')].map((c) => Number(c.getAttribute('fill-opacity')))"
    assert browser.texts("#probe-map output") == ["4,096 tokens"]
    seen = [picture(browser, "probe-map")]
    browser.focus("#probe-map input")
    browser.press("ArrowLeft")
    assert browser.texts("#probe-map output") == ["1,024 tokens"]
    seen.append(picture(browser, "probe-map"))
    browser.focus("#probe-map select")
    browser.press("ArrowDown")  # entropy / ln n, whose scale is 0 to 1
    seen.append(picture(browser, "probe-map"))
    assert len(set(seen)) == 3
    means = probe["lengths"][3]["statistics"]["relative_entropy"]["mean"]
    assert browser.run(opacity) == pytest.approx([means[i][j] for j in range(4) for i in range(6)], abs=6e-4)
    for _ in range(6):
        browser.press("ArrowDown")
        assert browser.run(opacity + ".every((x) => x >= 0 && x <= 1)")
    assert browser.texts("#probe-map h3")[0].startswith("Largest weight under paper at 1,024 tokens")
    assert browser.problems() == []


def test_heads_are_named_under_the_pointer_and_by_arrow_keys(browser, drawn, probe):
    browser.open(drawn(probe=probe))
    browser.focus("#probe-map .plot")
    browser.press("ArrowRight")
    assert browser.texts("#probe-map .tip b") == ["layer 0, head 0"]
    browser.press("ArrowDown")
    browser.press("ArrowRight")
    assert browser.texts("#probe-map .tip b") == ["layer 1, head 1"]
    entropy = probe["lengths"][-1]["statistics"]["entropy"]
    assert browser.texts("#probe-map .tip span")[0] == f"entropy, nats{entropy['mean'][1][1]:.3g} ±{entropy['error'][1][1]:.2f}"
    browser.focus("#probe-entropy .plot")
    browser.press("ArrowRight")
    assert browser.texts("#probe-entropy .tip b") == ["mean of 24 heads"]
    browser.press("ArrowDown")
    assert browser.texts("#probe-entropy .tip b") == ["layer 0, head 0"]
    assert browser.texts("#probe-entropy .tip span")[0].startswith("entropy at 64 tokens")
    assert browser.run("document.querySelectorAll('#probe-entropy .cursor .chosen').length") == 1
    for figure in ("probe-entropy", "probe-horizons"):
        browser.hover(f"#{figure} svg", x=0.6, y=0.6)
        assert re.fullmatch(r"layer \d, head \d|mean of 24 heads", browser.texts(f"#{figure} .tip b")[0])
    browser.hover("#probe-loss svg", x=0.5, y=0.2)
    assert browser.texts("#probe-loss .tip b") == ["paper, all heads"]
    assert browser.texts("#probe-loss .tip span")[1] == "95 % interval+0.0490 … +0.0730"


def test_figures_can_be_taken_away(browser, drawn, probe):
    browser.open(drawn(probe=probe), scheme="dark")
    browser.run("""window.taken = []; URL.createObjectURL = (blob) => { taken.push(blob.text()); return "#"; };
                   document.querySelectorAll('.tools button').forEach((b) => b.click())""")
    taken = browser.run("Promise.all(taken)")
    assert len(taken) == 2 * len(FIGURES)
    for svg in taken[0::2]:
        assert ET.fromstring(svg).find("{http://www.w3.org/2000/svg}title").text and "var(" not in svg
    rows = taken[2 * FIGURES.index("probe-map") + 1].splitlines()
    assert len(rows) == 1 + 5 * 24 and rows[0].startswith("layer,head,class,tokens,entropy,entropy error,")
    first = probe["lengths"][0]["statistics"]
    assert [float(x) for x in rows[1].split(",")[3:6]] == [64, first["entropy"]["mean"][0][0], first["entropy"]["error"][0][0]]


# ---- what it survives


def one_length(probe):
    del probe["lengths"][1:]
    for head in probe["heads"]:
        head |= {"slope": None, "low": None, "high": None}


def nothing_known(probe):
    for length in probe["lengths"]:
        for statistic in length["statistics"].values():
            statistic |= {name: [[None] * 4] * 6 for name in ("mean", "error")}
    for head in probe["heads"]:
        head |= {"class": "sharp", "slope": None, "low": None, "high": None, "horizon": None}
    for setting in probe["settings"]:
        setting |= {name: None for name in setting if name not in ("name", "tokens")}


def strange_numbers(probe):
    values = [None, -1, 0, 1e300, 1e-300, -1e300]
    for length in probe["lengths"]:
        for statistic in length["statistics"].values():
            statistic["mean"] = [[values[(i + j) % 6] for j in range(4)] for i in range(6)]
    for i, head in enumerate(probe["heads"]):
        head |= {"slope": values[i % 6], "horizon": values[(i + 1) % 6]}
    probe["settings"][1] |= {"difference": 1e300, "needle": -1e300}
    probe["model"]["context"] = 0


def one_head(probe):
    probe |= probe_results(1, 1, (7.0,))
    del probe["model"]["context"]
    for setting in probe["settings"]:
        for name in ("needle", "needle_low", "needle_high"):
            del setting[name]
    probe["settings"] = probe["settings"][:1]


MARKUP = """<script>window.taken = 1</script><img src=x onerror="window.taken = 1">'"&</script><!--"""


def names_with_markup(probe):
    probe["model"] |= {"name": MARKUP, "architecture": MARKUP}
    probe |= {"rule": MARKUP, "verdict": MARKUP + "x" * 300}
    probe["prompts"]["example"] = probe["provenance"]["command"] = MARKUP + "\u2028"
    probe["settings"][1]["name"] = MARKUP


@pytest.mark.parametrize("case", [one_length, nothing_known, strange_numbers, one_head, names_with_markup], ids=lambda case: case.__name__)
def test_odd_probes_draw_without_problems(browser, drawn, probe, case):
    case(probe)
    browser.open(drawn(odd=probe))
    assert browser.problems() == []
    assert {"probe-entropy", "probe-map", "probe-horizons"} <= set(figures(browser))
    for figure in figures(browser):
        browser.focus(f"#{figure} .plot")
        browser.press("ArrowRight")
        browser.press("ArrowDown")
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for i in range(8):
        browser.run(f"(() => {{ const s = document.querySelector('#probe-map select'); s.selectedIndex = {i}; s.dispatchEvent(new Event('change')); }})()")
        body = browser.run("document.body.innerText")
        assert not re.search(r"\b(NaN|undefined|null|Infinity|\[object)", body), re.search(r".*\b(NaN|undefined|null|Infinity).*", body)
        bad = browser.run("[...document.querySelectorAll('svg *')].filter((e) => [...e.attributes].some((a) => "
                          "/NaN|undefined|Infinity/.test(a.value))).map((e) => e.outerHTML.slice(0, 200))")
        assert bad == []
    assert browser.problems() == []
    assert browser.run("window.taken") is None and browser.run("document.images.length") == 0
    assert browser.run("document.documentElement.scrollWidth") <= 1000
    if case is names_with_markup:
        assert MARKUP in browser.run("document.body.textContent")


# ---- that people can use it


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("shape", [(6, 4), (30, 9)], ids=["small", "wide"])
def test_it_fits_every_screen(browser, drawn, shape, width, scheme):
    tokens = (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
    browser.open(drawn(probe=probe_results(*shape, tokens, seed=3)), width=width, scheme=scheme)
    assert browser.problems() == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / f"probe-{shape[0]}x{shape[1]}-{width}-{scheme}.png")
    assert browser.run("document.documentElement.scrollWidth") <= width
    smallest = browser.run("Math.min(...[...document.querySelectorAll('svg text, p, td, button')].map((e) => parseFloat(getComputedStyle(e).fontSize)))")
    assert smallest >= 12
    assert browser.misplaced_texts() == []


def test_everything_has_a_name_for_those_who_hear_it(browser, drawn, probe):
    browser.open(drawn(probe=probe))
    assert browser.run("[...document.querySelectorAll('.plot')].every((p) => p.getAttribute('role') === 'img' && p.getAttribute('aria-label').length > 40)")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [n for n in tree if n.get("role", {}).get("value") in ("button", "combobox", "slider") and not n.get("ignored")]
    assert len(controls) == 2 * len(FIGURES) + 3
    assert all(n["name"]["value"] for n in controls)


def test_on_paper_it_is_light(browser, drawn, probe):
    browser.open(drawn(probe=probe), scheme="dark", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "probe-print.png")


def test_a_large_model_is_drawn(browser, drawn):
    """80 layers of 64 heads at 8 lengths."""
    tokens = tuple(64.0 * 2**i for i in range(8))
    browser.open(drawn(large=probe_results(80, 64, tokens)))
    assert browser.problems() == [] and figures(browser) == FIGURES
    assert browser.run("document.documentElement.scrollWidth") <= 1000
    assert browser.misplaced_texts() == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "probe-80x64.png")
