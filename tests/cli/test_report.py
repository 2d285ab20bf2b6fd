"""whet report from outside: its formats, its defaults, and files it must refuse. The page itself: tests/browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import WHET, names, ok, refused, run

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("bench", "tests")]
import report as bench
from clrs_results import clrs_results
from probe_results import probe_results


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two experiments that share two seeds and two sizes."""
    folder = tmp_path_factory.mktemp("report")
    for name, steps, sizes in (("a", 100, "16,64"), ("b", 200, "16,64,128")):
        result = run("reproduce", folder / name, "--seeds", 2, "--steps", steps, "--sizes", sizes, "--sets", 32, "--batch", 8,
                     "--no-calibration")
        assert result.returncode == 0, result.stderr
        assert f"Open {folder / name}/report.html in a browser.\n" in result.stderr
    return folder


@pytest.fixture
def here_with_runs(here, runs):
    shutil.copytree(runs, here, dirs_exist_ok=True)
    return here


def benchmark(command):
    """Results of a benchmark, by the code that writes them."""
    sections = [bench.Section("Rows", "one thread", ("shape", "ns"), [("4×4", 1.5)], [bench.Bar("a", 0.5, 1.0, True)], {})]
    provenance = {"command": command, "whet": "0.1.0", "machine": "one", "target": "AVX2", "threads": 2}
    return bench.results(provenance, {"caches": "L2 512K"}, sections)


