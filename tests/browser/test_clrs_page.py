"""The page of results on CLRS-Text in a real browser: what it shows, what it survives, and that people can use it."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from clrs_results import SIZES, TRAINED, clrs_results

SCREENSHOTS = ROOT / "build/screenshots"
PANELS = ["clrs-size-1", "clrs-size-2", "clrs-size-3"]
FIGURES = [*PANELS, "clrs-places", "clrs-entropy", "clrs-loss", "clrs-accuracy"]


@pytest.fixture
def clrs():
    return clrs_results()


def figures(browser):
    return browser.run("[...document.querySelectorAll('figure')].map((f) => f.id)")


def choose(browser, selector, option):
    """As the keyboard does, by the option's text."""
    browser.run(f"""(() => {{ const s = document.querySelector({selector!r});
        s.selectedIndex = [...s.options].findIndex((o) => o.textContent === {option!r}); s.dispatchEvent(new Event('change')); }})()""")


def curves(browser, figure):
    return browser.run(f"[...document.querySelectorAll('#{figure} path.curve[data-name]')].map((p) => p.dataset.name)")


def entry(clrs, task, size, variant, setting="as trained"):
    found = next(one for one in clrs["tasks"][task]["sizes"] if one["size"] == size)["variants"]
    return next(one for one in found if (one["variant"], one["setting"]) == (variant, setting))


# ---- what it shows


