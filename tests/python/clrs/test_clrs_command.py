"""The program as people call it."""

import errno
import json
import os
import shutil

import pytest
from whet.clrs import command, options, quick, variants
from whet.clrs.errors import ClrsError
from whet.clrs.model import Sharpening
from whet.clrs.training import Recipe
from whet.probe import report as pages

pytestmark = pytest.mark.usefixtures("ready_vocabulary", "often")

TINY = ["--sizes", "3,4", "--width", "16", "--layers", "2", "--heads", "2", "--hidden", "16", "--batch", "4", "--steps", "8",
        "--warmup", "2", "--threads", "1"]
PLAN = ["--eval-sizes", "3-5:2", "--samples", "2"]


def run(capsys, *arguments, code=0):
    ended = 0
    try:
        command.main([str(argument) for argument in arguments])
    except SystemExit as exit:
        ended = exit.code
    captured = capsys.readouterr()
    assert ended == code, captured.err
    return captured


def refused(capsys, *arguments, saying, code=1):
    last = run(capsys, *arguments, code=code).err.strip().splitlines()[-1]
    assert saying in last and last.startswith("whet-clrs"), last


@pytest.fixture(autouse=True)
def without_page(monkeypatch):
    monkeypatch.setattr(pages, "_command", lambda: None)


def test_train_and_eval(tmp_path, capsys):
    out = tmp_path / "run"
    said = run(capsys, "train", "--out", out, *TINY, "--variant", "paper", "--when", "train").err
    assert "step 8 of 8: loss " in said and "tokens/s" in said and f"eval {out} measures it" in said
    printed = run(capsys, "eval", out, *PLAN, "--with", "paper", "--with", "entmax15", "--per-layer").out
    assert printed.startswith("insertion_sort: exact matches / right tokens, %") and "3*" in printed
    assert "paper (train only), paper in layer 1 at test" in printed and "paper (train only), entmax15 at test" in printed
    found = json.loads((out / "results.json").read_text())
    assert found["kind"] == "clrs" and found["provenance"]["command"].startswith(f"whet-clrs eval {out}")
    assert [len(size["variants"]) for size in found["tasks"][0]["sizes"]] == [7, 7]
    assert json.loads(run(capsys, "eval", out, *PLAN, "--json").out)["runs"][0]["step"] == 8
    refused(capsys, "eval", out, *PLAN, "--with", "paprika", saying="paprika: neither a normalizer nor a rule")
    refused(capsys, "eval", out, "--eval-sizes", "1", "--samples", "1", saying="the generator makes no insertion_sort of this size")


def test_a_sweep_goes_on(tmp_path, capsys):
    line = ["sweep", "--out", tmp_path / "sweep", *TINY, *PLAN, "--variants", "softmax,learned:log-power", "--seeds", "0-1"]
    printed = run(capsys, *line).out
    folders = sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert folders == [f"{name}-{seed}" for name in ("learned-log-power", "softmax") for seed in (0, 1)]
    found = json.loads((tmp_path / "sweep/results.json").read_text())
    first = found["tasks"][0]["sizes"][0]["variants"]
    assert {one["variant"]: one["runs"] for one in first} == {"softmax": 2, "learned log-power": 2}
    assert all(("against_softmax" in one) == (one["variant"] != "softmax") for one in first)
    assert all("against_softmax" in one for one in first if one["variant"] != "softmax")
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint.safetensors")}
    assert run(capsys, *line).out == printed
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint.safetensors")}
    compared = run(capsys, "report", tmp_path / "sweep", "--out", tmp_path / "compared").out
    assert sorted(compared.splitlines()) == sorted(printed.splitlines()) and (tmp_path / "compared/results.json").exists()
    # The file of a run stands for its folder; that of another recipe doesn't.
    shutil.rmtree(tmp_path / "sweep/softmax-1")
    assert run(capsys, *line).out == printed and not (tmp_path / "sweep/softmax-1").exists()
    (tmp_path / "sweep/softmax-0.json").write_text("{}")
    shutil.rmtree(tmp_path / "sweep/softmax-0")
    assert run(capsys, *line).out == printed and (tmp_path / "sweep/softmax-0/checkpoint.safetensors").exists()


def test_a_quick_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quick, "RECIPE", Recipe(sizes=(3,), width=16, layers=1, heads=2, hidden=16, batch=4, steps=4, warmup=1))
    monkeypatch.setattr(quick, "SIZES", (3, 5))
    captured = run(capsys, "--quick", "--out", tmp_path / "quick")
    assert "softmax, log-length:16 at test" in captured.out and "sorting with paper: step 4 of 4" in captured.err
    assert "results.json has the numbers, no page: the whet command" in captured.err
    assert json.loads((tmp_path / "quick/results.json").read_text())["provenance"]["command"].startswith("whet-clrs --quick")


def test_wrong_use(tmp_path, capsys):
    refused(capsys, code=2, saying="give a command, or --quick")
    refused(capsys, "train", code=2, saying="--out")
    refused(capsys, "train", "--out", tmp_path, "--sizes", "a-b", code=2, saying="list of numbers")
    refused(capsys, "train", "--out", tmp_path, "--algorithm", "bogosort", saying="bogosort: no algorithm of CLRS-Text")
    refused(capsys, "train", "--out", tmp_path, "--variant", "learned:all", saying="no length scale is called 'all'")
    refused(capsys, "eval", tmp_path / "none", saying="no such file; give the folder of a run")
    refused(capsys, "report", tmp_path, saying="holds no evaluated run")
    refused(capsys, "generate", "--split", "val", "--sizes", "4", saying="--split has its own sizes")


def test_a_full_disk(tmp_path, capsys, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(capsys, "train", "--out", tmp_path / "run", *TINY, saying="can't be written (No space left on device)")
    assert not any(path.is_file() for path in (tmp_path / "run").iterdir())


def test_names_of_variants():
    assert variants.variant("softmax") == {"sharpening": Sharpening()}
    assert variants.variant("paper", (1,), None) == {"sharpening": Sharpening("paper", layers=(1,))}
    assert variants.variant("entmax:1.3") == {"sharpening": Sharpening("none", "entmax:1.3")}
    assert variants.variant("learned:ssmax") == {"learned": "ssmax"}
    assert variants.file_name("log-length:32,1.5") == "log-length-32-1.5"
    with pytest.raises(ClrsError, match="tanh: neither"):
        variants.sharpening("tanh")
    assert options.sizes("4,6-8,20-40:10") == [4, 6, 7, 8, 20, 30, 40]
