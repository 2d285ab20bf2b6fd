"""Prompts: as long as asked, the same from the same seed, and with their answer in them."""

import re
from types import SimpleNamespace

import pytest
from tiny_models import make_tokenizer
from whet.probe.errors import ProbeError
from whet.probe.prompts import Prompts, pieces, read_text


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_max_has_the_length_asked(tokenizer):
    prompts = Prompts("max", tokenizer)
    for length in (90, 128, 300, 1000):
        for index in range(3):
            prompt = prompts.draw(length, index)
            assert prompt.tokens == tokenizer(prompt.text).input_ids
            assert abs(len(prompt.tokens) - length) <= 3  # a number has three digits, a comma and a space
    assert re.fullmatch(r"What is the maximum in the following sequence\? \d+(, \d+)*\. The maximum is:", prompt.text)


def test_needle_holds_the_key_and_asks_for_it(tokenizer):
    prompts = Prompts("needle", tokenizer)
    depths = []
    for index in range(20):
        prompt = prompts.draw(600, index)
        key = tokenizer.decode(prompt.answer).replace(" ", "")
        assert re.fullmatch(r"\d{5}", key) and prompt.text.count(key) == 2
        assert prompt.text.endswith("What is the pass key? The pass key is")
        assert abs(len(prompt.tokens) - 600) <= 30  # half a sentence
        depths.append(prompt.text.index(key) / len(prompt.text))
    assert min(depths) < 0.25 and max(depths) > 0.6


def test_the_answer_is_written_as_it_follows_the_prompt():
    """A tokenizer that begins a text with a token of its own, ends it with one, and joins a blank to what follows."""
    class Tokenizer:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, text, add_special_tokens=True):
            words = [sum(map(ord, word)) + 100 * len(word) for word in re.findall(r" ?[^ ]+", text)]
            return SimpleNamespace(input_ids=[1, *words, *self.ends] if add_special_tokens else [99, *words])

    for ends in ([], [2]):
        Tokenizer.ends = ends
        prompt = Prompts("needle", Tokenizer()).draw(200, 0)
        key = re.search(r"[0-9]{5}", prompt.text)[0]
        # Alone, and where the prompt has an end of its own, the tokenizer begins with token 99.
        expected = sum(map(ord, f" {key}")) + 600
        assert prompt.answer == ([99, expected] if ends else [expected])


def test_seeds(tokenizer):
    first, again, other = (Prompts("max", tokenizer, seed) for seed in (0, 0, 1))
    assert first.draw(200, 1) == again.draw(200, 1)
    assert len({p.draw(200, i).text for p in (first, other) for i in range(3)}) == 6


def test_text_is_cut_into_pieces(tokenizer, text):
    content = read_text(text)
    prompts = Prompts("text", tokenizer, text=content)
    prompt = prompts.draw(100, 0)
    assert len(prompt.tokens) == 100 and prompt.text in content
    assert prompts.draw(100, 1).text != prompt.text
    cut = pieces(tokenizer, content, 50, 10)
    assert len(cut) == 10 and {len(piece) for piece in cut} == {50}
    assert len({tuple(piece) for piece in cut}) == 10


def test_a_text_shorter_than_the_length_names_both(tokenizer):
    with pytest.raises(ProbeError, match="has 5 tokens where a length of 100 is asked for"):
        Prompts("text", tokenizer, text="a cat").draw(100, 0)
    with pytest.raises(ProbeError, match="has 5 tokens where at least 200"):
        pieces(tokenizer, "a cat", 100, 4)


def test_a_length_shorter_than_the_question(tokenizer):
    with pytest.raises(ProbeError, match="a prompt of 9 tokens can't be written: the shortest of kind 'max' has 6"):
        Prompts("max", tokenizer).draw(9, 0)


def test_texts_that_are_none(tmp_path):
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00 no text")
    (tmp_path / "empty").write_text(" \n")
    for name, saying in (("image", "is not text in UTF-8"), ("empty", "holds no text"), ("none", "can't be read"),
                         (".", "can't be read")):
        with pytest.raises(ProbeError, match=saying):
            read_text(tmp_path / name)


def test_wrong_arguments(tokenizer):
    with pytest.raises(ValueError, match="kind: is 'poem'"):
        Prompts("poem", tokenizer)
    with pytest.raises(ValueError, match="text: not given"):
        Prompts("text", tokenizer)