def test_everything_is_drawn(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    assert browser.problems() == []
    assert figures(browser) == FIGURES
    for panel in PANELS:
        assert curves(browser, panel) == ["another’s answer", "copy the input", "softmax", "paper", "paper (train only)", "learned log-power"]
        assert browser.run(f"document.querySelectorAll('#{panel} path.band').length") == 4
        assert browser.run(f"document.querySelectorAll('#{panel} circle.solid').length") == 4 * len(TRAINED)
        assert browser.run(f"[...document.querySelectorAll('#{panel} path.curve.thin[data-name]')].every((p) => p.getAttribute('stroke-dasharray'))")
    assert len(curves(browser, "clrs-loss")) == len(clrs["runs"])
    assert curves(browser, "clrs-places") == ["softmax", "paper", "paper (train only)", "learned log-power"]


def test_the_headline_is_the_largest_difference_at_an_untrained_size(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    tested = [(abs(one["against_softmax"]["exact"]["difference"]), task, size["size"], one)
              for task in clrs["tasks"] for size in task["sizes"] if size["size"] not in TRAINED
              for one in size["variants"] if one["setting"] == "as trained" and "against_softmax" in one]
    _, task, size, one = max(tested, key=lambda found: found[0])
    (headline,) = browser.texts("h1")
    assert headline.startswith(f"At size {size} of {task['algorithm']}, not among the trained ones, {one['variant']} answers {100 * one['exact']['mean']:.1f}")
    assert f"{100 * one['against_softmax']['exact']['difference']:+.1f} points" in headline and ", p = " in headline
    sure = [found for *_, found in tested if found["against_softmax"]["exact"]["p"] < 0.05]
    better = sum(found["against_softmax"]["exact"]["difference"] > 0 for found in sure)
    assert f"The largest of {len(tested)} differences" in browser.texts("header p")[1]
    assert re.search(rf"\b{better} (is|are) in favour of the other variant and {len(sure) - better} of softmax", browser.texts("header p")[1])


def test_the_headline_of_single_runs_says_what_p_is_of(browser, drawn, clrs):
    says = "Of a single run p is over its problems and says nothing of other seeds."
    browser.open(drawn(sweep=clrs_results(seeds=1)))
    assert says in browser.texts("header p")[1]
    browser.open(drawn(sweep=clrs))
    assert says not in browser.texts("header p")[1]


def test_measure_and_what_is_compared_are_chosen_by_keyboard(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    before = browser.texts("figure h3")[:3]
    browser.focus("#clrs-controls select")
    browser.press("ArrowDown")
    assert all("right tokens of softmax" in title for title in browser.texts("figure h3")[:3]) and browser.texts("figure h3")[:3] != before
    browser.press("ArrowDown")  # right tokens after right ones: no baseline has them
    assert curves(browser, "clrs-size-2") == ["softmax", "paper", "paper (train only)", "learned log-power"]
    browser.focus("#clrs-controls label:nth-of-type(2) select")
    browser.press("ArrowDown")
    for panel in PANELS:
        assert curves(browser, panel) == ["softmax as trained", "paper", "log-length:32"]
    assert browser.problems() == []


def test_curves_stand_at_their_values(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    browser.focus("#clrs-size-1 .plot")
    browser.press("ArrowRight")
    assert browser.texts("#clrs-size-1 .tip b") == [f"size {SIZES[0]}, trained"]
    browser.press("ArrowRight")
    assert browser.texts("#clrs-size-1 .tip b") == [f"size {SIZES[1]}"]
    lines = browser.texts("#clrs-size-1 .tip span")
    exact = entry(clrs, 0, SIZES[1], "paper")["exact"]
    said = "{mean:.1f} ({low:.1f} … {high:.1f})".format(**{name: 100 * value for name, value in exact.items()})
    assert f"paper{said}" in lines and "another’s answer1.0" in lines


def test_differences_are_a_table(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    rows = "[...document.querySelectorAll('table')][0].querySelectorAll('tbody tr')"
    cells = browser.run(f"[...{rows}].map((r) => [...r.cells].map((c) => c.textContent))")
    assert [row[0] for row in cells] == [f"{'● ' * (size in TRAINED)}{size}" for size in SIZES]
    for row, size in zip(cells, SIZES, strict=True):
        one = entry(clrs, 0, size, "paper")
        assert row[1:3] == ["625", "3"]
        for at, measure in ((3, "exact"), (8, "tokens")):
            assert row[at] == f"{100 * entry(clrs, 0, size, 'softmax')[measure]['mean']:.1f}"
            assert row[at + 1] == f"{100 * one[measure]['mean']:.1f}"
            assert float(row[at + 2].replace("−", "-")) == pytest.approx(100 * one["against_softmax"][measure]["difference"], abs=0.051)
    marked = browser.run(f"[...{rows}].map((r) => r.cells[5].className === 'differs')")
    assert marked == [entry(clrs, 0, size, "paper")["against_softmax"]["exact"]["p"] < 0.05 for size in SIZES]
    browser.focus("section:nth-of-type(2) select")
    browser.press("ArrowDown")
    assert browser.texts("section:nth-of-type(2) caption") == ["minimum: paper against softmax"]


def test_of_many_sizes_some_stand_first(browser, drawn):
    browser.open(drawn(sweep=clrs_results(("minimum",), sizes=range(4, 65))))
    some, whole = browser.run("[...document.querySelectorAll('section:nth-of-type(2) table')].map((t) => [...t.querySelectorAll('tbody tr')].map((r) => r.cells[0].textContent))")
    assert len(some) == 14 and len(whole) == 61
    assert some[0] == whole[0] == "● 4" and some[-1] == whole[-1] == "64" and len(set(some)) == 14


def test_places_of_errors_are_of_the_chosen_size(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    assert browser.texts("#clrs-places output") == ["20"]  # the first beyond the trained ones
    browser.focus("#clrs-places input")
    browser.press("ArrowRight")
    assert browser.texts("#clrs-places output") == ["24"]
    errors = entry(clrs, 0, 24, "softmax")["errors"]
    half = len(errors) - len(errors) // 2
    halves = [sum(some) / half * 100 for some in (errors[:half], errors[-half:])]
    assert re.findall(r"([\d.]+)\u00a0%", browser.texts("#clrs-places h3")[0]) == [f"{value:.1f}" for value in halves]
    for _ in range(9):
        browser.press("ArrowLeft")
    assert browser.texts("#clrs-places output") == ["4, trained"]
    assert browser.problems() == []


def test_entropy_is_drawn_by_layer(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    assert curves(browser, "clrs-entropy") == ["layer 0", "layer 1", "layer 2"]
    choose(browser, "#clrs-entropy label:nth-of-type(2) select", "paper")
    assert len(curves(browser, "clrs-entropy")) == 6
    entropy, sharp = (entry(clrs, 0, 64, "paper")[name] for name in ("entropy", "sharp_entropy"))
    assert f"to {sum(entropy) / 3:.3g}\u00a0nats at size 64, sharpened to {sum(sharp) / 3:.3g}\u00a0nats" in browser.texts("#clrs-entropy h3")[0]
    assert browser.problems() == []


def test_figures_can_be_taken_away(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs), scheme="dark")
    browser.run("""window.taken = []; URL.createObjectURL = (blob) => { taken.push(blob.text()); return "#"; };
                   document.querySelectorAll('.tools button').forEach((b) => b.click())""")
    taken = browser.run("Promise.all(taken)")
    assert len(taken) == 2 * len(FIGURES)
    for svg in taken[0::2]:
        assert ET.fromstring(svg).find("{http://www.w3.org/2000/svg}title").text and "var(" not in svg
    rows = [line.split(",") for line in taken[1].splitlines()]
    assert len(rows) == 1 + len(SIZES) * (6 + 2) and rows[0][:6] == ["algorithm", "size", "trained", "problems", "variant", "setting"]
    exact = clrs["tasks"][0]["sizes"][0]["variants"][0]["exact"]
    assert [float(x) for x in rows[1][7:10]] == [exact["mean"], exact["low"], exact["high"]]


# ---- what it survives


def every_variant(clrs):
    return [one for task in clrs["tasks"] for size in task["sizes"] for one in size["variants"]]


def one_of_everything(clrs):
    clrs |= clrs_results(("minimum",), ("softmax",), (), (16,), 1, 1)
    clrs["runs"][0]["metrics"] = []


def nothing_known(clrs):
    for one in every_variant(clrs):
        for measure in ("exact", "tokens"):
            one[measure] |= {"low": None, "high": None}
        one["errors"] = [0]
        one["entropy"] = one["sharp_entropy"] = [None]
        if "against_softmax" in one:
            one["against_softmax"] = {measure: dict.fromkeys(("difference", "low", "high", "p")) for measure in ("exact", "tokens")}
    for run in clrs["runs"]:
        run["metrics"] = [[1, None, None]]


def strange_numbers(clrs):
    values = [None, -1, 0, 1e300, 1e-300, -1e300]
    for i, one in enumerate(every_variant(clrs)):
        one["exact"] |= {"low": values[i % 6], "high": values[(i + 1) % 6]}
        one["entropy"] = [values[(i + j) % 6] for j in range(3)]
        one["sharp_entropy"] = [values[(i + j) % 6] for j in range(2, 5)]
        if "against_softmax" in one:
            one["against_softmax"]["exact"] = dict(zip(("difference", "low", "high", "p"), (values * 2)[i % 6:]))
    for i, run in enumerate(clrs["runs"]):
        run["metrics"][0] = [0, values[i % 6], values[(i + 1) % 6]]


def no_softmax(clrs):
    for task in clrs["tasks"]:
        for size in task["sizes"]:
            size["variants"] = [one for one in size["variants"] if one["variant"] == "paper"]
            size["variants"][0] |= {"setting": "only at test"}
            del size["variants"][0]["against_softmax"], size["variants"][0]["entropy"], size["variants"][0]["sharp_entropy"]


def holes(clrs):
    """Sizes and variants that not all algorithms have; runs whose seeds and steps differ."""
    del clrs["tasks"][1]["sizes"][3:]
    for size in clrs["tasks"][0]["sizes"][::2]:
        del size["variants"][-1], size["variants"][0]
    clrs["tasks"][2]["trained_sizes"] = [500]
    clrs["runs"][1]["recipe"] = {"steps": {"a": None}}


MARKUP = """<script>window.taken = 1</script><img src=x onerror="window.taken = 1">'"&</script><!--"""


def names_with_markup(clrs):
    clrs["tasks"][0]["algorithm"] = MARKUP + "../../x"
    clrs["provenance"]["command"] = MARKUP + "\u2028"
    for one in every_variant(clrs):
        if one["variant"] == "paper":
            one["variant"] = MARKUP + "x" * 200
    clrs["runs"][0] |= {"name": MARKUP, "variant": "constructor", "recipe": {MARKUP: MARKUP, "__proto__": 3}}


@pytest.mark.parametrize("case", [one_of_everything, nothing_known, strange_numbers, no_softmax, holes, names_with_markup], ids=lambda case: case.__name__)
def test_odd_results_draw_without_problems(browser, drawn, clrs, case):
    case(clrs)
    browser.open(drawn(odd=clrs))
    assert browser.problems() == []
    assert {"clrs-size-1", "clrs-places"} <= set(figures(browser))
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    selects = browser.run("document.querySelectorAll('select').length")
    for select in range(selects):
        for i in range(browser.run(f"document.querySelectorAll('select')[{select}].options.length")):
            browser.run(f"(() => {{ const s = document.querySelectorAll('select')[{select}]; s.selectedIndex = {i}; s.dispatchEvent(new Event('change')); }})()")
            body = browser.run("document.body.innerText")
            assert not re.search(r"\b(NaN|undefined|Infinity|\[object)", body), re.search(r".*\b(NaN|undefined|Infinity).*", body)
            bad = browser.run("[...document.querySelectorAll('svg *')].filter((e) => [...e.attributes].some((a) => "
                              "/NaN|undefined|Infinity/.test(a.value))).map((e) => e.outerHTML.slice(0, 200))")
            assert bad == []
    for figure in figures(browser):
        browser.focus(f"#{figure} .plot")
        browser.press("ArrowRight")
        browser.press("ArrowDown")
    assert browser.problems() == []
    assert browser.run("window.taken") is None and browser.run("document.images.length") == 0
    assert browser.run("document.documentElement.scrollWidth") <= 1000
    if case is names_with_markup:
        assert MARKUP in browser.run("document.body.textContent")


# ---- that people can use it


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("shape", ["one", "three"])
def test_it_fits_every_screen(browser, drawn, shape, width, scheme):
    made = clrs_results() if shape == "three" else clrs_results(("insertion_sort",), ("softmax", "paper"), (), range(4, 65), layers=4, seed=3)
    browser.open(drawn(sweep=made), width=width, scheme=scheme)
    assert browser.problems() == []
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / f"clrs-{shape}-{width}-{scheme}.png")
    assert browser.run("document.documentElement.scrollWidth") <= width
    smallest = browser.run("Math.min(...[...document.querySelectorAll('svg text, p, td, button')].map((e) => parseFloat(getComputedStyle(e).fontSize)))")
    assert smallest >= 12
    assert browser.misplaced_texts() == []


def test_everything_has_a_name_for_those_who_hear_it(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs))
    assert browser.run("[...document.querySelectorAll('.plot')].every((p) => p.getAttribute('role') === 'img' && p.getAttribute('aria-label').length > 40)")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [n for n in tree if n.get("role", {}).get("value") in ("button", "combobox", "slider") and not n.get("ignored")]
    assert len(controls) == 2 * len(FIGURES) + 2 + 2 + 3 + 2
    assert all(n["name"]["value"] for n in controls)


def test_on_paper_it_is_light(browser, drawn, clrs):
    browser.open(drawn(sweep=clrs), scheme="dark", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "clrs-print.png")


def test_thirty_algorithms_are_drawn(browser, drawn):
    browser.open(drawn(large=clrs_results([f"algorithm_{i}" for i in range(30)], sizes=range(4, 65), seeds=5)))
    assert browser.problems() == [] and len(figures(browser)) == 30 + 4
    assert browser.run("document.documentElement.scrollWidth") <= 1000
    assert browser.misplaced_texts() == []
