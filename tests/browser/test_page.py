"""report.html in a real browser: what it shows, what it survives, and that people can use it."""

import copy
import json
import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "build/screenshots"
FIGURES = ["heat-map", "accuracy", "gains", "losses", "entropy", "largest-weight", "fit", "calibrated",
           "training-loss", "training-accuracy"]


def percent(entry):
    deviation = "" if entry["deviation"] is None else f" ±{100 * entry['deviation']:.1f}"
    return f"{100 * entry['accuracy']:.1f}{deviation}"


def figures(browser):
    return browser.run("[...document.querySelectorAll('figure')].map((f) => f.id)")


def picture(browser, figure):
    return browser.run(f"document.querySelector('#{figure} svg').outerHTML")


# ---- what it shows


def test_a_reproduction_leaves_a_page_that_draws_everything(browser, reproduction):
    page = reproduction / "report.html"
    browser.open(page)
    assert browser.problems() == []
    assert figures(browser) == FIGURES
    assert "Redistribution and use in source and binary forms" in browser.texts("footer pre")[0]
    for figure in FIGURES:
        assert browser.run(f"document.querySelector('#{figure} svg').querySelectorAll('*').length") > 20, figure


def test_the_headline_is_the_largest_difference(browser, reproduction, results):
    browser.open(reproduction / "report.html")
    size = max(results["summary"], key=lambda s: abs(s["rules"]["paper"]["accuracy"] - s["rules"]["softmax"]["accuracy"]))
    headline = browser.texts("h1")[0].replace("\u00a0", " ")
    assert f"{size['items']:,} items" in headline
    assert f"{100 * size['rules']['paper']['accuracy']:.1f} %" in headline
    gain = 100 * (size["rules"]["paper"]["accuracy"] - size["rules"]["softmax"]["accuracy"])
    assert f"{gain:+.1f} points".replace("-", "−") in headline


def test_cells_equal_the_results(browser, reproduction, results):
    browser.open(reproduction / "report.html")
    cells = browser.run("""[...document.querySelectorAll('td[data-field]')].map((e) =>
        [Number(e.dataset.items), e.dataset.field, e.textContent, e.className])""")
    summary = {size["items"]: size["rules"] for size in results["summary"]}
    paper = {line["items"]: line for line in results["paper"]}
    assert len(cells) == 3 * len(set(summary) & set(paper))
    for items, field, text, mark in cells:
        if field == "p":
            p = summary[items]["paper"]["against_softmax"]["p"]
            assert text == "–" if p is None else float(text) == pytest.approx(p, rel=0.5)
            continue
        entry = summary[items][field]
        assert re.sub("[▲▼] ", "", text) == percent(entry)
        far = abs(100 * entry["accuracy"] - paper[items][field]) > 200 * entry["deviation"]
        assert (mark == "differs") == far and bool(re.match("[▲▼]", text)) == far
    for items, rules in summary.items():
        for rule, entry in rules.items():
            assert browser.texts(f'td[data-items="{items}"][data-rule="{rule}"]') == [percent(entry)]


def test_slider_and_switch_change_the_picture_from_the_keyboard(browser, reproduction):
    browser.open(reproduction / "report.html")
    seen, titles = [picture(browser, "heat-map")], [browser.texts("#heat-map h3")]
    at = int(browser.run("document.querySelector('#heat-map input').value"))
    browser.focus("#heat-map input")
    browser.press("ArrowLeft" if at > 0 else "ArrowRight")
    seen.append(picture(browser, "heat-map"))
    titles.append(browser.texts("#heat-map h3"))
    assert browser.texts("#heat-map output") != ["1,024 items"] or at == 3
    for figure, key in (("heat-map", "ArrowDown"), ("losses", "ArrowDown"), ("calibrated", "ArrowUp")):
        before = picture(browser, figure)
        browser.focus(f"#{figure} select")
        browser.press(key)
        assert picture(browser, figure) != before, figure
    seen.append(picture(browser, "heat-map"))
    assert len(set(seen)) == 3 and titles[0] != titles[1]
    assert browser.problems() == []


