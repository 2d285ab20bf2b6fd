"""The decoder: masks, cache, rules in some heads, and the same numbers as attention in torch."""

import pytest
import torch
from whet.clrs.decoding import greedy
from whet.clrs.errors import ClrsError
from whet.clrs.model import Decoder, Shape, Sharpening, per_layer

VOCABULARY, END = 30, 1


def decoder(sharpening=None, attention="whet", **sizes):
    torch.manual_seed(0)
    sizes = {"width": 24, "layers": 2, "heads": 3, "hidden": 32, **sizes}
    model = Decoder(Shape(VOCABULARY, **sizes), sharpening, attention).eval()
    if sizes.get("learned", "none") != "none":
        for block in model.blocks:
            for parameter in block.attention.scale.parameters():
                torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


VARIANTS = [
    {}, {"sharpening": Sharpening("paper")}, {"sharpening": Sharpening("log-length:4", layers=(1,))},
    {"sharpening": Sharpening("log-length:4", heads=(0, 2))}, {"sharpening": Sharpening(normalizer="entmax15")},
    {"sharpening": Sharpening(normalizer="sparsemax", heads=(1,))}, {"learned": "log-power"}, {"learned": "ssmax"},
    {"breaks": (3, 7)}, {"positions": "rotary"}, {"positions": "mix"}, {"positions": "mix", "sharpening": Sharpening("ssmax:0.5")},
    {"attention": "sdpa", "positions": "mix"}, {"attention": "eager", "sharpening": Sharpening("paper")},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_cache_padding_and_rows(variant):
    """Tokens one by one, after prompts of different lengths, give what they give all at once."""
    model = decoder(**variant)
    lengths = torch.tensor([3, 6, 5])
    tokens = torch.randint(2, VOCABULARY, (3, 11))
    with torch.no_grad():
        whole = [model(tokens[row:row + 1, :length + 5])[0] for row, length in enumerate(lengths.tolist())]
        cache = model.empty_cache(3, 11)
        last = torch.arange(3) * 6 + lengths - 1
        found = [model(tokens[:, :6], last, cache)]
        for step in range(5):
            cache = cache._replace(lengths=lengths + step)
            found.append(model(tokens[torch.arange(3), lengths + step][:, None], cache=cache)[:, 0])
    found = torch.stack(found, 1)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[row], whole[row][length - 1:length + 5], atol=2e-5, rtol=1e-4)


def test_greedy_against_one_at_a_time():
    model = decoder()
    questions = [[2, 3, 4], [5, 6, 7, 8, 9], [10]]
    alone = []
    with torch.no_grad():
        for question in questions:
            tokens = list(question)
            while len(tokens) < len(question) + 12 and tokens[-1] != END:
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            alone.append(tokens[len(question):])
    assert greedy(model, questions, 12, END) == alone
    stopped = alone[0][4]
    expected = [row[:row.index(stopped) + 1] if stopped in row else row for row in alone]
    assert greedy(model, questions, 12, stopped) == expected


@pytest.mark.parametrize("attention, sharpening", [("sdpa", Sharpening()), ("eager", Sharpening()),
                                                   ("eager", Sharpening("paper"))], ids=str)
def test_against_attention_in_torch(attention, sharpening):
    tokens = torch.randint(0, VOCABULARY, (2, 40))
    ours, theirs = decoder(sharpening), decoder(sharpening, attention)
    gradients = []
    for model in (ours, theirs):
        for block in model.blocks:  # sharp enough for the rule to differ from none
            block.attention.inward.weight.data *= 2
        model(tokens).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(ours(tokens), theirs(tokens), atol=1e-4, rtol=1e-4)
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=2e-3)
    if not sharpening.plain:
        ours.sharpening = Sharpening()
        assert not torch.allclose(ours(tokens), theirs(tokens), atol=1e-3)


