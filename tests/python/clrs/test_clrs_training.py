"""Runs that go on, runs that are refused, and several processes."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from whet.clrs import files, training
from whet.clrs.errors import ClrsError
from whet.clrs.model import Sharpening
from whet.clrs.training import Recipe, load, train

TINY = {"sizes": (3, 4), "width": 16, "layers": 1, "heads": 2, "hidden": 16, "batch": 4, "steps": 10, "warmup": 2}


pytestmark = pytest.mark.usefixtures("ready_vocabulary")


class Killed(Exception):
    pass


def killed_at(step):
    def progress(now):
        if now.step >= step:
            raise Killed

    return progress


def metrics(folder):
    return (folder / files.METRICS).read_text()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run, with metrics and checkpoints as of `often`."""
    folder = tmp_path_factory.mktemp("runs") / "done"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.clrs.loop.METRICS_EVERY", 2)
        patch.setattr("whet.clrs.loop.CHECKPOINT_EVERY", 4)
        train(folder, Recipe(**TINY))
    return folder


def test_a_killed_run_ends_in_the_same_bits(done, tmp_path, often):
    assert [json.loads(line)["step"] for line in metrics(done).splitlines()] == [2, 4, 6, 8, 10]
    folder = tmp_path / "run"
    for step in (6, 8):  # after the checkpoint of 4, with lines ahead of it; at that of 8
        with pytest.raises(Killed):
            train(folder, Recipe(**TINY), progress=killed_at(step))
    (folder / f".{files.CHECKPOINT}.x7a").write_bytes(b"half of a che")  # of a process killed as it wrote
    with (folder / files.METRICS).open("a") as file:
        file.write('{"step": 9, "lo')  # as a crash of another writer might leave it
    train(folder, Recipe(**TINY), workers=2)
    assert metrics(folder) == metrics(done)
    assert (folder / files.CHECKPOINT).read_bytes() == (done / files.CHECKPOINT).read_bytes()
    train(folder, Recipe(**TINY))  # nothing left to do
    assert load(folder).step == 10 and not list(folder.glob(".checkpoint*"))


@pytest.mark.parametrize("changes", [
    {"sharpening": Sharpening("paper")}, {"sharpening": Sharpening("paper"), "when": "train"},
    {"sharpening": Sharpening("log-length:4"), "when": "test"}, {"learned": "log-power"}, {"dtype": "bfloat16"},
    {"sharpening": Sharpening(normalizer="entmax15"), "positions": "mix"}], ids=str)
def test_variants_train(changes, tmp_path, done):
    recipe = Recipe(**{**TINY, **changes, "steps": 3})
    train(tmp_path / "run", recipe)
    run = load(tmp_path / "run")
    assert run.recipe == recipe and run.model.sharpening == recipe.at_test
    assert recipe.in_training.plain == (recipe.when == "test" or recipe.sharpening.plain)
    assert recipe.at_test.plain == (recipe.when == "train" or recipe.sharpening.plain)
    assert recipe.variant.startswith({"both": recipe.sharpening.name}.get(recipe.when, f"{recipe.sharpening.name} (")) \
        or recipe.variant == "learned log-power"


def test_loss_falls(tmp_path):
    train(tmp_path, Recipe(**{**TINY, "steps": 120, "batch": 16, "rate": 1e-2}))
    lines = files.read_lines(tmp_path / files.METRICS)
    assert lines[-1]["loss"] < 0.85 * lines[0]["loss"]


def test_another_recipe_is_refused(done):
    with pytest.raises(ClrsError, match="holds a run whose rate is 0.003 where this one has 0.1; give another --out"):
        train(done, Recipe(**TINY, rate=0.1))


def copied(done, tmp_path, change):
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in (files.CONFIG, files.CHECKPOINT, files.METRICS):
        content = (done / name).read_bytes()
        (folder / name).write_bytes(change(name, content))
    return folder


