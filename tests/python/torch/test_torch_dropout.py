"""Dropout of weights: how many, which, and their gradients."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from whet.torch import attention

P = 0.3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(queries=5, keys=7, dtype=torch.float64):
    return [torch.randn(2, 3, n, 4, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]


def seeded(*given, seed=1, **options):
    torch.manual_seed(seed)
    return attention(*given, dropout_p=P, **options)


def kept_weights(q, k, **options):
    """The weights with dropout, read off the values of one key each."""
    keys = k.shape[2]
    return seeded(q, k, torch.eye(keys, dtype=q.dtype).expand(2, 3, keys, keys), **options)


@pytest.mark.parametrize("queries, keys", [(5, 7), (40, 300), (1, 1000)])
def test_weights_are_dropped_or_scaled(queries, keys):
    q, k, _ = inputs(queries, keys, torch.float32)
    dropped = kept_weights(q, k, rule="paper")
    plain = attention(q, k, torch.eye(keys).expand(2, 3, keys, keys), rule="paper")
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / (1 - P))
    share, count = 1 - kept.double().mean().item(), kept.numel()
    assert abs(share - P) < 5 * (P * (1 - P) / count) ** 0.5


def test_manual_seed_repeats_it():
    given = inputs()
    first, second = seeded(*given), seeded(*given)
    assert torch.equal(first, second) and not torch.equal(first, seeded(*given, seed=2))
    torch.manual_seed(1)
    assert torch.equal(attention(*given, dropout_p=P), first) and not torch.equal(attention(*given, dropout_p=P), first)


def test_gradients_are_of_the_same_weights():
    given = inputs()
    for rule in ("none", "paper"):
        assert torch.autograd.gradcheck(lambda *given: seeded(*given, rule=rule, is_causal=True), given)


def test_nothing_and_everything():
    given = inputs()
    assert torch.equal(attention(*given, dropout_p=0.0), attention(*given))
    assert (attention(*given, dropout_p=1.0) == 0).all()


def test_the_mean_is_the_output():
    q, k, v = inputs()
    mean = torch.stack([attention(q, k, v, dropout_p=P) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, attention(q, k, v), atol=0.15, rtol=0)


def test_compiled_programs_draw_again():
    given = inputs(dtype=torch.float32)
    compiled = torch.compile(lambda *given: attention(*given, dropout_p=P), fullgraph=True)
    first, second = compiled(*given), compiled(*given)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert given[0].grad.isfinite().all()


def test_forward_mode_is_refused():
    given = tuple(t.detach() for t in inputs())
    with pytest.raises(ValueError, match="^dropout_p: must be 0 in forward mode"):
        torch.func.jvp(lambda *given: attention(*given, dropout_p=P), given, given)