def test_other_heads_are_unchanged():
    model, tokens = decoder(layers=1), torch.randint(0, VOCABULARY, (2, 20))
    model.blocks[0].attention.outward = torch.nn.Identity()
    outputs = []
    model.blocks[0].attention.register_forward_hook(lambda module, given, out: outputs.append(out.unflatten(-1, (3, 8))))
    for sharpening in (Sharpening(), Sharpening("fixed:3"), Sharpening("fixed:3", heads=(1,)),
                       Sharpening(normalizer="sparsemax"), Sharpening(normalizer="sparsemax", heads=(1,))):
        model.sharpening = sharpening
        stats = []
        model(tokens, stats=stats)
        assert len(stats) == 1 and stats[0].entropy.shape == (2, 3, 20)
    plain, fixed, fixed_one, sparse, sparse_one = outputs
    for everywhere, one in ((fixed, fixed_one), (sparse, sparse_one)):
        torch.testing.assert_close(one[:, :, [0, 2]], plain[:, :, [0, 2]])
        torch.testing.assert_close(one[:, :, 1], everywhere[:, :, 1])
        assert not torch.allclose(one[:, :, 1], plain[:, :, 1], atol=1e-3)


def test_what_is_learned_has_gradients():
    model = decoder(learned="log-power")
    model(torch.randint(0, VOCABULARY, (2, 12))).square().mean().backward()
    assert all((parameter.grad != 0).any() for parameter in model.parameters())
    assert decoder(learned="ssmax").count() == decoder().count() + 2 * 3


def test_bfloat16():
    model, tokens = decoder(Sharpening("paper")), torch.randint(0, VOCABULARY, (2, 12))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(tokens)
    torch.testing.assert_close(rounded.float(), model(tokens), atol=0.05, rtol=0.05)


def test_names():
    assert [one.name for one in (Sharpening(), Sharpening("paper"), Sharpening(normalizer="entmax15"),
                                 Sharpening("ssmax:0.4", "sparsemax"), Sharpening("paper", layers=(0, 2), heads=(1,)))] == [
        "softmax", "paper", "entmax15", "sparsemax with ssmax:0.4", "paper in layers 0,2 in head 1"]
    assert [one.layers for one in per_layer(Sharpening("paper"), 2)] == [(0,), (1,)]


@pytest.mark.parametrize("wrong, text", [
    ({"width": 25}, "width: is 25"), ({"positions": "learned"}, "positions: is 'learned'"), ({"layers": 0}, "layers: is 0"),
    ({"learned": "yes"}, "learned: is 'yes'"), ({"sharpening": Sharpening("papr")}, "rule: "),
    ({"sharpening": Sharpening(normalizer="soft")}, "normalizer: "),
    ({"sharpening": Sharpening("paper", layers=(5,))}, "layers: are 5, must be from 0 to 1"),
    ({"attention": "sdpa", "sharpening": Sharpening("paper")}, "attention: is 'sdpa', which has no paper")])
def test_wrong_shapes(wrong, text):
    with pytest.raises(ClrsError, match=text):
        decoder(**wrong)


def test_numbers_begin_in_their_order():
    """The nearest other number is a neighbour, however fine the grid, and the other tokens stay as they were."""
    model = Decoder(Shape(1010, width=96, layers=1, heads=3))
    before = model.embedding.weight.detach().clone()
    model.begin_as_waves({5 + i: i / 1000 for i in range(1001)})
    weight = model.embedding.weight.detach()
    assert torch.equal(weight[:5], before[:5]) and torch.equal(weight[1006:], before[1006:])
    numbers = weight[5:1006]
    nearest = (numbers @ numbers.T).fill_diagonal_(-torch.inf).argmax(1)
    assert ((nearest - torch.arange(1001)).abs() <= 2).all()
    assert numbers.square().mean().sqrt() / before.square().mean().sqrt() == pytest.approx(3, rel=0.05)
    model.begin_as_waves({})