def flipped(content):
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.parametrize("name, change, text", [
    (files.CHECKPOINT, flipped, "is damaged, its checksum differs"),
    (files.CHECKPOINT, lambda content: content[:1000], "is no safetensors file, or damaged"),
    (files.CHECKPOINT, lambda content: b"", "is no safetensors file, or damaged"),
    (files.CONFIG, lambda content: content.replace(b'"width": 16', b'"width": 32'), "is of another model, its "),
    (files.CONFIG, lambda content: content.replace(b'"width"', b'"breadth"'), "has the field breadth"),
    (files.CONFIG, lambda content: content[:50], "can't be read as JSON"),
    (files.CONFIG, lambda content: b"{}", "is none of whet clrs")], ids=str)
def test_damaged_and_foreign_runs(name, change, text, done, tmp_path):
    folder = copied(done, tmp_path, lambda one, content: change(content) if one == name else content)
    with pytest.raises(ClrsError, match=text) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_checkpoints_of_others(done, tmp_path):
    from safetensors.torch import save_file

    folder = copied(done, tmp_path, lambda one, content: content)
    save_file({"weight": torch.zeros(3)}, folder / files.CHECKPOINT)
    with pytest.raises(ClrsError, match="is no checkpoint of whet clrs"):
        load(folder)
    (folder / files.CHECKPOINT).unlink()
    with pytest.raises(ClrsError, match="no such file; train first"):
        load(folder)
    with pytest.raises(ClrsError, match="no such file"):
        load(tmp_path / "nothing")


def test_a_full_disk_loses_nothing(done, tmp_path, often, monkeypatch):
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        train(folder, Recipe(**TINY), progress=killed_at(4))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ClrsError, match="No space left on device.*make room"):
            train(folder, Recipe(**TINY))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    train(folder, Recipe(**TINY))
    assert metrics(folder) == metrics(done)


def test_one_process_per_folder(done):
    with files.locked(done, ".training-0") as alone:
        assert alone
        with pytest.raises(ClrsError, match="another process trains there"):
            train(done, Recipe(**TINY))


def test_an_infinite_loss(tmp_path):
    with pytest.raises(ClrsError, match=r"no longer finite at step \d+; try a lower --rate"):
        train(tmp_path, Recipe(**{**TINY, "rate": 1e30, "clip": 1e30, "warmup": 1, "steps": 40}))


@pytest.mark.parametrize("changes, text", [({"when": "now"}, "when: is 'now'"), ({"batch": 0}, "batch: is 0"),
                                           ({"algorithms": ("sort",)}, "sort: no algorithm"), ({"sizes": (0,)}, "sizes: have 0"),
                                           ({"heads": 3}, "width: is 16")])
def test_wrong_recipes(changes, text, tmp_path):
    with pytest.raises(ClrsError, match=text):
        train(tmp_path / "run", Recipe(**{**TINY, **changes}))
    assert not (tmp_path / "run" / files.CONFIG).exists()


def test_two_processes_as_one(tmp_path):
    """Equal losses at equal global batch, within what another order of sums makes of float32 over twelve steps."""
    recipe = Recipe(**{**TINY, "steps": 12})
    line = ["-m", "whet.clrs.command", "train", "--sizes", "3,4", "--width", "16", "--layers", "1", "--heads", "2", "--hidden",
            "16", "--batch", "4", "--steps", "12", "--warmup", "2", "--threads", "1"]
    launched = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
                               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *line, "--out",
                               str(tmp_path / "two")], capture_output=True, text=True, timeout=300)
    assert launched.returncode == 0, launched.stderr
    train(tmp_path / "one", recipe)
    one, two = (files.read_lines(tmp_path / name / files.METRICS)[-1] for name in ("one", "two"))
    assert load(tmp_path / "two").recipe == recipe and one["step"] == two["step"] == 12
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-3)
    weights = [load(tmp_path / name).model.state_dict() for name in ("one", "two")]
    for name in weights[0]:
        torch.testing.assert_close(weights[1][name], weights[0][name], atol=1e-3, rtol=1e-3)
    with pytest.raises(ClrsError, match="batch: is 4, must be a multiple of the 3 processes"):
        os.environ["WORLD_SIZE"] = "3"
        try:
            training.Group().rows(4)
        finally:
            del os.environ["WORLD_SIZE"]