def test_cells_of_the_heat_map_are_the_weights(browser, reproduction, results):
    browser.open(reproduction / "report.html")
    items = results["heat_map"]["frames"][int(browser.run("document.querySelector('#heat-map input').value"))]
    opacities = browser.run("[...document.querySelectorAll('#heat-map svg > g')].slice(0, 2).map((g) => "
                            "[...g.querySelectorAll('.cell')].map((c) => Number(c.getAttribute('fill-opacity'))))")
    for panel, rule in zip(opacities, ("softmax", "paper"), strict=True):
        weights = [w for row in items["rules"][rule] for w in row if w > 0]
        assert [o ** 2 for o in panel] == pytest.approx(weights, abs=2e-3)


def test_values_appear_under_the_pointer_and_by_arrow_keys(browser, reproduction, results):
    browser.open(reproduction / "report.html")
    browser.hover("#accuracy svg", x=0.99)
    shown = browser.texts("#accuracy .tip span")
    assert browser.texts("#accuracy .tip b") == ["1,024 items in a set"]
    assert f"softmax{percent(results['summary'][-1]['rules']['softmax'])}" in shown
    browser.hover("h1")
    assert browser.run("document.querySelector('#accuracy .tip').hidden")
    browser.focus("#entropy .plot")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.texts("#entropy .tip b") == ["64 items in a set"]
    browser.hover("#heat-map svg", x=0.2, y=0.3)
    assert re.fullmatch(r"set \d+, .*\d\.\d{4}", browser.texts("#heat-map .tip span")[0])


def test_figures_can_be_taken_away(browser, reproduction, results):
    browser.open(reproduction / "report.html", scheme="dark")
    browser.run("""window.taken = []; URL.createObjectURL = (blob) => { taken.push(blob.text()); return "#"; };
                   document.querySelectorAll('.tools button').forEach((b) => b.click())""")
    taken = browser.run("Promise.all(taken)")
    assert len(taken) == 2 * len(FIGURES)
    for svg in taken[0::2]:
        root = ET.fromstring(svg)
        assert root.find("{http://www.w3.org/2000/svg}title").text and "var(" not in svg
        assert "#ffffff" in svg and "rgb(27, 31, 36)" in svg  # light, whatever the screen is
    rows = taken[2 * FIGURES.index("accuracy") + 1].splitlines()
    assert rows[0] == 'curve,items in a set,"accuracy, % of sets",deviation'
    first = results["summary"][0]["rules"]["softmax"]
    assert [float(x) for x in rows[1].split(",")[1:]] == pytest.approx([16, 100 * first["accuracy"], 100 * first["deviation"]])


def test_several_runs_are_compared(browser, drawn, results):
    other = copy.deepcopy(results)
    for model in other["models"]:
        for size in model["sizes"]:
            for rule in size["rules"].values():
                rule["accuracy"] /= 2
    for size in other["summary"]:
        for rule in size["rules"].values():
            rule["accuracy"] /= 2
    browser.open(drawn(whole=results, half=other))
    assert browser.problems() == []
    assert set(FIGURES) - set(figures(browser)) == {"gains", "calibrated"}
    assert "half differs from whole" in browser.texts("h1")[0]
    assert browser.texts("td[data-run]") == ["whole", "half"]  # the better one first
    differences = browser.texts('td[data-field="difference"]')
    expected = [-50 * size["rules"]["target_entropy"]["accuracy"] for size in results["summary"]]
    assert [float(d.replace("−", "-")) for d in differences] == pytest.approx(expected, abs=0.051)
    colours = browser.run("[...document.querySelectorAll('#accuracy .curve[data-name]')].map((c) => [c.dataset.name, c.style.stroke])")
    assert sorted(colours) == [["half", "var(--c1)"], ["half, ceiling", "var(--c1)"], ["whole", "var(--c0)"], ["whole, ceiling", "var(--c0)"]]
    before = picture(browser, "accuracy")
    browser.focus("#accuracy select")
    browser.press("ArrowDown")
    assert picture(browser, "accuracy") != before
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "comparison.png")


def test_a_benchmark_has_its_limits_drawn(browser, drawn):
    bars = [{"text": "kept", "value": 0.7, "limit": 0.8, "at_most": True},
            {"text": "missed <b>", "value": 4.6, "limit": 5, "at_most": False}]
    section = {"title": "Softmax", "note": "one thread", "headers": ["shape", "ns"], "rows": [["4×4", "1.2"]], "bars": bars}
    provenance = {"command": "python -m bench.rows", "whet": "0.1.0", "machine": "one", "target": "AVX2", "threads": 2}
    browser.open(drawn(rows={"schema": "whet results", "version": 1, "kind": "benchmark", "provenance": provenance,
                             "facts": {"caches": "none"}, "sections": [section, {**section, "title": "Empty", "bars": []}]}))
    assert browser.problems() == []
    assert browser.texts("h1") == ["1 of 2 limits kept"]
    assert browser.run("document.querySelectorAll('#benchmark-1 svg line.rim').length") == 2
    assert "missed <b>" in browser.texts("#benchmark-1 svg text")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "benchmark.png")


