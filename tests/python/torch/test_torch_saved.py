"""What forward keeps for backward: a few numbers per row, not the stats."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from whet import Stats, _core
from whet.torch import attention, log_softmax, softmax

SIZES = {"none": 3, "ssmax:1": 3, "target-entropy:0.5": 4, "paper": 6}
CLOSE = {torch.float64: 1e-11, torch.float32: 5e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def heads(dtype, queries=20):
    return [torch.randn(2, 4, n, 8).to(dtype).requires_grad_() for n in (queries, 9, 9)]


def check_meaning(stats, saved, size, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert saved.dtype == wide and stats.dtype == torch.float64 and saved.shape == (*stats.shape[:-1], size)
    assert not saved.requires_grad and not stats.requires_grad
    of_rows = Stats(*stats.unbind(-1))
    expected = torch.stack((of_rows.max, of_rows.beta, of_rows.sharp_peak), -1)
    close = min(CLOSE[dtype], 5e-5)
    torch.testing.assert_close(saved[..., :3].double(), expected, atol=close, rtol=close)


@pytest.mark.parametrize("rule", SIZES)
@pytest.mark.parametrize("dtype", CLOSE)
def test_results_of_the_operators(dtype, rule):
    x = torch.randn(3, 30, 4).to(dtype).requires_grad_()
    _, stats, saved = torch.ops.whet.softmax(x, dim=1, rule=rule, with_stats=True, with_saved=True)
    check_meaning(stats, saved, SIZES[rule], dtype)
    _, stats, saved = torch.ops.whet.attention(*heads(dtype), rule=rule, with_stats=True, with_saved=True)
    check_meaning(stats, saved, SIZES[rule], dtype)
    for _, stats, saved in (torch.ops.whet.softmax(x, dim=1), torch.ops.whet.attention(*heads(dtype))):
        assert stats.numel() == saved.numel() == 0
    _, _, saved = torch.ops.whet.attention(*heads(dtype), rule=f"none;{rule};none;none", with_saved=True)
    assert saved.shape == (2, 4, 20, SIZES[rule])
    assert torch.ops.whet.softmax(x, dim=1, rule=rule, normalizer="hard", with_saved=True)[2].shape == (3, 4, 3)


@pytest.mark.parametrize("return_stats", [False, True])
@pytest.mark.parametrize("rule", SIZES)
def test_what_autograd_keeps(rule, return_stats):
    x, (q, k, v) = torch.randn(3, 30, requires_grad=True), heads(torch.bfloat16)
    outs = [function(*given, rule=rule, return_stats=return_stats) for function, given in
            ((softmax, (x,)), (attention, (q, k, v)))]
    weights, out = (o[0] if return_stats else o for o in outs)
    input, _, saved, _ = weights.grad_fn.saved_tensors
    assert torch.equal(input, x) and (saved.shape, saved.dtype) == ((3, SIZES[rule]), torch.float32)
    saved, *operands = out.grad_fn.saved_tensors
    assert (saved.shape, saved.dtype) == ((2, 4, 20, SIZES[rule]), torch.float32)
    assert [t.dtype for t in operands if t is not None] == [torch.bfloat16] * 3


def test_stats_are_computed_only_if_asked_for(monkeypatch):
    """Not for a gradient, nor for log_softmax."""
    written, x, q = [], torch.randn(3, 30, requires_grad=True), torch.randn(1, 2, 5, 8, requires_grad=True)
    for name in ("softmax", "attention"):
        function = getattr(_core, name)
        monkeypatch.setattr(_core, name, lambda *given, function=function, **options: (
            written.append("stats" in options), function(*given, **options)))
    for needs_stats in (False, True):
        for function, given in ((softmax, (x,)), (log_softmax, (x,)), (attention, (q, q, q))):
            function(*given, rule="paper", return_stats=needs_stats)
        assert written == [needs_stats] * 3
        written.clear()


@pytest.mark.parametrize("normalizer", ["softmax", "hard"])
@pytest.mark.parametrize("rule", [*SIZES, "none;paper;target-entropy:0.5;ssmax:1"])
@pytest.mark.parametrize("dtype", CLOSE)
def test_gradients_are_those_of_computing_again(dtype, rule, normalizer):
    close = max(CLOSE[dtype], 1e-4 if "target" in rule else 0)

    def check(found, again):
        torch.testing.assert_close(found, again, atol=close, rtol=close)

    if ";" not in rule:
        x, dout = torch.randn(2, 30, 3).to(dtype), torch.randn(2, 30, 3).to(dtype)
        where = torch.rand(2, 30, 1) < 0.7
        where[1] = False
        options = {"dim": 1, "rule": rule, "normalizer": normalizer}
        *_, saved = torch.ops.whet.softmax(x, where, **options, with_saved=True)
        moved = saved.movedim(-1, 0).contiguous().movedim(0, -1)  # as a hook on saved tensors may
        for given in (saved, moved):
            check(torch.ops.whet.softmax_backward(dout, x, where, given, **options),
                  torch.ops.whet.softmax_backward(dout, x, where, None, **options))

    q, k, v = (t.detach() for t in heads(dtype))
    mask = torch.rand(1, 1, 20, 9) < 0.7
    mask[..., 3, :] = False
    operands = q, k, v, mask, torch.randn(1, 4, 20, 9).to(dtype), torch.randn(4).to(dtype)
    options = {"rule": rule, "normalizer": normalizer, "causal": True}
    out, _, saved = torch.ops.whet.attention(*operands, **options, with_saved=True)
    dout = torch.randn_like(out)
    found, again = (torch.ops.whet.attention_backward(dout, given, *operands, wanted=[True] * 5 + [False], **options)
                    for given in (saved, None))
    check(found, again)


def test_a_buffer_of_another_rule_is_refused():
    x, (q, k, v) = torch.randn(3, 30), (t.detach() for t in heads(torch.float32))
    for wrong in (torch.empty(3, 6), torch.empty(3, 3).double()):
        with pytest.raises(ValueError, match="^saved"):
            torch.ops.whet.softmax_backward(x, x, None, wrong, dim=1, rule="none")
    with pytest.raises(ValueError, match="^saved"):
        torch.ops.whet.attention_backward(q, torch.empty(2, 4, 20, 4), q, k, v, wanted=[True] * 3 + [False] * 3)


def test_mapped_axes():
    x, q = torch.randn(5, 3, 30), torch.randn(5, 2, 4, 20, 8)
    gradient = torch.func.grad(lambda q: attention(q, q, q, rule="paper").square().sum())
    torch.testing.assert_close(torch.vmap(gradient)(q), gradient(q))
    for dim in (0, 1):
        mapped = torch.vmap(torch.func.grad(lambda x: softmax(x, rule="paper").square().sum()), dim, dim)(x)
        torch.testing.assert_close(mapped, torch.func.grad(lambda x: softmax(x, rule="paper").square().sum())(x))
