"""Attention over keys on several processes is attention over all keys, forward and backward. The processes of a group
start once and work through all cases; what they say comes back as text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).resolve().parent
CASES = ["rules", "options", "thresholds", "uneven", "blocks", "float64_and_bfloat16", "sharded_queries", "decoding", "disagreement",
         "one_key_at_all", "dtensors", "training"]


def run(tmp_path, processes, *names, expect=0):
    """What the processes wrote, in the order of their ranks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, HERE / "distributed_cases.py", str(rank), str(processes), tmp_path / "store",
                                 *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
               for rank in range(processes)]
    texts = [process.communicate(timeout=240)[0] for process in started]
    assert all(process.returncode == expect for process in started), "\n".join(texts)
    return texts


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_attention_over_all_keys(tmp_path, processes):
    for text in run(tmp_path, processes, *CASES):
        assert text.split() == CASES, text


def test_a_process_that_dies_ends_the_others(tmp_path):
    """With an error, within the group's timeout, instead of waiting for ever."""
    texts = run(tmp_path, 3, "death", expect=7)
    assert sum("ended: " in text for text in texts) == 2, texts


def test_the_example_has_the_same_losses_for_any_number_of_processes():
    example = HERE.parents[2] / "examples/context_parallel.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    lines = []
    for processes in (1, 2):
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), example,
                "--tokens", "64", "--steps", "25"]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        lines.append(done.stdout.rsplit(",", 1)[0])
    assert lines[0] == lines[1] and lines[0].startswith("step 25: loss "), lines
