"""whet horizon: the bounds by their formulas, and the theorem head by head."""

import json
import math

import numpy as np
import pytest
from command import ok, refused


def horizon(*arguments):
    return json.loads(ok("horizon", *arguments, "--json"))


def table(text):
    """The cells of every line that is a row of a table, the header first, without the rule below it."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= set("-:")]


# ---- one head, by its spread


def test_help_teaches():
    text = ok("horizon", "--help")
    for word in ["--spread", "--weight", "--beta", "--sizes", "--theorem", "--layers", "--heads", "--vocabulary", "--seed",
                 "--json", "Examples:", "whet horizon --spread 6", "1 / (1 + (n - 1) e^-d)"]:
        assert word in text
    assert "horizon" in ok("--help")


@pytest.mark.parametrize("spread,weight,beta", [(6, 0.5, 1), (0, 0.25, 1), (2.5, 0.9, 3), (12, 0.01, 0.5)])
def test_values(spread, weight, beta):
    result = horizon("--spread", spread, "--weight", weight, "--beta", beta)
    d = spread * beta
    assert [result[name] for name in ("spread", "weight", "beta")] == [spread, weight, beta]
    assert result["horizon"] == pytest.approx(1 + math.exp(d) * (1 / weight - 1), rel=1e-12)
    assert result["log10_horizon"] == pytest.approx(math.log10(result["horizon"]), rel=1e-12)
    assert [row["keys"] for row in result["sizes"]] == [2**i for i in range(4, 15)]
    for row in result["sizes"]:
        n = row["keys"]
        assert row["largest_weight"] == pytest.approx(1 / (1 + (n - 1) * math.exp(-d)), rel=1e-12)
        assert row["paper_upper"] == pytest.approx(min(1, math.exp(d) / n), rel=1e-12)
        assert row["paper_lower"] == pytest.approx(math.exp(-d) / n, rel=1e-12)
        assert (row["largest_weight"] >= weight) == (n <= result["horizon"])


def test_table():
    text = ok("horizon", "--spread", 6, "--sizes", "16,1000")
    assert "horizon  404.429 keys: beyond, no key can have a weight above 0.5\n" in text
    assert table(text) == [["keys", "largest weight", "paper's upper", "paper's lower"],
                           ["16", "0.9642", "1", "0.0001549"],
                           ["1000", "0.2877", "0.4034", "2.479e-06"]]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert "spread   6 at beta 2\n" in ok("horizon", "--spread", 6, "--beta", 2)


def test_horizons_too_far_for_a_number():
    result = horizon("--spread", 1000, "--weight", 0.25, "--sizes", "2,9007199254740992")
    assert result["horizon"] is None
    assert result["log10_horizon"] == pytest.approx((1000 + math.log(3)) / math.log(10))
    assert [row["keys"] for row in result["sizes"]] == [2, 2**53]
    assert "horizon  10^434.8 keys" in ok("horizon", "--spread", 1000, "--weight", 0.25)
    assert "horizon  10^434294 keys" in ok("horizon", "--spread", 1e6)


def test_wrong_use():
    refused(2, "horizon", saying="--spread D or --theorem")
    refused(2, "horizon", "--spread", saying="--spread")
    refused(2, "horizon", "--spread", "wide", saying="--spread")
    for spread in (-1, "nan", "inf"):
        refused(2, "horizon", "--spread", spread, saying="spread: ")
    for weight in (0, -1, 1.5, "nan"):
        refused(2, "horizon", "--spread", 6, "--weight", weight, saying="weight: is ")
        refused(2, "horizon", "--theorem", "--weight", weight, saying="weight: is ")
    for beta in (0, -1, "inf", "nan"):
        refused(2, "horizon", "--spread", 6, "--beta", beta, saying="beta: ")
        refused(2, "horizon", "--theorem", "--beta", beta, saying="beta: ")
    for sizes in ("0", "16,-1", "9007199254740993"):
        refused(2, "horizon", "--spread", 6, "--sizes", sizes, saying="--sizes: ")
    for sizes in ("16,many", "1.5", "99999999999999999999"):
        refused(2, "horizon", "--spread", 6, "--sizes", sizes, saying="--sizes")
    refused(2, "horizon", "--spread", 6, "--sizes", "16", "32", saying="RUN excludes --spread")
    refused(2, "horizon", "--spread", 6, "--theorem", saying="excludes")


# ---- the theorem


def test_theorem():
    result = horizon("--theorem", "--layers", 2, "--heads", 2, "--seed", 5, "--weight", 0.9,
                     "--sizes", "16,1024,16777216,1073741824")
    assert result["model"] == {"vocabulary": 16, "width": 64, "layers": 2, "heads": 2, "seed": 5, "beta": 1.0}
    assert [(head["layer"], head["head"]) for head in result["heads"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for head in result["heads"]:
        assert [row["keys"] for row in head["sizes"]] == [16, 1024, 2**24, 2**30]
        for row in head["sizes"]:
            n, spread = row["keys"], row["spread"]
            assert row["bound"] == pytest.approx(1 / (1 + (n - 1) * math.exp(-spread)), rel=1e-9)
            assert 1 / n <= row["largest_weight"] <= row["bound"] <= row["implied_bound"] <= 1
            assert 0 < spread < head["implied_spread"]
        expected = (head["implied_spread"] + math.log(1 / 9)) / math.log(10)
        assert head["log10_implied_horizon"] == pytest.approx(expected, rel=1e-9)
        weights = [row["largest_weight"] for row in head["sizes"]]
        assert weights == sorted(weights, reverse=True)
        assert math.log(weights[3] / weights[2]) / math.log(64) == pytest.approx(-1, abs=1e-3)


def test_theorem_table():
    arguments = ["--theorem", "--layers", 2, "--heads", 2, "--sizes", "16,4096"]
    text, result = ok("horizon", *arguments), horizon(*arguments)
    rows = np.array(table(text)).reshape(2, 6, 3)
    for layer in range(2):
        assert rows[layer, :, 0].tolist() == [f"layer {layer}, keys", "16", "4096", "largest spread",
                                              "spread its weights allow", "horizon its weights imply"]
        for head in range(2):
            numbers = result["heads"][2 * layer + head]
            cells = rows[layer, :, 1 + head]
            assert cells[0] == f"head {head}"
            for cell, row in zip(cells[1:3], numbers["sizes"]):
                weight, bound = map(float, cell.split(" <= "))
                assert weight == pytest.approx(row["largest_weight"], rel=6e-3)
                assert bound == pytest.approx(row["bound"], rel=6e-3)
            assert float(cells[3]) == pytest.approx(max(row["spread"] for row in numbers["sizes"]), rel=1e-3)
            assert float(cells[4]) == pytest.approx(numbers["implied_spread"], rel=1e-3)
            assert float(cells[5].removeprefix("10^")) == pytest.approx(numbers["log10_implied_horizon"], rel=1e-2)


def test_theorem_options_count():
    def first(*arguments):
        return horizon("--theorem", "--layers", 1, "--sizes", "100", *arguments)["heads"][0]["sizes"][0]

    default = first()
    assert default == first("--seed", 0, "--heads", 4, "--vocabulary", 16, "--beta", 1)
    for option, value in [("--seed", 1), ("--heads", 8), ("--vocabulary", 32), ("--beta", 2)]:
        assert first(option, value) != default
    assert first("--beta", 2)["spread"] == pytest.approx(2 * default["spread"], rel=1e-9)
    assert len(horizon("--theorem", "--layers", 4, "--heads", 1)["heads"]) == 4


def test_theorem_wrong_use():
    refused(2, "horizon", "--theorem", "--layers", 0, saying="layers: is 0, must be 1 to 8")
    refused(2, "horizon", "--theorem", "--heads", 3, saying="heads: is 3, must be a divisor of 64")
    refused(2, "horizon", "--theorem", "--vocabulary", 1, saying="vocabulary: is 1, must be 2 to 1024")
    refused(2, "horizon", "--theorem", "--seed", -1, saying="--seed: is -1, must be 0 or more")
    assert horizon("--theorem", "--seed", 2**64 - 1, "--sizes", "16")["model"]["seed"] == 2**64 - 1
    refused(2, "horizon", "--theorem", "--sizes", 1, saying="sizes: 1 tokens, must be 2")
    for option in ("--layers", "--heads", "--vocabulary", "--seed"):
        refused(2, "horizon", "--spread", 6, option, 2, saying=f"{option} requires --theorem")