def test_of_very_many_dots_some_are_drawn(browser, drawn, results):
    results["fit_scatter"] = [[i % 600 / 100, 1 + i % 7] for i in range(200_000)]
    browser.open(drawn(many=results))
    assert browser.problems() == [] and figures(browser) == FIGURES
    assert browser.run("document.querySelectorAll('#fit circle.dot').length") == 4001  # and one in the legend
    assert "One of 50 is drawn; the CSV has all." in browser.texts("#fit .note")[0]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "many-dots.png")


# ---- what it survives


def one_seed(results):
    results["models"] = results["models"][:1]
    for size in results["summary"]:
        for rule in size["rules"].values():
            rule["deviation"] = None
            for test in ("against_softmax", "against_ceiling"):
                rule[test] |= {"low": None, "high": None, "p": None}


def missing_rules(results):
    for sizes in (results["summary"], *(model["sizes"] for model in results["models"])):
        for i, size in enumerate(sizes):
            for rule in ("paper", "target_entropy", "hard") if i else ("refit",):
                size["rules"].pop(rule, None)
    for frame in results["heat_map"]["frames"]:
        frame["rules"] = {"softmax": frame["rules"]["softmax"]}


def softmax_alone(results):
    for sizes in (results["summary"], *(model["sizes"] for model in results["models"])):
        for size in sizes:
            size["rules"] = {"softmax": size["rules"]["softmax"]}


def no_extras(results):
    del results["calibrated_summary"]
    results |= {"heat_map": results["heat_map"] | {"frames": []}, "fit_scatter": [], "paper": []}
    for model in results["models"]:
        model.pop("fit", None)
        del model["calibrated"]
        model |= {"metrics": [], "recipe": {}, "rules": {}}


def a_thousand_sizes(results):
    for sizes in (results["summary"], *(model["sizes"] for model in results["models"])):
        sizes[:] = [copy.deepcopy(sizes[0]) | {"items": 16 + 7 * i} for i in range(1000)]


def one_size(results):
    for sizes in (results["summary"], results["heat_map"]["frames"], *(model["sizes"] for model in results["models"])):
        del sizes[1:]


def strange_numbers(results):
    for model in results["models"]:
        model["sizes"][0] |= {"entropy": None, "largest_weight": 0, "weight_bound": None, "paper_bound": 1e300}
        model["metrics"] = [[1, 0, 0.5], [2, None, None], [3, 1e300, 1]]
    results["fit_scatter"] = [[0, 0], [1, -1], [None, 2], [1, 1e300], [2, 1e-300]]
    results["summary"][0]["rules"]["softmax"]["accuracy"] = None
    results["heat_map"]["frames"][0]["rules"]["paper"] = [[None, 0.5, -1, 2]]


MARKUP = """<script>window.taken = 1</script><img src=x onerror="window.taken = 1">'"&</script><!--"""


def names_with_markup(results):
    for sizes in (results["summary"], results["heat_map"]["frames"], *(model["sizes"] for model in results["models"])):
        for size in sizes:
            size["rules"][MARKUP] = size["rules"]["paper"]
            size["rules"]["constructor"] = size["rules"]["__proto__x"] = size["rules"]["paper"]
    results["provenance"]["command"] = results["provenance"]["machine"] = MARKUP + "\u2028"
    results["models"][0]["recipe"][MARKUP] = MARKUP