def data_of(page):
    """What a page carries, read as a browser would."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S).group(1))


# ---- what it writes


def test_the_page_of_a_run_is_the_one_its_command_left(here_with_runs):
    left = (here_with_runs / "a/report.html").read_bytes()
    os.remove("a/report.html")
    assert ok("report", "a") == "Open a/report.html in a browser.\n"
    assert (here_with_runs / "a/report.html").read_bytes() == left
    results = json.loads((here_with_runs / "a/results.json").read_text())
    assert data_of(here_with_runs / "a/report.html") == {"runs": [{"name": "a", "results": results}], "comparison": None}


def test_a_file_is_as_good_as_its_folder(here_with_runs):
    page = (here_with_runs / "a/report.html").read_bytes()
    ok("report", "a/results.json", "--out", "page.html")
    assert (here_with_runs / "page.html").read_bytes() == page
    shutil.copy("a/results.json", "mine.json")
    assert ok("report", "mine.json") == "Open report.html in a browser.\n"
    assert data_of(here_with_runs / "report.html")["runs"][0]["name"] == "mine"


def test_several_runs_are_paired_by_seed(here_with_runs):
    assert ok("report", "a", "b") == "Open report.html in a browser.\n"
    data = json.loads(ok("report", "a", "b", "--format", "json"))
    assert data == data_of(here_with_runs / "report.html")
    (comparison,) = data["comparison"]
    assert (comparison["run"], comparison["against"], comparison["seeds"]) == (1, 0, 2)
    assert [size["items"] for size in comparison["sizes"]] == [16, 64]
    for i, size in enumerate(comparison["sizes"]):
        for rule, test in size["rules"].items():
            a, b = ([m["sizes"][i]["rules"][rule]["accuracy"] for m in run["results"]["models"]] for run in data["runs"])
            assert test["difference"] == pytest.approx((b[0] - a[0] + b[1] - a[1]) / 2)
            assert test["low"] <= test["difference"] <= test["high"]


def test_runs_without_a_common_seed_have_no_test(here_with_runs):
    results = json.loads((here_with_runs / "b/results.json").read_text())
    for model in results["models"]:
        model["seed"] += 100
    (here_with_runs / "other.json").write_text(json.dumps(results))
    (comparison,) = json.loads(ok("report", "a", "other.json", "--format", "json"))["comparison"]
    assert comparison["seeds"] == 0
    test = comparison["sizes"][0]["rules"]["softmax"]
    assert test["p"] is None and test["difference"] is not None
    assert "no seed in common" in ok("report", "a", "other.json", "--format", "md")


def test_tables_of_one_run_and_of_several(here_with_runs):
    assert ok("report", "a", "--format", "md") == (here_with_runs / "a/tables.md").read_text()
    text = ok("report", "a", "b", "--format", "md")
    assert text.startswith("## Runs ranked as they were trained, % of sets; the last columns at 64 items\n\n")
    assert "\n## b against a, % of sets; difference in points, paired over 2 seeds\n\n### softmax\n" in text
    assert ok("report", "a", "b", "--format", "md", "--out", "c.md") == "" and (here_with_runs / "c.md").read_text() == text


@pytest.mark.parametrize("runs", [["alternatives/paper-*.json"], ["alternatives/sharp-*.json"],
                                  ["alternatives/full/sharp-*.json"]])
def test_the_documented_ranking_is_that_of_the_results(runs):
    root = Path(__file__).resolve().parents[2]
    files = [path for pattern in runs for path in sorted((root / "results").glob(pattern))]
    ranking = ok("report", *files, "--format", "md").split("\n\n")[1]
    assert len(files) > 2 and ranking in (root / "docs/alternatives.md").read_text()


def test_folders_of_the_same_name_are_told_apart(here_with_runs):
    shutil.copytree("b", "old/a")
    data = json.loads(ok("report", "a", "old/a", "--format", "json"))
    assert [run["name"] for run in data["runs"]] == ["a", "old/a"]


def test_figures_become_files(here_with_runs):
    assert ok("report", "a", "--format", "svg") == "9 figures are in a/figures.\n"
    assert names("a/figures") == [f"{n}.svg" for n in (
        "accuracy", "entropy", "fit", "gains", "heat-map", "largest-weight", "losses", "training-accuracy", "training-loss")]
    for name in names("a/figures"):
        text = (here_with_runs / "a/figures" / name).read_text()
        assert text.startswith("<svg ") and text.endswith("</svg>\n") and "<title>" in text


def test_without_a_browser_figures_are_refused_in_a_sentence(here_with_runs):
    refused(1, "report", "a", "--format", "svg", saying="none is installed here: install chromium", env={**os.environ, "PATH": "/nowhere"})
    assert "figures" not in names("a")


def test_a_page_to_standard_output_is_appended(here_with_runs):
    page = (here_with_runs / "a/report.html").read_bytes()
    for name in ("/dev/stdout", "/proc/self/fd/1", "log"):
        (here_with_runs / "log").write_bytes(b"one\n")
        with open("log", "ab") as log:
            subprocess.run([WHET, "report", "a", "--out", name], stdout=log, check=True)
        assert (here_with_runs / "log").read_bytes() == b"one\n" + page


def test_ctrl_c_ends_the_browser_too(here_with_runs):
    """The browser, a child of it, and what was made for them."""
    (here_with_runs / "bin").mkdir()
    (here_with_runs / "tmp").mkdir()
    browser = here_with_runs / "bin/chromium"
    browser.write_text("#!/bin/sh\nsleep 300 &\necho $! $$ >ids.new\nmv ids.new ids\nwait\n")
    browser.chmod(0o755)
    environment = {**os.environ, "PATH": f"{here_with_runs}/bin:{os.environ['PATH']}", "TMPDIR": f"{here_with_runs}/tmp"}
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([WHET, "report", "a", "--format", "svg"], env=environment, stderr=subprocess.PIPE,
                                   preexec_fn=lambda number=number: signal.signal(number, signal.SIG_DFL))
        wait_for(lambda: os.path.exists("ids"))
        ids = [int(word) for word in (here_with_runs / "ids").read_text().split()]
        os.remove("ids")
        assert all(map(runs_still, ids)) and names("tmp")
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
        assert process.stderr.read() == b""
        wait_for(lambda ids=ids: not any(map(runs_still, ids)))
        assert names("tmp") == [] and "figures" not in names("a")


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def runs_still(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # one that nobody has waited for is no more
    except FileNotFoundError:
        return False


# ---- what it refuses


@pytest.mark.parametrize("options", [["--out", "a/results.json"], ["--out", "link"], ["--format", "json", "--out", "./a/results.json"],
                                     ["--format", "md", "--out", "a/../a/results.json"]])
def test_results_are_not_overwritten_by_their_page(here_with_runs, options):
    before = (here_with_runs / "a/results.json").read_bytes()
    os.symlink("a/results.json", "link")
    refused(2, "report", "b", "a", *options, saying="holds the results themselves; name another file")
    assert (here_with_runs / "a/results.json").read_bytes() == before
    shutil.copy("a/results.json", "report.html")
    refused(2, "report", "report.html", saying="--out: report.html holds the results themselves")


def test_names_that_are_no_utf8_are_shown_escaped(here_with_runs):
    name = os.fsdecode(b"bad\xff")
    shutil.copytree("b", name)
    assert json.loads(ok("report", "a", name, "--format", "json"))["runs"][1]["name"] == "bad\\xff"
    assert "\n## bad\\xff against a," in ok("report", "a", name, "--format", "md")
    assert ok("report", name) == "Open bad\\xff/report.html in a browser.\n"
    refused(1, "report", name + "x", saying="bad\\xffx: cannot open")


def test_names_with_bars_stay_in_their_cells(here_with_runs):
    os.rename("b", "b|c")
    lines = ok("report", "a", "b|c", "--format", "md").splitlines()
    head = next(line for line in lines if line.startswith("| items"))
    assert " b\\|c |" in head and {len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")} == {9, 6}  # the ranking, the differences


def changed(**fields):
    def change(results):
        for name, value in fields.items():
            if value is None:
                del results[name]
            else:
                results[name] = value
        return json.dumps(results)

    return change


@pytest.mark.parametrize("content, saying", [
    (lambda results: json.dumps(results)[:5000], "x.json: is not JSON from byte 5001 on, maybe cut short"),
    (lambda results: "", "is not JSON from byte 1 on"),
    (lambda results: '{"loss": 1}', 'is not from whet: it has no "schema": "whet results"'),
    (lambda results: "[]", "is not from whet"),
    (lambda results: "3", "is not from whet"),
    (lambda results: "[" * 100_000, "is nested deeper than the 32 levels"),
    (changed(version=2), "x.json: version: is 2, this whet reads version 1; use the whet that wrote it, or a newer one"),
    (changed(version=0), "version: is 0, this whet reads version 1"),
    (changed(version="1"), "version: is missing or not a whole number"),
    (changed(kind="weather"), 'kind: is "weather", this whet knows reproduction, benchmark, probe and clrs; use a newer whet'),
    (changed(provenance=None), "provenance: is missing"),
    (changed(summary=None), "summary: is missing"),
    (changed(summary=[{"items": 3}]), "summary[0].sets: is missing"),
    (changed(models=[]), "models: is empty, must hold at least one head"),
    (changed(models=[{"seed": 1}]), "models[0].recipe: is missing"),
    (changed(kind="benchmark"), "facts: is missing"),
])
def test_files_that_are_no_results_are_refused(here_with_runs, content, saying):
    (here_with_runs / "x.json").write_text(content(json.loads((here_with_runs / "a/results.json").read_text())))
    for options in ([], ["--format", "md"], ["--format", "json"], ["--format", "svg"]):
        refused(1, "report", "x.json", *options, saying=saying)
    assert names(here_with_runs) == ["a", "b", "x.json"]


def test_benchmarks_write_what_whet_reads(here):
    (here / "rows.json").write_text(json.dumps(benchmark(command="python -m bench.rows")))
    (shown,) = json.loads(ok("report", "rows.json", "--format", "json"))["runs"]
    assert shown["results"]["provenance"]["command"] == "python -m bench.rows"
    (section,) = shown["results"]["sections"]
    assert section["rows"] == [["4×4", "1.5"]] and section["bars"][0] == {"text": "a", "value": 0.5, "limit": 1, "at_most": True}


# ---- probes


def test_a_probe_has_tables_and_a_page(here):
    results = probe_results()
    (here / "results.json").write_text(json.dumps(results))
    assert ok("report", ".") == "Open ./report.html in a browser.\n"
    assert data_of(here / "report.html")["runs"][0]["results"] == results
    assert json.loads(ok("report", ".", "--format", "json"))["runs"][0]["results"] == results
    text = ok("report", "results.json", "--format", "md")
    assert results["verdict"] in text and "6 layers of 4 heads" in text
    classes = [cells[3].strip() for line in text.splitlines() if len(cells := line.split("|")) == 14][2:]
    assert classes == sorted((head["class"] for head in results["heads"]), key=["dispersing", "sink", "uniform", "sharp"].index)
    settings = [line for line in text.splitlines() if "paper, all heads" in line]
    assert len(settings) == 1 and " [" in settings[0]


def test_probes_are_not_compared(here):
    for name in ("a", "b"):
        (here / f"{name}.json").write_text(json.dumps(probe_results()))
    (here / "rows.json").write_text(json.dumps(benchmark(command="make bench")))
    for options in ([], ["--format", "md"]):
        refused(2, "report", "a.json", "b.json", *options, saying="DIR: has 2 probes; name one, since they are not compared")
    refused(2, "report", "a.json", "rows.json", saying="DIR: has results of kind probe in a.json and benchmark in rows.json")


@pytest.mark.parametrize("change, saying", [
    (lambda r: r["lengths"].clear(), "x.json: lengths: is empty, must hold at least one length"),
    (lambda r: r["lengths"].reverse(), "lengths[1].tokens: must be more than at the length before"),
    (lambda r: r["lengths"][2]["statistics"]["peak"]["mean"][5].pop(), "lengths[2].statistics.peak.mean[5]: has 3 entries"),
    (lambda r: r["heads"].pop(), "heads: has 23 entries, must have one for each of the model's 6 x 4 heads"),
    (lambda r: r["heads"][3].update({"class": "<b>"}), 'heads[3].class: is "<b>", must be dispersing, sink, uniform or sharp'),
    (lambda r: r["model"].update(layers=2**62), "lengths[0].statistics.entropy.mean: has 6 entries"),
])
def test_probes_whose_parts_disagree_are_refused(here, change, saying):
    results = probe_results()
    change(results)
    (here / "x.json").write_text(json.dumps(results))
    for options in ([], ["--format", "md"]):
        refused(1, "report", "x.json", *options, saying=saying)
    assert names(here) == ["x.json"]


# ---- CLRS-Text


def test_results_on_clrs_text_have_tables_and_a_page(here):
    results = clrs_results(("insertion_sort", "minimum"))
    (here / "results.json").write_text(json.dumps(results))
    assert ok("report", ".") == "Open ./report.html in a browser.\n"
    assert data_of(here / "report.html")["runs"][0]["results"] == results
    assert json.loads(ok("report", ".", "--format", "json"))["runs"][0]["results"] == results
    text = ok("report", "results.json", "--format", "md")
    assert "12 runs on 2 algorithms" in text and "## minimum: exact matches by size" in text
    lines = [line.split("|") for line in text.splitlines()]
    short = [cells[1].strip() for cells in lines if len(cells) == 1 + 13 + 1]  # twelve sizes
    assert short[2:10] == ["softmax", "softmax, paper at test", "softmax, log-length:32 at test", "paper", "paper (train only)", "learned log-power",
                     "another's answer", "copy the input"]
    row = next(cells for cells in lines if len(cells) == 1 + 11 + 1 and [cells[1].strip(), cells[3].strip()] == ["64", "paper"])
    one = next(one for one in results["tasks"][0]["sizes"][-1]["variants"] if one["variant"] == "paper")
    assert row[5].strip().startswith(f"{100 * one['exact']['mean']:.1f} [")
    assert row[8].strip().startswith(f"{100 * one['against_softmax']['exact']['difference']:.1f} [")


def test_results_on_clrs_text_are_not_compared(here):
    for name in ("a", "b"):
        (here / f"{name}.json").write_text(json.dumps(clrs_results(("minimum",), seeds=1)))
    for options in ([], ["--format", "md"]):
        refused(2, "report", "a.json", "b.json", *options, saying="DIR: has 2 results on CLRS-Text; name one, or have 'whet clrs report' compare")


@pytest.mark.parametrize("change, saying", [
    (lambda r: r["runs"].clear(), "x.json: runs: is empty, must hold at least one run"),
    (lambda r: r["tasks"][0]["sizes"].reverse(), "tasks[0].sizes[1].size: must be more than the size before"),
    (lambda r: r["tasks"][0]["sizes"][3]["variants"][0]["exact"].update(mean=1.5), "tasks[0].sizes[3].variants[0].exact.mean: is 1.5, must be 0 to 1"),
    (lambda r: r["tasks"][0]["sizes"][0]["variants"][0]["errors"].extend([0.5] * 64), "tasks[0].sizes[0].variants[0].errors: has 69 entries, may have 64"),
    (lambda r: r["tasks"][0]["sizes"][0].update(size=2**62), "must be 1 to 1000000000"),
])
def test_results_on_clrs_text_whose_parts_disagree_are_refused(here, change, saying):
    results = clrs_results(("minimum",))
    change(results)
    (here / "x.json").write_text(json.dumps(results))
    for options in ([], ["--format", "md"]):
        refused(1, "report", "x.json", *options, saying=saying)
    assert names(here) == ["x.json"]


def test_wrong_use_is_named(here_with_runs):
    refused(1, "report", "nowhere", saying="nowhere: cannot open")
    refused(1, "report", "", saying="'': is no folder and no file")
    (here_with_runs / "empty").mkdir()
    refused(1, "report", "empty", saying="empty: holds no results.json; 'whet reproduce'")
    refused(2, "report", "a", "a", saying="DIR: has the same results twice, as a and as a; name each once")
    os.symlink("a", "link")
    for other in ("./a", "a/results.json", "link", here_with_runs / "a"):
        refused(2, "report", "a", other, saying=f"the same results twice, as a and as {other}")
    refused(2, "report", "a", "--format", "pdf", saying="--format")
    refused(2, "report", saying="DIR")
    refused(1, "report", "a", "--out", "nowhere/page.html", saying="nowhere/page.html: cannot")
    (here_with_runs / "bench.json").write_text(json.dumps(benchmark(command="make bench")))
    refused(2, "report", "a", "bench.json", saying="DIR: has results of kind reproduction in a and benchmark in bench.json")
    refused(2, "report", "bench.json", "--format", "md", saying="--format: is 'md'")
    assert "Example" in ok("report", "--help")


def test_names_with_markup_stay_inside_the_data(here_with_runs):
    results = json.loads((here_with_runs / "a/results.json").read_text())
    results["provenance"]["machine"] = "</script><script>alert(1)</script>\u2028&amp;"
    (here_with_runs / "x.json").write_text(json.dumps(results))
    ok("report", "x.json", "--out", "page.html")
    text = (here_with_runs / "page.html").read_text()
    assert "alert(1)</script>" not in text and "\u2028" not in text
    assert data_of(here_with_runs / "page.html")["runs"][0]["results"] == results
