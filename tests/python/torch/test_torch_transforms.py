"""What torch does to programs: operators, compile, export, vmap, autocast, traces."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
import whet
from torch.nn.functional import scaled_dot_product_attention
from whet.torch import attention, log_softmax, softmax
from whet.torch._operators import of_backward


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def heads(*shape, needs_gradient=True):
    return torch.randn(shape, requires_grad=needs_gradient)


# ---- operators


@pytest.mark.parametrize("options", [
    {"dim": 1, "rule": "paper", "with_stats": True, "with_saved": True}, {"dim": 0},
    {"dim": 2, "rule": "target-peak:0.9", "hold_beta": True, "with_saved": True}])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_operator(options, masked):
    where = torch.rand(3, 1, 7) < 0.7 if masked else None
    for x in (heads(3, 4, 7), heads(3, 7, 4, needs_gradient=False).mT):
        torch.library.opcheck(torch.ops.whet.softmax.default, (x, where), options)
    x = x.detach()
    *_, saved = torch.ops.whet.softmax(x, where, **options)
    torch.library.opcheck(torch.ops.whet.softmax_backward.default, (x + 1, x, where, saved), of_backward(options))


@pytest.mark.parametrize("rule", ["none", "paper"])
def test_beta_operator(rule):
    for where in (None, torch.rand(1, 4, 7) < 0.7):
        for options in ({}, {"with_stats": True}):
            torch.library.opcheck(torch.ops.whet.beta.default, (heads(3, 4, 7), where),
                                  {"dim": 2, "rule": rule, **options})


ATTENTIONS = {
    "plain": ((), {"rule": "paper", "with_stats": True}), "saved": ((), {"rule": "paper", "with_saved": True}),
    "everything": ((torch.ones(2, 1, 5, 6).tril(2).bool(), torch.randn(1, 4, 5, 6, requires_grad=True),
                    torch.randn(4, requires_grad=True), torch.tensor([6, 4]), None, None, None,
                    torch.randn(1, 4, 5, requires_grad=True)),
                   {"rule": "none;paper;fixed:2;ssmax:1", "scale": 0.3, "causal": True, "align": "end",
                    "window_left": 3, "window_right": 1, "softcap": 2.0, "hold_beta": True, "with_saved": True}),
}


@pytest.mark.parametrize("sides, options", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_operator(sides, options):
    given = heads(2, 4, 5, 8), heads(2, 2, 6, 8), heads(2, 2, 6, 3), *sides
    torch.library.opcheck(torch.ops.whet.attention.default, given, options)
    tensors = [None if t is None else t.detach() for t in given]
    out, _, saved = torch.ops.whet.attention(*tensors, **options)
    options = of_backward(options)
    for wanted in ([True] * 3 + [len(sides) > 0] * 3, [False, True, False, False, False, False]):
        torch.library.opcheck(torch.ops.whet.attention_backward.default, (torch.ones_like(out), saved, *tensors),
                              {"wanted": wanted, **options})
    torch.library.opcheck(torch.ops.whet.attention_outputs.default, (torch.tensor([[1, 3, 4]]), *tensors),
                          {"top_k": 2, "column_sums": True, **options})


def test_an_argument_can_be_added_to_an_operator():
    """What an exported program calls is what it was given: the rest has defaults."""
    x, q = torch.randn(2, 5), torch.randn(1, 2, 3, 4)
    assert torch.equal(torch.ops.whet.softmax(x, dim=1)[0], softmax(x))
    assert torch.equal(torch.ops.whet.attention(q, q, q)[0], attention(q, q, q))
    for name in ("softmax", "attention"):
        arguments = getattr(torch.ops.whet, name).default._schema.arguments
        needed = [argument.name for argument in arguments if not argument.has_default_value()]
        assert needed == (["input"] if name == "softmax" else ["query", "key", "value"])


# ---- compile and export


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.rule = whet.TargetEntropy(0.5)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        out, stats = attention(q, k, v, is_causal=True, rule="paper", return_stats=True)
        return softmax(out.transpose(1, 2).flatten(2), rule=self.rule), stats.entropy


def with_gradients(model, x):
    model.zero_grad()
    out, entropy = model(x)
    out.square().sum().backward()
    return [out, entropy, *(p.grad.clone() for p in model.parameters())]


def test_compile():
    """One graph, forward and backward, also for sizes it wasn't compiled for."""
    model = Model()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (5, 9):
        x = torch.randn(2, length, 8)
        for found, expected in zip(with_gradients(compiled, x), with_gradients(model, x)):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_compile_with_a_learned_query_scale():
    function = lambda q, s: attention(q, q, q, is_causal=True, rule="paper", query_scale=s).square().sum()
    q, s = heads(2, 4, 5, 8), torch.randn(4, 1, requires_grad=True)
    expected = torch.autograd.grad(function(q, s), (q, s))
    found = torch.autograd.grad(torch.compile(function, fullgraph=True, dynamic=True)(q, s), (q, s))
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


