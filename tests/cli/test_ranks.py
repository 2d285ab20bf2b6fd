"""`whet reproduce` and `whet eval` shared out among ranks: the same files, and no rank that waits for a dead one."""

import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from command import SANITIZED, WHET, names, refused, run

SMALL = ["--seeds", 3, "--steps", 2300, "--sizes", "16,64", "--sets", 16, "--batch", 4, "--items", "5..6", "--no-calibration",
         "--threads", 1]
RESULTS = ["results.json", "tables.md", "tables.csv", "report.html"]
LAUNCHERS = ("OMPI_", "PMI", "PMIX_", "SLURM_")
ALONE = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
MPIRUN = shutil.which("mpirun")


def mpirun(ranks, *arguments):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [MPIRUN, "--oversubscribe", "--bind-to", "none", *root, "-n", str(ranks), WHET, *map(str, arguments)]


def start(command, rank=None, ranks=None, **variables):
    """One process; with a rank, as a launcher without a watch over its ranks would start it."""
    launcher = {} if rank is None else {"PMI_RANK": str(rank), "PMI_SIZE": str(ranks)}
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**ALONE, **launcher, **variables})


def start_all(ranks, *arguments, **variables):
    return [start([WHET, *arguments], rank, ranks, **variables) for rank in range(ranks)]


def content(folder):
    """Results and runs, byte for byte."""
    files = [folder / name for name in RESULTS] + sorted(path for path in folder.glob("seed-*/*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process writes, in a folder called `it`: its name is in the results."""
    parent = tmp_path_factory.mktemp("alone")
    result = run("reproduce", "it", *SMALL, cwd=parent)
    assert result.returncode == 0, result.stderr
    return content(parent / "it")


@pytest.mark.parametrize("ranks", [2, 4])  # with four, one has nothing to do
def test_any_number_of_ranks_writes_the_same_files(alone, here, ranks):
    processes = start_all(ranks, "reproduce", "it", *SMALL)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, outputs
    assert all(out == "" and err == "" for out, err in outputs[1:])
    assert content(here / "it") == alone
    assert names(here / "it") == sorted([*RESULTS, "seed-0", "seed-1", "seed-2"])


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_mpirun_does(alone, here):
    process = start(mpirun(3, "reproduce", "it", *SMALL))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert content(here / "it") == alone


def test_eval_is_shared_out_too(alone, here):
    for seed in range(3):
        assert run("train", f"run-{seed}", "--seed", seed, "--steps", 300, "--batch", 4, "--items", "5..6").returncode == 0
    runs = [f"run-{seed}" for seed in range(3)]
    options = ["--sizes", "16,64", "--sets", 16, "--no-calibration", "--threads", 1, "--out", "it"]
    one = run("eval", *runs, *options)
    assert one.returncode == 0, one.stderr
    wanted = {name: (here / "it" / name).read_bytes() for name in RESULTS}
    before = {run: names(run) for run in runs}
    processes = start_all(2, "eval", *runs, *options)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert {name: (here / "it" / name).read_bytes() for name in RESULTS} == wanted
    assert {run: names(run) for run in runs} == before and names("it") == sorted(RESULTS)


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_miss_one_that_is_killed(here, victim):
    """Without mpirun's watch: by its silence, within the time that is set and a few seconds."""
    processes = start_all(3, "reproduce", "it", *SMALL[:2], "--steps", 500000, *SMALL[4:], WHET_RANK_TIMEOUT="3")
    time.sleep(2 if SANITIZED else 1)
    processes[victim].kill()
    begin = time.monotonic()
    for rank, process in enumerate(processes):
        _, err = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL if rank == victim else process.returncode != 0
        if rank != victim:
            assert f"rank {victim} of 3 gave no sign of life for 3 s. Run the same command again: it resumes\n" in err
    assert time.monotonic() - begin < 15


def test_ranks_hear_of_one_that_fails(here):
    """A rank that can't write its run says why; the others say which it was."""
    (here / "it").mkdir()
    (here / "it/seed-1").write_text("in the way")
    processes = start_all(2, "reproduce", "it", *SMALL[:2], "--steps", 500000, *SMALL[4:])
    begin = time.monotonic()
    outputs = [process.communicate(timeout=60)[1] for process in processes]
    assert all(process.returncode != 0 for process in processes)
    assert "seed-1" in outputs[1]
    assert "rank 1 of 2 failed; its own message says why. Run the same command again: it resumes\n" in outputs[0]
    assert time.monotonic() - begin < 20


def kill_and_resume(folder, alone, delay, draw):
    """Kills a random rank under mpirun at a random moment; then the same command ends in the same bytes."""
    command = mpirun(3, "reproduce", "it", *SMALL)
    process = start(command)
    time.sleep(delay)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    if children:
        os.kill(int(draw.choice(children)), signal.SIGKILL)
        begin = time.monotonic()
        process.communicate(timeout=60)
        ended = time.monotonic() - begin
        assert ended < 30, f"{ended:.1f} s until mpirun ended the others"
    else:  # done before
        process.communicate(timeout=60)
    again = start(command)
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert content(folder / "it") == alone
    return bool(children)


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_killed_ranks_resume(alone, here):
    """A few; WHET_KILLS=50 for more."""
    draw = random.Random(1)
    for _ in range(int(os.environ.get("WHET_KILLS", "3"))):
        kill_and_resume(here, alone, draw.uniform(0.3, 2.5), draw)
        shutil.rmtree(here / "it")


def test_wrong_ranks_are_told(here):
    wrong = {**ALONE, "PMI_RANK": "2", "PMI_SIZE": "2"}
    refused(2, "reproduce", "it", env=wrong, saying="PMI_RANK: is '2', must be a number from 0 to 1")
    two = {**ALONE, "PMI_RANK": "0", "PMI_SIZE": "2"}
    refused(2, "train", "it", env=two, saying="ranks: are 2, but this trains one head")
    refused(2, "reproduce", "it", env={**two, "WHET_RANK_TIMEOUT": "soon"}, saying="WHET_RANK_TIMEOUT: is 'soon'")