CASES = [one_seed, missing_rules, softmax_alone, no_extras, a_thousand_sizes, one_size, strange_numbers, names_with_markup]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_odd_results_draw_without_problems(browser, drawn, results, case):
    plain = copy.deepcopy(results)
    case(results)
    for page in (drawn(odd=results), drawn(odd=results, plain=plain)):
        browser.open(page)
        assert browser.problems() == []
        assert {"accuracy", "entropy", "largest-weight"} <= set(figures(browser))
        body = browser.run("document.body.innerText")
        assert not re.search(r"\b(NaN|undefined|null|Infinity|\[object)", body), re.search(r".*\b(NaN|undefined|null|Infinity).*", body)
        assert browser.run("window.taken") is None and browser.run("document.images.length") == 0
        bad = browser.run("[...document.querySelectorAll('svg *')].filter((e) => [...e.attributes].some((a) => "
                          "/NaN|undefined|Infinity/.test(a.value))).map((e) => e.outerHTML.slice(0, 200))")
        assert bad == []
        assert browser.run("document.documentElement.scrollWidth") <= 1000
        if case is names_with_markup:
            assert MARKUP in browser.run("document.body.textContent")


def test_names_of_runs_with_markup_are_text(browser, drawn, results):
    browser.open(drawn(**{"<img src=x onerror=alert(1)>": results, "b": results}))
    assert browser.problems() == [] and browser.run("document.images.length") == 0
    assert "<img src=x onerror=alert(1)>" in browser.run("document.body.textContent")


def test_ten_seeds_of_eleven_sizes_stay_below_2_mb(browser, drawn, results):
    """As long as a whole reproduction has them."""
    digits = random.Random(0)
    sizes = [16 << i for i in range(11)]

    def grown(of):
        return [json.loads(re.sub(r"0\.\d+", lambda _: str(digits.random()), json.dumps(of[0]))) | {"items": n} for n in sizes]

    results["summary"] = grown(results["summary"])
    results["heat_map"]["frames"] = [dict(results["heat_map"]["frames"][-1], items=n) for n in sizes]
    for name in results["calibrated_summary"]:
        results["calibrated_summary"][name] = grown(results["calibrated_summary"][name])
    model = results["models"][0]
    model["sizes"] = grown(model["sizes"])
    for name in model["calibrated"]:
        model["calibrated"][name]["sizes"] = grown(model["calibrated"][name]["sizes"])
    model["metrics"] = [[500 * i, digits.random(), digits.random()] for i in range(1, 201)]
    results["models"] = [dict(model, seed=i) for i in range(10)]
    results["fit_scatter"] = [[round(digits.random() * 9, 5), round(digits.random() * 9, 4)] for _ in range(4000)]
    page = drawn(ten=results)
    assert page.stat().st_size < 2_000_000
    browser.open(page)
    assert browser.problems() == []


# ---- that people can use it

WIDTHS = [360, 800, 1400]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_every_screen(browser, reproduction, width, scheme):
    browser.open(reproduction / "report.html", width=width, scheme=scheme)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / f"reproduction-{width}-{scheme}.png")
    assert browser.run("document.documentElement.scrollWidth") <= width
    smallest = browser.run("Math.min(...[...document.querySelectorAll('svg text, p, td, button')].map((e) => parseFloat(getComputedStyle(e).fontSize)))")
    assert smallest >= 12
    assert browser.misplaced_texts() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out(browser, reproduction, scheme):
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for curves."""
    browser.open(reproduction / "report.html", scheme=scheme)
    names = ["ground", "panel", "ink", "soft", "link", "mark", *(f"c{i}" for i in range(8))]
    colours = browser.run(f"{json.dumps(names)}.map((n) => getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim())")
    colours = dict(zip(names, colours, strict=True))

    def luminance(colour):
        shares = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground in ("ground", "panel"):
        for name in names[2:]:
            pair = sorted(luminance(colours[n]) + 0.05 for n in (ground, name))
            assert pair[1] / pair[0] >= (3 if name[0] == "c" else 4.5), (scheme, ground, name)


def test_everything_has_a_name_for_those_who_hear_it(browser, reproduction):
    browser.open(reproduction / "report.html")
    assert browser.run("[...document.querySelectorAll('.plot')].every((p) => p.getAttribute('role') === 'img' && p.getAttribute('aria-label').length > 40)")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [n for n in tree if n.get("role", {}).get("value") in ("button", "combobox", "slider") and not n.get("ignored")]
    assert len(controls) > 2 * len(FIGURES)
    assert all(n["name"]["value"] for n in controls)


def test_on_paper_it_is_light_and_has_no_buttons(browser, reproduction):
    browser.open(reproduction / "report.html", scheme="dark", media="print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    browser.screenshot(SCREENSHOTS / "reproduction-print.png")