def test_compile_without_gradients_and_with_every_keyword():
    def function(q, k, v, mask, sinks, lengths):
        return attention(q, k, v, mask, enable_gqa=True, rule=["paper", "none"], softcap=3.0, sinks=sinks,
                         window=(2, 2), align="end", lengths=lengths, return_stats=True)

    given = (heads(3, 2, 4, 8), heads(3, 1, 6, 8), heads(3, 1, 6, 5), torch.rand(4, 6) < 0.9, torch.randn(2),
             torch.tensor([6, 5, 4]))
    with torch.no_grad():
        expected = function(*given)
        found = torch.compile(function, fullgraph=True, dynamic=False)(*given)
    torch.testing.assert_close(found, expected)


def test_compile_log_softmax_and_optional_outputs():
    def function(x, q, starts):
        logs = log_softmax(x, rule="paper")
        out, extras = attention(q, q, q, query_starts=starts, key_starts=starts, top_k=2, column_sums=True,
                                weight_rows=[[0, 1, 2]])
        return logs, out, extras.top_keys, extras.column_sums, extras.weights

    given = torch.randn(2, 5, requires_grad=True), heads(1, 2, 4, 8), torch.tensor([0, 1, 4])
    expected, found = function(*given), torch.compile(function, fullgraph=True, dynamic=False)(*given)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((result[0] * given[0].detach()).sum() + result[1].sum(), given[:2])
                 for result in (expected, found)]
    torch.testing.assert_close(*gradients)


def test_export():
    model, x = Model(), torch.randn(2, 5, 8)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},))
    names = {str(node.target) for node in program.graph.nodes}
    assert {"whet.attention.default", "whet.softmax.default"} <= names
    longer = torch.randn(2, 11, 8)
    torch.testing.assert_close(program.module()(longer), model(longer))


def test_traces_hold_the_operator_and_not_a_result():
    x, y = torch.randn(2, 5), torch.randn(2, 5)
    traced = torch.jit.trace(lambda x: softmax(x, rule="paper"), x)
    assert torch.equal(traced(y), softmax(y, rule="paper"))
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: softmax(x, rule="paper"))(x)
    assert torch.equal(graph(y), softmax(y, rule="paper"))


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode():
        x, q = torch.empty(3, 5), torch.empty(1, 2, 3, 4)
        weights, stats = softmax(x, 0, return_stats=True)
        assert weights.shape == (3, 5) and stats.beta.shape == (5,)
        assert attention(q, q, q).shape == (1, 2, 3, 4)


# ---- torch.func


def one_by_one(function, *given):
    return torch.stack([function(*parts) for parts in zip(*(g.unbind() for g in given))])


@pytest.mark.filterwarnings("error")
def test_vmap_of_softmax():
    x, where = torch.randn(4, 3, 7), torch.rand(4, 7) < 0.7
    expected = one_by_one(lambda x, where: softmax(x, 0, rule="paper", where=where), x, where)
    assert torch.equal(torch.vmap(lambda x, w: softmax(x, 0, rule="paper", where=w))(x, where), expected)
    assert torch.equal(torch.vmap(lambda x, w: softmax(x, 0, rule="paper", where=w), (2, 1), 1)(
        x.movedim(0, 2), where.mT), expected.movedim(0, 1))
    shared = torch.vmap(lambda w: softmax(x[0], rule="paper", where=w, return_stats=True)[1].count)(where)
    assert torch.equal(shared, where.sum(-1, keepdim=True).expand(4, 3).double())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mapped", ["all", "query", "key", "bias", "mask", "sinks", "lengths"])
