"""Scores against answers written by hand, evaluation of a run in pieces, and intervals against formulas."""

import json
import math

import numpy as np
import pytest
import torch
from whet.clrs import evaluation, report, summary
from whet.clrs.data import Problem
from whet.clrs.errors import ClrsError
from whet.clrs.evaluation import Piece, Plan, baselines, evaluate, is_exact, measure, scored, shares, stored
from whet.clrs.model import Sharpening
from whet.clrs.summary import Result
from whet.clrs.sweep import evaluated, remember
from whet.clrs.training import Recipe, load, train

PAPER = Sharpening("paper")


def test_exact_is_about_the_final_field():
    problem = Problem("dfs", 2, "dfs:\n...", "[0 1], [1 1] | [0 0]\n\n")
    assert problem.final == "[0 0]"
    assert is_exact("[9 9] | [0 0]\n\n", problem) and is_exact("[0 0]\n\n", problem)
    assert not is_exact("[0 1], [1 1] | [0 0]", problem)  # goes on
    assert not is_exact("[0 1], [1 1] | [0 1]\n\n", problem) and not is_exact("\n\n", problem)


def test_scores_by_hand():
    found = scored([True, False, False], [[5, 6, 7, 1], [5, 9, 1], [5, 6, 6, 1, 1]], [[5, 6, 7, 1], [5, 6, 1], [4, 6, 6, 1]])
    assert found == {"exact": "100", "right": [4, 2, 3], "tokens": [4, 3, 4], "errors": [0.33333, 0.33333, 0.0, 0.0]}
    assert shares(found) == {"exact": 1 / 3, "tokens": 9 / 11}
    long = scored([False], [[1] * 50], [[1] * 100])
    assert long["right"] == [50] and len(long["errors"]) == 64 and long["errors"][:30] == [0.0] * 30 \
        and long["errors"][-30:] == [1.0] * 30


def test_baselines(problems):
    from whet.clrs.tokens import Tokens

    tokens = Tokens("characters")
    sorting = problems["insertion_sort", False]
    ordered = sorting[0]._replace(question=f"insertion_sort:\nkey: {sorting[0].answer.strip()}\npred:\n")
    found = baselines(tokens, [ordered, sorting[1]])
    assert found["copy"]["exact"] == 0.5 and found["chance"]["exact"] == 0 and 0 < found["chance"]["tokens"] < 1
    index = [Problem("minimum", 4, "minimum:\nkey: [0.1 0.2]\nmin:\n", f"{answer}\n\n") for answer in (0, 0, 1)]
    assert baselines(tokens, index)["chance"]["exact"] == 1 / 3 and baselines(tokens, index)["copy"]["exact"] == 0


