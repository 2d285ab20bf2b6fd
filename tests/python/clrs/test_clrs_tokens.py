"""Texts of every algorithm to tokens and back."""

import numpy as np
import pytest
from whet.clrs.errors import ClrsError
from whet.clrs.tokens import Tokens, vocabulary_of


def texts(problems, *names):
    return [one.question + one.answer for (name, _), some in problems.items() for one in some if not names or name in names]


@pytest.mark.parametrize("kind", ["numbers", "characters"])
def test_every_text_comes_back(problems, kind):
    everything = texts(problems)
    tokens = vocabulary_of(kind, {name for name, _ in problems}, everything)
    for text in everything:
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text and ids[-1] == tokens.end and tokens.end not in ids[:-1]
    assert Tokens.of(tokens.settings()).encode(everything[0]) == tokens.encode(everything[0])


def test_one_token_per_number(problems):
    tokens = vocabulary_of("numbers", ["insertion_sort"], texts(problems, "insertion_sort"))
    for problem in problems["insertion_sort", False]:
        assert len(tokens.encode(problem.answer)) == 5 + 3  # brackets, end
        assert len(tokens.encode(problem.question)) == 5 + len(["insertion_sort", ":\n", "key", ": ", "[", "]", "\n", "pred", ":\n"])
    assert tokens.decode(tokens.encode("[0.5 0.12 1.0]\n\n")) == "[0.5 0.12 1.0]\n\n"
    assert len(tokens) < 1001 + 110
    with_integers = vocabulary_of("numbers", ["binary_search"], texts(problems, "binary_search"))
    assert len(with_integers.encode("17\n\n")) == 2 and len(with_integers.encode("300\n\n")) == 4


def test_texts_that_no_problem_has(rng):
    tokens = Tokens("numbers", ["key", ": "], (0, 1000), (0, 9))
    parts = ["0.5", "0.50", "5", "12", "-3", " ", "  ", ".", "key", "keys", "\n", "\n\n", "[", "]]", ", ", "-", "0.1234"]
    for _ in range(2000):
        text = "".join(rng.choice(parts, rng.integers(0, 9)))
        assert tokens.decode(tokens.encode(text)) == text
    with pytest.raises(ClrsError, match="has the character 'é'"):
        tokens.encode("é")
    with pytest.raises(ClrsError, match="tokens: are 'words'"):
        Tokens("words")


def test_numbers_have_neighbouring_tokens():
    tokens = Tokens("numbers", (), (-1000, 1000), (0, 3))
    ids = tokens.encode("[-1.0 0.0 0.001 0.999]")[1:-1]
    assert np.diff(ids).tolist() == [1000, 1, 998]


def test_values_of_numbers():
    tokens = Tokens("numbers", (), (-1000, 1000), (0, 3))
    values = tokens.fractions()
    assert len(values) == 2001 and tokens.decode(list(values)[:2]) == "-1.0 -0.999" and list(values.values())[1500] == 0.5
    assert tokens.encode("3")[0] not in values and Tokens("characters").fractions() == {}


@pytest.mark.parametrize("tokens", [Tokens("characters"), Tokens("numbers", [":\n", "pred"])], ids=lambda one: one.kind)
def test_tokens_that_end_a_line(tokens):
    """The answer is on the fourth line of a problem, however it is cut into tokens."""
    ids = tokens.encode("insertion_sort:\nkey: [0.1 0.2]\npred:\n")
    lines = np.isin(ids, tokens.breaks())
    assert lines.sum() == 3 and lines[-1] and tokens.end in tokens.breaks()
