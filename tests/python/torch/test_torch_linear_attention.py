"""whet.torch.linear_attention against the formula in torch, and under torch's transforms."""

import pytest
import torch
import whet
from whet.torch import linear_attention


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def heads(*shape, dtype=torch.float64, needs_gradient=True):
    return torch.randn(shape, dtype=dtype, requires_grad=needs_gradient)


def formula(q, k, v, is_causal=False):
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    phi_q, phi_k = (torch.nn.functional.elu(t) + 1 for t in (q, k))
    a = phi_q @ phi_k.mT
    a = a.tril() if is_causal else a
    return a / a.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_gradients(is_causal):
    given = heads(2, 4, 130, 9), heads(2, 2, 70, 9), heads(2, 2, 70, 5)
    out = linear_attention(*given, is_causal=is_causal, enable_gqa=True)
    expected = formula(*given, is_causal)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    for got, wanted in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(expected, given, dout)):
        torch.testing.assert_close(got, wanted)
    assert torch.equal(out, linear_attention(*(t.detach() for t in given), is_causal, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_element_types(dtype):
    given = [heads(2, 2, 70, 8, dtype=dtype, needs_gradient=False) for _ in range(3)]
    out = linear_attention(*given, is_causal=True)
    assert out.dtype == dtype
    expected = formula(*(t.double() for t in given), is_causal=True)
    torch.testing.assert_close(out.double(), expected, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=0)


def test_is_that_of_numpy():
    q, k, v = (heads(2, 3, 70, 8, needs_gradient=False) for _ in range(3))
    numpy = whet.linear_attention(q.numpy(), k.numpy(), v.numpy(), is_causal=True, lengths=[60, 3])
    assert torch.equal(linear_attention(q, k, v, is_causal=True, lengths=torch.tensor([60, 3])),
                       torch.from_numpy(numpy))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "lengths": [3, 5]}])
def test_gradcheck(options):
    given = heads(2, 2, 6, 3), heads(2, 1, 5, 3), heads(2, 1, 5, 2)
    assert torch.autograd.gradcheck(lambda *t: linear_attention(*t, enable_gqa=True, **options), given)


def test_gradcheck_of_several_chunks():
    given = heads(1, 1, 130, 2), heads(1, 1, 130, 2), heads(1, 1, 130, 1)
    assert torch.autograd.gradcheck(lambda *t: linear_attention(*t, is_causal=True), given, fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 4])])
def test_operators(causal, lengths):
    given = heads(2, 4, 5, 8), heads(2, 2, 6, 8), heads(2, 2, 6, 3)
    torch.library.opcheck(torch.ops.whet.linear_attention.default, (*given, lengths), {"causal": causal})
    tensors = [t.detach() for t in given]
    dout = torch.ones(2, 4, 5, 3, dtype=torch.float64)
    for wanted in ([True] * 3, [False, True, False]):
        torch.library.opcheck(torch.ops.whet.linear_attention_backward.default, (dout, *tensors, lengths),
                              {"wanted": wanted, "causal": causal})
    needed = [argument.name for argument in torch.ops.whet.linear_attention.default._schema.arguments
              if not argument.has_default_value()]
    assert needed == ["query", "key", "value"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return linear_attention(q, k, v, is_causal=True).sum(1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    model, x = Model(), torch.randn(2, 70, 8)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (70, 9):
        torch.testing.assert_close(compiled(x[:, :length]), model(x[:, :length]))
    compiled(x).square().sum().backward()
    gradient = model.project.weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(gradient, model.project.weight.grad)


def test_export():
    model, x = Model(), torch.randn(2, 70, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=100)},))
    torch.testing.assert_close(program.module()(x[:, :33]), model(x[:, :33]))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 0), (None, 2, None)])
def test_vmap(in_dims):
    given = [torch.randn(3, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    given = [t if axis is None else torch.stack([t, t + 1]).movedim(0, axis) for t, axis in zip(given, in_dims)]

    def one(*tensors):
        return linear_attention(*tensors, is_causal=True)

    def gradients(*tensors):
        return torch.func.grad(lambda *t: one(*t).square().sum(), argnums=(0, 1, 2))(*tensors)

    for function in (one, gradients):
        together = torch.vmap(function, in_dims)(*given)
        for i in range(2):
            alone = function(*(t if axis is None else t.select(axis, i) for t, axis in zip(given, in_dims)))
            torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t[i], together), alone)


@pytest.mark.parametrize("shapes", [((5, 4), (6, 4), (6, 3)), ((2, 5, 4), (2, 6, 4), (2, 6, 3)),
                                    ((2, 3, 2, 5, 4), (3, 2, 6, 4), (1, 1, 2, 6, 3))])
def test_leading_dimensions(shapes):
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    out = linear_attention(*given)
    a = (torch.nn.functional.elu(given[0]) + 1) @ (torch.nn.functional.elu(given[1]) + 1).mT
    torch.testing.assert_close(out, a / a.sum(-1, keepdim=True) @ given[2])


def test_autocast():
    given = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_attention(*given).dtype == torch.bfloat16


def test_its_gradient_has_none():
    given = heads(1, 1, 5, 3), heads(1, 1, 5, 3), heads(1, 1, 5, 3)
    first, *_ = torch.autograd.grad(linear_attention(*given).square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(first.sum(), given)


@pytest.mark.parametrize("name, wrong", [
    ("query", {"query": [1]}), ("key", {"key": torch.zeros(2, 3, 6, 8)}), ("value", {"value": torch.zeros(8)}),
    ("value", {"value": torch.zeros(2, 2, 7, 3)}), ("lengths", {"lengths": [1]}), ("lengths", {"lengths": [7, 1]}),
    ("lengths", {"lengths": torch.ones(2)}), ("is_causal", {"is_causal": 2}), ("enable_gqa", {"enable_gqa": None}),
    ("key", {"key": torch.zeros(2, 2, 6, 8, device="meta")})])
def test_errors_name_the_argument(name, wrong):
    given = {"query": torch.zeros(2, 2, 5, 8), "key": torch.zeros(2, 2, 6, 8), "value": torch.zeros(2, 2, 6, 3), **wrong}
    with pytest.raises((TypeError, ValueError), match=f"^{name}"):
        linear_attention(**given)