@pytest.fixture(scope="module")
def run(problems, tmp_path_factory):
    """A run that has begun to learn lists of two."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    from whet.clrs import training
    from whet.clrs.tokens import vocabulary_of

    with pytest.MonkeyPatch.context() as patch:
        texts = [one.question + one.answer for one in problems["insertion_sort", False]]
        patch.setattr(training, "_vocabulary", lambda recipe: vocabulary_of("numbers", recipe.algorithms, texts))
        train(folder, Recipe(sizes=(2,), width=32, layers=2, heads=2, hidden=32, batch=16, steps=150, rate=1e-2, warmup=10))
    return load(folder)


PLAN = Plan((2, 5), [Sharpening(), PAPER, Sharpening("paper", layers=(1,))], seeds=(3, 14), samples=3)


def test_pieces_are_kept(run, monkeypatch):
    said = []
    pieces = evaluate(run, PLAN, progress=lambda done, all, piece: said.append((done, all)))
    assert [(one.size, one.setting) for one in pieces] == [(size, setting) for size in (2, 5) for setting in PLAN.settings]
    assert said == [(i + 1, 6) for i in range(6)]
    assert all(len(one.found["exact"]) == 6 and 0 <= one.found["forced"] <= 1 for one in pieces)
    assert np.shape(pieces[0].found["entropy"]) == (2, 2) and run.model.sharpening == Sharpening()
    first, sharp = pieces[0].found, pieces[1].found
    assert first["entropy"] == first["sharp_entropy"] and sharp["sharp_entropy"][0] < sharp["entropy"][0]
    damaged = sorted((run.folder / evaluation.FOLDER).iterdir())[0]
    damaged.write_text(damaged.read_text()[:40])
    measured = []
    monkeypatch.setattr(evaluation, "measure", lambda *given: measured.append(1) or measure(*given))
    assert evaluate(run, PLAN) == pieces and len(measured) == 1
    assert evaluate(run, PLAN) == pieces and len(measured) == 1
    more = PLAN._replace(sizes=(2,), settings=[PAPER, Sharpening("fixed:2")])
    assert evaluate(run, more)[0] == pieces[1] and len(measured) == 2


def test_other_settings_at_some_sizes(run):
    plan = PLAN._replace(others_at=[5])
    pieces = evaluate(run, plan)
    assert [(one.size, one.setting) for one in pieces] == [(2, PLAN.settings[0]), *((5, one) for one in PLAN.settings)]
    assert stored(run, plan) == pieces


def test_greedy_answers_and_forced_tokens_agree(run):
    """What the model answers, found token by token without a cache, is exact; with another number or no end it isn't."""
    model, tokens = run.model, run.tokens
    random = np.random.default_rng(0)
    right, wrong = [], []
    for _ in range(20):
        key = random.integers(0, 1001, 2) / 1000
        question = f"insertion_sort:\nkey: [{key[0]} {key[1]}]\npred:\n"
        ids = tokens.encode(question)
        answer = []
        with torch.no_grad():
            while len(answer) < 12 and tokens.end not in answer:
                answer.append(int(model(torch.tensor([ids + answer]))[0, -1].argmax()))
        if answer[-1] == tokens.end:
            right.append(Problem("insertion_sort", 2, question, tokens.decode(answer)))
            wrong.append(right[-1]._replace(answer=f"0.777 {right[-1].answer}"))
    assert len(right) >= 10
    found = measure(model, tokens, [*right, *wrong], Sharpening())
    assert found["exact"] == "1" * len(right) + "0" * len(wrong)
    assert measure(model, tokens, right, Sharpening())["forced"] == 1 > found["forced"]


def test_entropy_by_layer(run, problems):
    """Against the weights of torch's own softmax, over the rows that answer."""
    problem = problems["insertion_sort", False][0]
    found = measure(run.model, run.tokens, [problem], Sharpening())
    question, answer = (run.tokens.encode(text) for text in problem[2:])
    rows = []

    def record(module, given, out):
        q, k, _ = module.inward(given[0]).unflatten(-1, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -math.inf)
        rows.append(torch.special.entr(torch.softmax(logits, -1)).sum(-1)[0, :, len(question) - 1:].mean(-1))

    handles = [block.attention.register_forward_hook(record) for block in run.model.blocks]
    with torch.no_grad():
        run.model(torch.tensor([(question + answer)[:-1]]))
    for handle in handles:
        handle.remove()
    np.testing.assert_allclose(found["entropy"], torch.stack(rows).numpy(), atol=2e-5)


def test_results_and_their_table(run, tmp_path):
    pieces = evaluate(run, PLAN)
    remember(run, PLAN)
    facts, results = evaluated([run.folder.parent])
    assert list(results[0].pieces) == pieces
    found = report.results("whet-clrs report", 1, facts, results)
    json.dumps(found, allow_nan=True)
    assert (found["schema"], found["version"], found["kind"]) == ("whet results", 1, "clrs")
    assert found["runs"][0]["variant"] == "softmax" and found["runs"][0]["metrics"][-1][0] == 150
    task = found["tasks"][0]
    assert (task["algorithm"], task["trained_sizes"], [one["size"] for one in task["sizes"]]) == ("insertion_sort", [2], [2, 5])
    own, paper, second = task["sizes"][0]["variants"]
    assert (own["setting"], paper["setting"], second["setting"]) == ("as trained", "paper", "paper in layer 1")
    assert own["exact"]["mean"] == pieces[0].found["exact"].count("1") / 6 and "against_softmax" not in own
    assert paper["against_softmax"]["exact"]["difference"] == pytest.approx(paper["exact"]["mean"] - own["exact"]["mean"], abs=2e-5)
    assert len(own["entropy"]) == 2 and len(own["errors"]) == 5
    printed = report.table(found)
    assert printed.startswith("insertion_sort: exact matches / right tokens, %; * trained sizes") and "2*" in printed
    assert "softmax, paper at test" in printed and "copy the input" in printed
    with pytest.raises(ClrsError, match="holds no evaluated run"):
        evaluated([tmp_path])


