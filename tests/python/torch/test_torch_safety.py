"""Wrong arguments are refused by name; threads, forks and repeated calls change nothing."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from memory import growth

torch = pytest.importorskip("torch", minversion="2.6")
from whet.torch import attention, softmax


def refused(kind, name, function, *arguments, **options):
    """With and without a gradient to record: two roads."""
    for needs_gradient in (False, True):
        given = [a.clone().requires_grad_() if needs_gradient and isinstance(a, torch.Tensor)
                 and a.is_floating_point() and a.layout is torch.strided and not a.is_nested else a for a in arguments]
        with pytest.raises(kind) as caught:
            function(*given, **options)
        text = str(caught.value)
        assert text.startswith((f"{name}:", f"{name} ")), text


X = torch.randn(4, 6)
Q, K, V = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8)


@pytest.mark.parametrize("kind, name, arguments, options", [
    (TypeError, "input", ([1.0],), {}), (TypeError, "input", (None,), {}), (TypeError, "input", (X.int(),), {}),
    (TypeError, "input", (X.bool(),), {}), (TypeError, "input", (X.to(torch.complex64),), {}),
    (TypeError, "input", (X.to_sparse(),), {}), (TypeError, "input", (torch.nested.nested_tensor([X, X]),), {}),
    (ValueError, "input", (X.to("meta"),), {}), (ValueError, "input", (torch.zeros((1,) * 9),), {}),
    (ValueError, "dim", (X, 2), {}), (ValueError, "dim", (X, -3), {}), (TypeError, "dim", (X, 0.5), {}),
    (TypeError, "dim", (X, None), {}), (TypeError, "where", (X,), {"where": X}),
    (ValueError, "where", (X,), {"where": torch.ones(4, 5, dtype=torch.bool)}),
    (ValueError, "where", (X,), {"where": torch.ones(1, 4, 6, dtype=torch.bool)}),
    (ValueError, "where", (X,), {"where": torch.ones(4, 6, dtype=torch.bool, device="meta")}),
    (TypeError, "rule", (X,), {"rule": 3}), (ValueError, "rule", (X,), {"rule": "sharp"})])
def test_softmax(kind, name, arguments, options):
    refused(kind, name, softmax, *arguments, **options)


@pytest.mark.parametrize("kind, name, arguments, options", [
    (TypeError, "query", (1, K, V), {}), (TypeError, "key", (Q, None, V), {}),
    (TypeError, "value", (Q, K, V.int()), {}),
    (ValueError, "query", (Q.to("meta"), K.to("meta"), V.to("meta")), {}),
    (ValueError, "value", (Q, K, V.to("meta")), {}),
    (ValueError, "query", (Q[0, 0, 0], K, V), {}), (ValueError, "key", (Q, K[..., :4], V), {}),
    (ValueError, "value", (Q, K, V[:, :, :4]), {}), (ValueError, "value", (Q, K, V.double()), {}),
    (ValueError, "key", (Q[:, :3], K, V), {}), (ValueError, "key", (Q, K[:, :3], V[:, :3]), {"enable_gqa": True}),
    (ValueError, "key", (Q.expand(2, -1, -1, -1), K.expand(3, -1, -1, -1), V), {}),
    (TypeError, "attn_mask", (Q, K, V, torch.ones(3, 5, dtype=torch.int64)), {}),
    (TypeError, "attn_mask", (Q, K, V, [[True]]), {}), (ValueError, "attn_mask", (Q, K, V, torch.zeros(3, 4)), {}),
    (ValueError, "attn_mask", (Q, K, V, torch.zeros(3, 5).double()), {}),
    (ValueError, "attn_mask", (Q, K, V, torch.ones(3, 4).bool()), {}),
    (ValueError, "attn_mask", (Q, K, V, torch.zeros(1, 1, 4, 3, 5)), {}),
    (ValueError, "attn_mask", (Q, K, V, torch.zeros(3, 5, device="meta")), {}),
    (ValueError, "dropout_p", (Q, K, V, None, 1.1), {}), (TypeError, "dropout_p", (Q, K, V, None, "0.1"), {}), (TypeError, "is_causal", (Q, K, V), {"is_causal": "yes"}),
    (TypeError, "enable_gqa", (Q, K, V), {"enable_gqa": 1}), (TypeError, "scale", (Q, K, V), {"scale": "1"}),
    (ValueError, "scale", (Q, K, V), {"scale": float("inf")}), (ValueError, "softcap", (Q, K, V), {"softcap": -1.0}),
    (TypeError, "softcap", (Q, K, V), {"softcap": "3"}), (ValueError, "sinks", (Q, K, V), {"sinks": torch.zeros(3)}),
    (TypeError, "sinks", (Q, K, V), {"sinks": [0.0] * 4}), (TypeError, "window", (Q, K, V), {"window": "3"}),
    (TypeError, "window", (Q, K, V), {"window": (1, 2, 3)}), (ValueError, "window", (Q, K, V), {"window": (-2, 0)}),
    (ValueError, "align", (Q, K, V), {"align": "middle"}),
    (TypeError, "lengths", (Q, K, V), {"lengths": torch.ones(1)}),
    (ValueError, "lengths", (Q, K, V), {"lengths": torch.tensor([6])}), (TypeError, "lengths", (Q, K, V), {"lengths": 3}),
    (TypeError, "lengths", (Q, K, V), {"lengths": [2.5]}), (TypeError, "lengths", (Q, K, V), {"lengths": ["2"]}),
    (ValueError, "lengths", (Q, K, V), {"lengths": [2, 2]}), (TypeError, "window", (Q, K, V), {"window": (2, "3")}),
    (ValueError, "scale", (Q, K, V), {"scale": torch.ones(1)}), (TypeError, "scale", (Q, K, V), {"scale": X.bool()[0, 0]}),
    (ValueError, "scale", (Q, K, V), {"scale": torch.ones((), device="meta")}),
    (ValueError, "key", (Q, K[:, :3], V[:, :2]), {"enable_gqa": True}),
    (ValueError, "value", (Q, K[:, :2], V[:, :3]), {"enable_gqa": True}),
    (ValueError, "rule", (Q, K, V), {"rule": ["paper"] * 3}), (TypeError, "rule", (Q, K, V), {"rule": [1] * 4}),
    (TypeError, "return_stats", (Q, K, V), {"return_stats": 1})])
def test_attention(kind, name, arguments, options):
    refused(kind, name, attention, *arguments, **options)


def test_the_device_is_named_with_what_to_do():
    with pytest.raises(ValueError, match="is on the device meta; whet works on the CPU, so give input.cpu()"):
        softmax(torch.empty(3, device="meta"))


def test_same_bits_from_many_threads_and_every_time():
    x = torch.randn(50, 700, requires_grad=True)
    q, k, v = torch.randn(3, 1, 4, 40, 16, requires_grad=True).unbind()

    def work(_=0):
        weights, out = softmax(x, rule="target-entropy:0.5"), attention(q, k, v, rule="paper", is_causal=True)
        gradients = torch.autograd.grad(weights.square().sum() + out.square().sum(), (x, q, k, v))
        with torch.no_grad():
            again = softmax(x, rule="target-entropy:0.5"), attention(q, k, v, rule="paper", is_causal=True)
        return [weights, out, *gradients, *again]

    expected = work()
    assert torch.equal(expected[0], expected[-2]) and torch.equal(expected[1], expected[-1])
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(24)):
            assert all(map(torch.equal, found, expected))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((64, 512), float(i)) + torch.arange(512) / 100
        q = x.reshape(1, 4, 128, 64)
        return softmax(x, rule="paper"), attention(q, q, q, rule="paper")


def test_workers_that_were_forked():
    """After this process's own threads have started."""
    expected = [Rows()[i] for i in range(8)]
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork",
                                         timeout=60)
    for found, (weights, out) in zip(loader, expected):
        assert torch.equal(found[0], weights) and torch.equal(found[1], out)


MEMORY = """
import torch
from whet.torch import attention, softmax
x, q = torch.randn(2, 16), torch.randn(1, 2, 4, 8, requires_grad=True)

def calls(count):
    for i in range(count // 10):
        for _ in range(8):
            softmax(x, rule="paper")
        attention(q.detach(), q.detach(), q.detach(), return_stats=True)
        try:
            softmax(x, 7)
        except ValueError:
            pass
        if i % 10 == 0:
            attention(q, q, q, rule="paper").sum().backward()
"""


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory")
def test_memory_is_stable():
    assert growth(MEMORY) < 500_000, "5 bytes a call"