def test_vmap_of_attention(mapped):
    q, k, v = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 2, 6, 8), torch.randn(3, 2, 2, 6, 8)
    bias, mask, sinks = torch.randn(3, 1, 4, 5, 6), torch.rand(3, 2, 1, 5, 6) < 0.8, torch.randn(3, 4)
    lengths = torch.tensor([[6, 5], [4, 3], [2, 1]])

    def function(q, k, v, bias, mask, sinks, lengths):
        bias = bias.masked_fill(~mask, -torch.inf)
        return attention(q, k, v, bias, enable_gqa=True, rule="paper", sinks=sinks, lengths=lengths)

    names = ("query", "key", "value", "bias", "mask", "sinks", "lengths")
    given = (q, k, v, bias, mask, sinks, lengths)
    axes = tuple(0 if mapped in ("all", name) else None for name in names)
    given = [t if axis == 0 else t[0] for t, axis in zip(given, axes)]
    expected = torch.stack([function(*(t[i] if axis == 0 else t for t, axis in zip(given, axes))) for i in range(3)])
    torch.testing.assert_close(torch.vmap(function, axes)(*given), expected)
    with_mask = torch.vmap(lambda q, m: attention(q, k[0], v[0], m, enable_gqa=True), (0, None))(q, mask[0])
    torch.testing.assert_close(with_mask[1], attention(q[1], k[0], v[0], mask[0], enable_gqa=True))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("extras", [False, True])
def test_gradients_of_every_sample(extras):
    given = [torch.randn(3, 1, 2, n, 4) for n in (5, 6, 6)]
    bias, sinks = torch.randn(5, 6), torch.randn(2)

    def loss(q, k, v, bias, sinks):
        more = {"attn_mask": bias, "sinks": sinks} if extras else {}
        return attention(q, k, v, rule="paper", **more).square().sum()

    which = (0, 1, 2, 3, 4) if extras else (0, 1, 2)
    gradient = torch.func.grad(loss, which)
    found = torch.vmap(gradient, (0, 0, 0, None, None))(*given, bias, sinks)
    for i in range(3):
        expected = gradient(*(t[i] for t in given), bias, sinks)
        torch.testing.assert_close([f[i] for f in found], list(expected), atol=1e-5, rtol=1e-5)
    row = torch.func.grad(lambda x: softmax(x, rule="paper").square().sum())
    x = torch.randn(4, 7)
    torch.testing.assert_close(torch.vmap(row)(x), row(x))
    torch.testing.assert_close(torch.func.grad(lambda x: torch.vmap(lambda y: softmax(y, rule="paper"))(
        x).square().sum())(x), row(x))


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (1, 4, 1)])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)])
def test_vmap_with_query_scale(shape, in_dims):
    q, s = (torch.randn((3, *own) if axis == 0 else own, dtype=torch.float64)
            for own, axis in zip([(2, 4, 5, 8), shape], in_dims))
    k = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    function = lambda q, s: attention(q, k, k, rule="paper", query_scale=s)
    gradients = torch.func.grad(lambda q, s: function(q, s).square().sum(), (0, 1))
    for one in (lambda q, s: (function(q, s),), gradients):
        found = torch.func.vmap(one, in_dims)(q, s)
        for i in range(3):
            expected = one(*(t if axis is None else t[i] for t, axis in zip((q, s), in_dims)))
            for ours, theirs in zip(found, expected):
                torch.testing.assert_close(ours[i], theirs)


def test_second_derivatives_are_refused():
    x = torch.randn(2, 5)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: softmax(y).square().sum())(x).square().sum())(x)


@pytest.mark.filterwarnings("error")
def test_vmap_of_log_softmax_packed_sequences_and_optional_outputs():
    x, q = torch.randn(3, 2, 5), torch.randn(3, 1, 2, 4, 8)

    def function(x, q):
        out, extras = attention(q, q, q, query_starts=[0, 1, 4], key_starts=[0, 1, 4], top_k=2, column_sums=True)
        return log_softmax(x, rule="paper"), out, extras.top_weights, extras.column_sums

    for found, expected in zip(torch.vmap(function)(x, q), zip(*map(function, x, q))):
        torch.testing.assert_close(found, torch.stack(expected))


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_casts_as_torch_does(dtype):
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.randn(5, 5, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = attention(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask)
        assert softmax(q).dtype == torch.softmax(q, -1).dtype
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)
    out.sum().backward()
    assert q.grad.dtype == dtype


def test_autocast_compiles():
    q = torch.randn(1, 2, 5, 8)

    def function(q):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, q, q, rule="paper")

    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q)
    assert found.dtype == torch.bfloat16 and torch.equal(found, function(q))


# ---- subclasses


def test_subclasses_keep_their_class():
    class Named(torch.Tensor):
        pass

    x = torch.randn(2, 5).as_subclass(Named)
    q = torch.randn(1, 2, 3, 4).as_subclass(Named)
    assert type(softmax(x)) is Named and type(attention(q, q, q)) is Named
    assert type(softmax(torch.nn.Parameter(torch.randn(3)))) is torch.Tensor
    with torch.inference_mode():
        assert torch.equal(softmax(torch.zeros(4)), torch.full((4,), 0.25))