def test_tables_have_sizes_where_most_was_measured():
    def chosen(more):
        sizes = [{"size": size, "variants": ["softmax", *["paper"] * (size in more)]} for size in range(1, 100)]
        return [size["size"] for size in report._chosen(sizes, 12)]

    assert len(chosen([])) == 12 and chosen([])[::11] == [1, 99]
    assert len(chosen([31, 64])) == 12 and {1, 31, 64, 99} < set(chosen([31, 64]))
    assert len(chosen(range(40))) == 12  # too many to keep all


def result(variant, seed, exact, right=None):
    found = {"exact": "".join(str(int(one)) for one in exact), "right": right or [2] * len(exact), "tokens": [4] * len(exact),
             "errors": [0.5] * 4, "forced": 0.5, "baselines": {"chance": {}, "copy": {}}}
    setting = Sharpening() if variant == "softmax" else PAPER
    return Result("run", variant, seed, False, {"minimum": [4]}, [Piece("minimum", 8, setting, found)], setting)


def test_runs_are_the_samples(rng):
    exact = {(variant, seed): rng.random(200) < share for variant, shares in (("softmax", (0.5, 0.6, 0.4)), ("paper", (0.7, 0.7, 0.6)))
             for seed, share in enumerate(shares)}
    size = summary.tasks([result(*key, value) for key, value in exact.items()])[0]["sizes"][0]
    softmax, paper = size["variants"]
    means = [exact["softmax", seed].mean() for seed in range(3)]
    half = 4.30265 * np.std(means, ddof=1) / math.sqrt(3)
    assert softmax["runs"] == 3 and softmax["exact"]["mean"] == pytest.approx(np.mean(means), abs=1e-5)
    assert softmax["exact"]["high"] == pytest.approx(np.mean(means) + half, abs=2e-5)
    differences = [exact["paper", seed].mean() - means[seed] for seed in range(3)]
    error = np.std(differences, ddof=1) / math.sqrt(3)
    t = np.mean(differences) / error
    p = 1 - t / math.sqrt(2 + t * t)  # two degrees of freedom
    against = paper["against_softmax"]["exact"]
    assert against["difference"] == pytest.approx(np.mean(differences), abs=1e-5) and against["p"] == pytest.approx(p, rel=0.01)
    assert against["low"] == pytest.approx(np.mean(differences) - 4.30265 * error, abs=2e-5)
    assert paper["against_softmax"]["tokens"] == {"difference": 0, "low": 0, "high": 0, "p": 1}


def test_files_without_single_problems_give_the_same(rng):
    whole = [result(variant, seed, rng.random(50) < 0.5, rng.integers(0, 5, 50).tolist())
             for variant in ("softmax", "paper") for seed in range(3)]
    short = [one._replace(pieces=[piece._replace(found=summary.reduced(piece.found)) for piece in one.pieces]) for one in whole]
    assert summary.tasks(short) == summary.tasks(whole)
    alone, alone_short = (summary.tasks(some[:1])[0]["sizes"][0]["variants"] for some in (whole, short))
    assert alone == alone_short
    (_, paper), (_, paper_short) = (summary.tasks([some[0], some[3]])[0]["sizes"][0]["variants"] for some in (whole, short))
    assert "against_softmax" not in paper_short and paper_short == {name: paper[name] for name in paper_short}


def test_one_run_has_its_problems_for_samples(rng):
    softmax, paper = rng.random(400) < 0.5, rng.random(400) < 0.6
    size = summary.tasks([result("softmax", 0, softmax), result("paper", 0, paper)])[0]["sizes"][0]
    against = size["variants"][1]["against_softmax"]["exact"]
    error = np.std(paper.astype(float) - softmax, ddof=1) / 20
    assert against["high"] - against["difference"] == pytest.approx(1.966 * error, rel=0.01)
    assert size["variants"][0]["exact"]["low"] > 0.4
