"""Tensors of other classes than Tensor: taken for what they mean, or refused by name. Never for their storage."""

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from whet.torch import MultiheadAttention, attention, softmax

SIZES = [(6, 6), (4, 6), (1, 5), (5, 3)]
BIASES = [causal_upper_left, causal_lower_right]


def inputs(queries, keys):
    return [torch.randn(2, 3, n, 8, requires_grad=True) for n in (queries, keys, keys)]


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("queries, keys", SIZES)
@pytest.mark.parametrize("bias", BIASES)
def test_causal_bias(bias, queries, keys):
    given = inputs(queries, keys)
    mask = bias(queries, keys)
    seen = mask._materialize()
    expected = scaled_dot_product_attention(*given, seen).nan_to_num()  # a row that sees nothing is 0 here
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(attention(*given, mask), expected)
    assert torch.equal(attention(*given, mask, rule="paper"), attention(*given, seen, rule="paper"))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("options", [{"window": 2}, {"window": (1, None), "align": "end"}, {"lengths": [6, 4]},
                                     {"lengths": [6, 4], "align": "end", "window": 3}])
def test_causal_bias_beside_what_counts_from_a_position(bias, options):
    """It hides what its mask hides, whatever else is hidden and from where that is counted."""
    given = inputs(4, 6)
    mask = bias(4, 6)
    torch.testing.assert_close(attention(*given, mask, **options), attention(*given, mask._materialize(), **options))


@pytest.mark.parametrize("bias", BIASES)
def test_causal_bias_compiled_and_differentiated(bias):
    q, k, v = inputs(4, 6)
    mask = bias(4, 6)
    expected = attention(q, k, v, mask._materialize(), rule="paper")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, mask, rule="paper"), fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (out, expected))
    torch.testing.assert_close(found, wanted)


def test_a_parameter_as_mask_compiles():
    q, k, v = inputs(4, 6)
    mask = torch.nn.Parameter(torch.randn(4, 6))
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, mask))


def test_causal_bias_that_does_not_fit():
    given = inputs(4, 6)
    with pytest.raises(ValueError, match="^attn_mask: is a CausalBias for 6 queries and 6 keys, must be for 4 and 6"):
        attention(*given, causal_upper_left(6, 6))
    with pytest.raises(TypeError, match="^query: is a list"):
        attention([1.0], *given[1:], causal_upper_left(4, 6))
    with pytest.raises(ValueError, match="^key: has 1 dimensions"):
        attention(given[0], torch.zeros(6), torch.zeros(6), causal_upper_left(4, 6))
    with pytest.raises(ValueError, match="^is_causal"):
        attention(*given, causal_upper_left(4, 6), is_causal=True)
    with pytest.raises((TypeError, NotImplementedError), match="CausalBias"):  # torch 2.6 refuses it itself
        softmax(causal_upper_left(4, 6))
    x = torch.randn(4, 1, 8)
    with pytest.raises(TypeError, match="^attn_mask: is a CausalBias"):
        MultiheadAttention(8, 2)(x, x, x, attn_mask=causal_upper_left(4, 4))


class Answering(torch.Tensor):
    """Handles whet's functions itself."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function in (attention, softmax):
            return function.__name__, (keywords or {}).get("rule")
        return super().__torch_function__(function, types, arguments, keywords)


class Passing(torch.Tensor):
    """Leaves everything to torch."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        return super().__torch_function__(function, types, arguments, keywords)


@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask", "sinks", "lengths", "scale"])
def test_torch_function_is_called(argument):
    given = {"query": torch.randn(1, 2, 4, 8), "key": torch.randn(1, 2, 6, 8), "value": torch.randn(1, 2, 6, 8),
             "attn_mask": torch.zeros(4, 6), "sinks": torch.zeros(2), "lengths": torch.tensor([3]),
             "scale": torch.tensor(0.5)}
    given[argument] = given[argument].as_subclass(Answering)
    assert attention(**given, rule="paper") == ("attention", "paper")
    assert softmax(torch.zeros(3).as_subclass(Answering), rule="paper") == ("softmax", "paper")
    assert softmax(torch.zeros(3), where=torch.ones(3).bool().as_subclass(Answering)) == ("softmax", None)


def test_a_class_that_passes_everything_on():
    x = torch.randn(1, 2, 4, 8)
    found = softmax(x.as_subclass(Passing))
    assert type(found) is Passing and torch.equal(found.as_subclass(torch.Tensor), softmax(x))
    assert type(attention(x.as_subclass(Passing), x, x)) is Passing
    # As a mask it might stand for anything.
    mask = torch.ones(4, 4, dtype=torch.bool).as_subclass(Passing)
    with pytest.raises(TypeError, match="^attn_mask: is a Passing, .*as_subclass"):
        attention(x, x, x, mask)
    with pytest.raises(TypeError, match="^where: is a Passing, .*as_subclass"):
        softmax(x[..., :4], where=mask)
    assert torch.equal(attention(x, x, x, mask.as_subclass(torch.Tensor)), attention(x, x, x))
    assert torch.equal(attention(x, x, x, torch.nn.Parameter(torch.zeros(4, 4))), attention(x, x, x, torch.zeros(4, 4)))


X = torch.randn(4, 6)


@pytest.mark.filterwarnings("ignore")  # prototypes, all of them
@pytest.mark.parametrize("make, text", [
    (lambda: X.to_sparse(), "is sparse_coo"), (lambda: X.to_sparse_csr(), "is sparse_csr"),
    (lambda: X.to_mkldnn(), "is mkldnn"), (lambda: torch.nested.nested_tensor([X]), "is nested"),
    (lambda: torch.nested.nested_tensor([X], layout=torch.jagged), "is nested"),
    (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "its dtype is qint8"),
    (lambda: X.to("meta"), "is on the device meta"),
    (lambda: torch.masked.masked_tensor(X, X > 0), "is a MaskedTensor, must be a Tensor; give {}.get_data()")])
def test_what_is_not_memory_is_refused(make, text):
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    for name, call in (("input", softmax), ("attn_mask", lambda given: attention(q, k, k, given))):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(make())
        assert str(caught.value).startswith(f"{name}: {text.format(name)}")


def test_distributed_tensors_are_refused():
    distributed = pytest.importorskip("torch.distributed")
    tensor = pytest.importorskip("torch.distributed.tensor")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        given = tensor.distribute_tensor(X, mesh, [tensor.Shard(0)])
        with pytest.raises(TypeError, match=r"^input: is a DTensor, must be a Tensor; give input.to_local\(\)"):
            softmax(given)
        assert torch.equal(softmax(given.to_local()), softmax(X))
    finally:
        distributed.destroy_process_group()
