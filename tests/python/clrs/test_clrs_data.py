"""Problems against dm-clrs's own generator and against texts rebuilt from random numbers alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whet.clrs import data
from whet.clrs.errors import ClrsError
from whet.clrs.official import tables
from whet.clrs.tokens import Tokens
from whet.clrs.workers import Published, Training, Workers

HERE = Path(__file__).parent


def python(*arguments, **options):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


def test_every_algorithm_as_the_official_generator_has_it(problems):
    printed = python(HERE / "official_samples.py", 5, 2, 3)
    assert printed.returncode == 0, printed.stderr
    official = json.loads(printed.stdout)
    assert len(official) == 60
    for (algorithm, hints), found in problems.items():
        assert [list(one[2:]) for one in found] == official[f"{algorithm} {hints}"], algorithm


def cut(values):
    return np.trunc(np.asarray(values) * 1000) / 1000


def listed(values):
    return f"[{' '.join(str(value) for value in values)}]"


@pytest.fixture(scope="module")
def of_seed_14():
    """Problems of size 9, seed 14, by algorithm."""
    names = ["insertion_sort", "minimum", "binary_search", "find_maximum_subarray_kadane", "topological_sort"]
    with Workers(Published([(name, 9, 14) for name in names], 4, False)) as found:
        return dict(zip(names, found))


def test_sorting_from_random_numbers(of_seed_14):
    random = np.random.RandomState(14)
    for problem in of_seed_14["insertion_sort"]:
        key = cut(random.uniform(0, 1, 9))
        assert problem.question == f"insertion_sort:\nkey: {listed(key)}\npred:\n"
        assert problem.answer == f"{listed(sorted(key))}\n\n"


def test_searching_from_random_numbers(of_seed_14):
    random = np.random.RandomState(14)
    for problem in of_seed_14["minimum"]:
        key = cut(random.uniform(0, 1, 9))
        assert (problem.question, problem.answer) == (f"minimum:\nkey: {listed(key)}\nmin:\n", f"{key.argmin()}\n\n")
    random = np.random.RandomState(14)
    for problem in of_seed_14["binary_search"]:
        key = cut(np.sort(random.uniform(0, 1, 9)))
        target = cut(random.uniform(0, 1))
        assert problem.question == f"binary_search:\nkey: {listed(key)}, target: {target}\nreturn:\n"
        assert problem.answer == f"{min(np.searchsorted(key, target), 8)}\n\n"
    random = np.random.RandomState(14)
    for problem in of_seed_14["find_maximum_subarray_kadane"]:
        key = cut(random.uniform(-1, 1, 9))
        first, last = map(int, problem.answer.split(", "))
        sums = [key[i:j + 1].sum() for i in range(9) for j in range(i, 9)]
        assert f"key: {listed(key)}\n" in problem.question and key[first:last + 1].sum() == pytest.approx(max(sums))


def test_an_order_that_respects_its_edges(of_seed_14):
    for problem in of_seed_14["topological_sort"]:
        text = problem.question.split("A: ")[1].split("\n")[0].replace(" ", ",").replace(",,", ",")
        graph = np.array(json.loads(text))
        after, first = problem.answer.rsplit(", ", 1)
        following = json.loads(after.replace(" ", ","))
        order = [int(first)]
        while following[order[-1]] != order[-1]:
            order.append(following[order[-1]])
        place = {node: i for i, node in enumerate(order)}
        assert all(place[a] < place[b] for a, b in zip(*graph.nonzero()) if a in place and b in place)


def test_published_tables():
    train, val = tables("train"), tables("val")
    assert set(train.sizes) == set(val.sizes) == set(data.algorithms()) and len(train.sizes) == 30
    assert train.sizes["insertion_sort"] == list(data.TRAIN_SIZES) and train.sizes["bridges"] == [4, 5]
    assert val.sizes["minimum"] == list(range(4, 65)) and val.sizes["insertion_sort"] == list(range(4, 26))
    assert (train.samples, train.seeds) == (10_000, [0])
    assert (val.samples, tuple(val.seeds)) == (data.VAL_SAMPLES, data.VAL_SEEDS)


_CLEAN = """
import sys
from whet.clrs.official import official
before = set(sys.modules)
found = official()
left = [name for name in sys.modules if name.split(".")[0] in ("clrs", "tensorflow", "haiku", "torch")]
tensorflow = sys.modules.get("clrs._src.probing", found.samplers.probing).tf
print(left, getattr(tensorflow, "real", False), "pred" in found.specs.SPECS["insertion_sort"])
"""


def test_nothing_stands_in_afterwards():
    assert python("-c", _CLEAN).stdout == "[] False True\n"


def test_a_real_tensorflow_is_used(tmp_path):
    (tmp_path / "tensorflow.py").write_text("real = True\nclass Tensor: pass\n")
    printed = python("-c", _CLEAN, env={"PYTHONPATH": str(tmp_path), "PATH": ""})
    assert printed.stdout == "['tensorflow'] True True\n", printed.stderr


SOURCE = data.Source(("insertion_sort", "minimum"), (3, 4, 5), False, 3, 7)


def test_the_same_batches_whatever_the_workers():
    settings = Tokens("characters").settings()
    found = []
    for workers, first in ((1, 0), (3, 0), (2, 4)):
        with Workers(Training(SOURCE, settings, first), workers) as batches:
            found.append([one for one, _ in zip(batches, range(10 - first))])
    alone, three, later = found
    for one, other in [*zip(alone, three), *zip(alone[4:], later)]:
        assert (one.algorithm, one.size) == (other.algorithm, other.size)
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.ends, other.ends)
    assert {one.algorithm for one in alone} == {"insertion_sort", "minimum"} and {one.size for one in alone} <= {3, 4, 5}
    texts = {one.tokens.tobytes() for one in alone}
    assert len(texts) == 10


def test_what_the_generator_cannot_make():
    with Workers(Published([("kmp_matcher", 2, 0)], 1, False)) as found, \
            pytest.raises(ClrsError, match="size 2: the generator makes no kmp_matcher of this size"):
        list(found)
    with pytest.raises(ClrsError, match="bogo_sort: no algorithm of CLRS-Text; there are activity_selector, "):
        data.check_algorithms(["minimum", "bogo_sort"])
    with pytest.raises(ClrsError, match="workers: is 0"):
        Workers(Published([], 1, False), 0)


def test_a_worker_that_is_killed():
    with Workers(Training(SOURCE, Tokens("characters").settings(), 0)) as batches:
        made = iter(batches)
        next(made)
        batches._processes[0].kill()
        with pytest.raises(ClrsError, match="a process that makes problems ended"):
            for _ in made:
                pass


def test_generate(tmp_path):
    out = tmp_path / "some.jsonl"
    line = ["-m", "whet.clrs.command", "generate", "--algorithm", "minimum,dfs", "--sizes", "4,6", "--samples", "2", "--hints",
            "--seed", "3"]
    printed = python(*line)
    lines = [json.loads(text) for text in printed.stdout.splitlines()]
    assert [(one["algo_name"], one["length"]) for one in lines] == [(name, size) for name in ("minimum", "dfs")
                                                                    for size in (4, 6) for _ in range(2)]
    assert all(one["text"] == one["question"] + one["answer"] and one["use_hints"] and one["seed"] == 3 for one in lines)
    assert "initial_trace: " in lines[0]["text"] and " | " in lines[0]["answer"]
    assert python(*line, "--out", out).returncode == 0 and out.read_text() == printed.stdout
    refused = python(*line, "--out", tmp_path / "none" / "some.jsonl")
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "give another --out" in refused.stderr
