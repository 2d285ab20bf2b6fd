"""The alpha of entmax as a tensor that is learned, beside the published package entmax."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
import whet
from torch import nn
from whet.torch import Entmax, MultiheadAttention, Softmax, attention, softmax

ALPHAS = [1.001, 1.3, 1.5, 2.0, 3.0, 4.0]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def learned(*values):
    values = values[0] if len(values) == 1 else values
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def heads(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# ---- rows


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_published_entmax_agrees(alpha):
    entmax = pytest.importorskip("entmax")
    x, dout = 2 * heads(5, 40).detach(), torch.randn(5, 40, dtype=torch.float64)
    found = []
    for function in (lambda x, a: softmax(x, normalizer=Entmax(a)), lambda x, a: entmax.entmax_bisect(x, a, n_iter=100)):
        logits, parameter = x.clone().requires_grad_(), learned(alpha)
        weights = function(logits, parameter)
        weights.backward(dout)
        found.append((weights.detach(), logits.grad, parameter.grad))
    # The package divides differences by (alpha - 1)^2.
    for ours, theirs, close in zip(*found, (1e-9, 1e-7, max(1e-7, 1e-13 / (alpha - 1) ** 3))):
        torch.testing.assert_close(ours, theirs, atol=close, rtol=close)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("rule", ["none", "fixed:0.5", "paper"])
def test_gradients_of_rows(alpha, rule):
    x, parameter = heads(3, 9), learned(alpha)
    where = torch.rand(3, 9) < 0.8
    where[2, 1:] = False  # one key at most

    def weights(x, parameter):
        return softmax(x, rule=rule, where=where, normalizer=Entmax(parameter))

    step = min(1e-6, (alpha - 1) / 100)
    inside = parameter if alpha < 4 else learned(4.0 - 1e-5)  # differences need values on both sides
    torch.autograd.gradcheck(weights, (x, inside), eps=step, atol=1e-4, rtol=1e-3)


def test_a_number_is_the_name():
    x = torch.randn(4, 30)
    expected = softmax(x, normalizer="entmax:1.3")
    assert torch.equal(softmax(x, normalizer=Entmax(1.3)), expected)
    for alpha in (torch.tensor(1.3, dtype=torch.float64), torch.tensor([1.3], dtype=torch.float64)):
        for grad in (False, True):
            found = softmax(x, normalizer=Entmax(alpha.requires_grad_(grad)))
            assert torch.equal(found, expected) and found.requires_grad == grad


def test_the_gradient_has_the_shape_and_dtype_of_alpha():
    x = torch.randn(4, 30)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        alpha = torch.tensor([1.25], dtype=dtype, requires_grad=True)
        softmax(x, normalizer=Entmax(alpha))[:, 0].sum().backward()
        assert alpha.grad.shape == (1,) and alpha.grad.dtype == dtype
        _, rows = whet.softmax_backward(x.numpy(), torch.eye(30)[:1].expand(4, 30).numpy(), normalizer="entmax:1.25",
                                        return_dparameter=True)
        torch.testing.assert_close(alpha.grad.double(), torch.tensor([rows.sum()]), rtol=1e-2, atol=1e-6)


def test_stats_of_rows():
    x, alpha = torch.randn(4, 30), learned(1.7)
    weights, stats = softmax(x, normalizer=Entmax(alpha), return_stats=True)
    assert torch.equal(stats.support, (weights > 0).sum(-1).double())
    assert ((x > stats.threshold[:, None]) == (weights > 0)).all()


# ---- attention


@pytest.mark.parametrize("alpha", [1.001, 1.5, 1.8, 3.0])
def test_gradients_of_attention(alpha):
    q, k, v, bias, sinks = heads(2, 4, 3, 5), heads(2, 2, 6, 5), heads(2, 2, 6, 2), heads(4, 3, 6), heads(4)

    def output(q, k, v, bias, sinks, alpha):
        return attention(q, k, v, bias, enable_gqa=True, sinks=sinks, normalizer=Entmax(alpha), is_causal=True)

    for parameter in (learned(alpha), learned(alpha, 1.3, 2.0, 1.5)):
        torch.autograd.gradcheck(output, (q, k, v, bias, sinks, parameter), eps=min(1e-6, (alpha - 1) / 100),
                                 atol=1e-4, rtol=1e-3)


def test_one_alpha_per_head_is_each_head_alone():
    q, k, v = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 6)
    alphas, rules = [1.2, 1.5, 2.0, 3.0], ["none", "paper", "fixed:2", "log-length:4"]
    mask, scale, sinks = torch.rand(2, 1, 20, 30) < 0.8, torch.rand(2, 4, 1) + 0.5, torch.randn(4)
    lengths = torch.randint(0, 31, (2, 4, 20))
    out, stats, extras = attention(q, k, v, mask, enable_gqa=True, rule=rules, query_scale=scale, sinks=sinks,
                                   lengths=lengths, normalizer=Entmax(torch.tensor(alphas)), return_stats=True, top_k=3,
                                   column_sums=True)
    assert out.transpose(1, 2).is_contiguous()
    for head, (alpha, rule) in enumerate(zip(alphas, rules)):
        one = slice(head, head + 1)
        key = slice(head // 2, head // 2 + 1)
        expected, expected_stats, expected_extras = attention(
            q[:, one], k[:, key], v[:, key], mask, rule=rule, query_scale=scale[:, one], sinks=sinks[one],
            lengths=lengths[:, one], normalizer=f"entmax:{torch.tensor(alpha).item()}", return_stats=True, top_k=3,
            column_sums=True)
        assert torch.equal(out[:, one], expected)
        for found, exact in zip((*stats, *extras[1:4]), (*expected_stats, *expected_extras[1:4])):
            assert torch.equal(found[:, one], exact)


def test_alpha_is_learned():
    """Attention over 64 keys of which one matters: alpha rises until the others have no weight."""
    torch.manual_seed(1)
    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 64, 8)
    v = torch.randn(1, 2, 64, 4)
    target = torch.gather(v, 2, (q @ k.mT).argmax(-1, keepdim=True).expand(-1, -1, -1, 4))
    raw = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.2)
    losses = []
    for _ in range(30):
        alpha = 1 + 3 * torch.sigmoid(raw)
        loss = (attention(q, k, v, normalizer=Entmax(alpha)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and (alpha > 2.6).all()


# ---- modules


def test_modules_learn_alpha():
    rows = Softmax(normalizer=Entmax(nn.Parameter(torch.tensor(1.5))))
    assert [name for name, _ in rows.named_parameters()] == ["alpha"]
    rows(torch.randn(3, 20))[:, 0].sum().backward()
    assert rows.alpha.grad is not None
    layer = MultiheadAttention(8, 2, batch_first=True, normalizer=Entmax(nn.Parameter(torch.tensor([1.2, 1.9]))))
    assert "alpha" in layer.state_dict()
    x = torch.randn(3, 7, 8)
    out, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    out.sum().backward()
    assert layer.alpha.grad.shape == (2,) and layer.alpha.grad.abs().min() > 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 7))
    with torch.no_grad():
        layer.alpha.fill_(2.0)
        _, sparse = layer(x, x, x, need_weights=True, average_attn_weights=False)
    reference = MultiheadAttention(8, 2, batch_first=True, normalizer="sparsemax")
    reference.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "alpha"})
    torch.testing.assert_close(sparse, reference(x, x, x, need_weights=True, average_attn_weights=False)[1])


# ---- what torch does to programs


@pytest.mark.parametrize("alpha", [torch.tensor(1.3), torch.tensor([1.3, 1.6])])
def test_compiled(alpha):
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()

    def loss(q, alpha):
        weights = softmax(q, normalizer=Entmax(alpha.reshape(-1)[0]))
        return (attention(q, k, v, normalizer=Entmax(alpha)) * weights).sum()

    results = []
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for function in (loss, compiled, lambda q, a: compiled(q, a + 0.1), lambda q, a: loss(q, a + 0.1)):
        inputs = q.clone().requires_grad_(), alpha.clone().requires_grad_()
        value = function(*inputs)
        results.append((value.detach(), *torch.autograd.grad(value, inputs)))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[2], results[3])  # the value is read when the program runs


def test_operators():
    x, alpha = heads(3, 4, 7), learned(1.4)
    options = {"dim": 1, "normalizer": "entmax"}
    torch.library.opcheck(torch.ops.whet.softmax.default, (x, None, alpha), {**options, "with_saved": True})
    torch.library.opcheck(torch.ops.whet.softmax_backward.default,
                          (x.detach(), x.detach(), None, None, alpha.detach()), {**options, "with_dalpha": True})
    q, k, v = (heads(2, 2, 5, 4) for _ in range(3))
    operands = q, k, v, *(None,) * 8, alpha
    torch.library.opcheck(torch.ops.whet.attention.default, operands, {"normalizer": "entmax", "with_saved": True})
    detached = [None if t is None else t.detach() for t in operands]
    torch.library.opcheck(torch.ops.whet.attention_backward.default, (q.detach(), None, *detached),
                          {"normalizer": "entmax", "wanted": [True] * 3 + [False] * 3 + [True]})


def test_vmap():
    x, alphas = torch.randn(4, 3, 10), torch.tensor([1.2, 1.5, 2.0, 3.0])

    def loss(x, alpha):
        return softmax(x, normalizer=Entmax(alpha))[:, 0].sum()

    both = torch.func.vmap(torch.func.grad(loss, (0, 1)))(x, alphas)
    shared = torch.func.vmap(torch.func.grad(loss, (0, 1)), in_dims=(0, None))(x, alphas[1])
    for i in range(4):
        torch.testing.assert_close([part[i] for part in both], list(torch.func.grad(loss, (0, 1))(x[i], alphas[i])))
        torch.testing.assert_close([part[i] for part in shared], list(torch.func.grad(loss, (0, 1))(x[i], alphas[1])))

    def attended(q, alpha):
        return attention(q, x, x, normalizer=Entmax(alpha)).square().sum()

    q = torch.randn(4, 4, 3, 10)
    both = torch.func.vmap(torch.func.grad(attended, 1))(q, alphas)
    shared = torch.func.vmap(torch.func.grad(attended, 1), in_dims=(0, None))(q, alphas[1])
    for i in range(4):
        torch.testing.assert_close(both[i], torch.func.grad(attended, 1)(q[i], alphas[i]))
        torch.testing.assert_close(shared[i], torch.func.grad(attended, 1)(q[i], alphas[1]))


def test_forward_mode_of_logits_only():
    x, tangent, alpha = torch.randn(3, 9).double(), torch.randn(3, 9).double(), torch.tensor(1.3).double()
    for rule in ("none", "paper"):
        found = torch.func.jvp(lambda x: softmax(x, rule=rule, normalizer=Entmax(alpha)), (x,), (tangent,))
        expected = torch.func.jvp(lambda x: softmax(x, rule=rule, normalizer=f"entmax:{alpha.item()}"), (x,), (tangent,))
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="^alpha: can't be differentiated in forward mode"):
        torch.func.jvp(lambda alpha: softmax(x, normalizer=Entmax(alpha)), (alpha,), (alpha,))


# ---- errors


@pytest.mark.parametrize("alpha, text", [
    (1.0, "normalizer: the parameter of entmax is '1.0', must be a number above 1 and at most 4"),
    (torch.tensor(5.0), "normalizer: the parameter of entmax is '5.0'"),
    (torch.tensor([1.5, 1.6, 1.7]), r"alpha: its shape is \(3,\), must"),
    (torch.ones(2, 2), r"alpha: its shape is \(2, 2\), must")])
def test_wrong_alphas(alpha, text):
    q = torch.randn(1, 2, 5, 4)
    for call in (lambda: softmax(q, normalizer=Entmax(alpha)), lambda: attention(q, q, q, normalizer=Entmax(alpha))):
        with pytest.raises(ValueError, match=f"^{text}"):
            call()


def test_errors_name_the_argument():
    q, alpha = torch.randn(1, 2, 5, 4), torch.tensor([1.5, 1.6])
    with pytest.raises(TypeError, match="^alpha: its dtype is int64"):
        softmax(q, normalizer=Entmax(torch.tensor(2)))
    with pytest.raises(ValueError, match="^weight_rows: can't be given with one alpha per head"):
        attention(q, q, q, normalizer=Entmax(alpha), weight_rows=[[0, 0, 0]])
    with pytest.raises(ValueError, match="^out: can't be given"):
        softmax(q, normalizer=Entmax(alpha[0].requires_grad_()), out=torch.empty_like(q))
