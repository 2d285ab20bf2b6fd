"""One process of a group: distributed_cases.py RANK PROCESSES STORE CASE..."""

import datetime
import os
import sys

import torch
import torch.distributed as dist
from whet.torch import attention as whole_attention
from whet.torch.distributed import attention

RANK, PROCESSES = int(sys.argv[1]), int(sys.argv[2])
CLOSE = dict(rtol=1e-3, atol=1e-4)  # a search ends within 1e-6 of its target
RULES = ["none", "paper", "log-length:8", "fixed:1.7", "target-entropy:0.7", "target-peak:0.6"]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cuts(keys):
    """Uneven shards, one of them empty where there are enough processes."""
    bounds = [0, *(keys * (i + 1) // (PROCESSES + 2) for i in range(1, PROCESSES)), keys]
    if PROCESSES > 2:
        bounds[2] = bounds[1]
    return bounds


class Problem:
    """The same on all processes, with the slices of this one."""

    def __init__(self, n=9, m=41, batch=2, heads=4, key_heads=2, d=5, e=3, dtype=torch.float32, bounds=None):
        self.query, self.key, self.value = (drawn(batch, h, rows, size, dtype=dtype, seed=seed) for seed, (h, rows, size)
                                            in enumerate([(heads, n, d), (key_heads, m, d), (key_heads, m, e)]))
        self.grad = drawn(batch, heads, n, e, dtype=dtype, seed=3)
        bounds = bounds or cuts(m)
        self.mine = slice(bounds[RANK], bounds[RANK + 1])

    def check(self, close=None, whole=None, **options):
        """Output and gradients of all processes against those of one."""
        close = close or CLOSE
        along = {"query": self.query, "key": self.key, "value": self.value, **(whole or {})}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in along.items()}
        plain = {name: value for name, value in options.items() if name != "keep_logits"}
        expected = whole_attention(**leaves, enable_gqa=True, **plain)
        gradients = dict(zip(leaves, torch.autograd.grad(expected, leaves.values(), self.grad)))
        cut = {name: self.cut(name, tensor).clone().requires_grad_() for name, tensor in along.items()}
        hidden = {name: self.cut(name, tensor) for name, tensor in options.items() if name == "attn_mask"}
        out = attention(**cut, **{**options, **hidden})
        torch.testing.assert_close(out, expected.detach(), **close)
        found = dict(zip(cut, torch.autograd.grad(out, cut.values(), self.grad)))
        for name in cut:
            torch.testing.assert_close(found[name], self.cut(name, gradients[name]), msg=lambda text, name=name:
                                       f"{name}, {options}: {text}", **close)

    def cut(self, name, tensor):
        if name in ("key", "value"):
            return tensor[:, :, self.mine]
        return tensor[..., self.mine] if name == "attn_mask" and tensor.shape[-1] > 1 else tensor


def rules():
    for rule in [*RULES, [*RULES[:3], RULES[4]]]:
        Problem().check(rule=rule)
        Problem().check(rule=rule, hold_beta=True)


def options():
    for given in (dict(is_causal=True, align="end"), dict(softcap=2.0), dict(window=(9, 5)), dict(scale=0.3),
                  dict(is_causal=True), dict(normalizer="hard")):
        for rule in ("none", "paper", "target-peak:0.6"):
            Problem().check(rule=rule, **given)
    visible = drawn(1, 1, 9, 41, seed=5) > -0.5
    visible[..., 2, :] = False
    Problem().check(rule="paper", attn_mask=visible)
    Problem(m=2).check(rule="fixed:2", is_causal=True, align="end", whole={"sinks": drawn(4, seed=7)})  # many see that sink alone
    for rule in ("none", "fixed:2", "paper", "target-entropy:1.2"):
        Problem().check(rule=rule, whole={"attn_mask": drawn(1, 4, 9, 41, seed=6)})
        Problem().check(rule=rule, whole={"sinks": drawn(4, seed=7), "query_scale": drawn(1, 4, 9, seed=8).abs()})
    Problem().check(rule="fixed:1.7", is_causal=True, whole={"sinks": drawn(4, seed=7)})  # the first row has one key


def thresholds():
    """Normalizers whose rows have a threshold that all keys decide."""
    for normalizer in ("sparsemax", "entmax15", "entmax:1.3"):
        for rule in ("none", "paper", "target-entropy:0.7"):
            Problem().check(rule=rule, normalizer=normalizer)
        Problem().check(rule="paper", normalizer=normalizer, hold_beta=True)
        Problem().check(rule="paper", normalizer=normalizer, whole={"sinks": drawn(4, seed=7)}, is_causal=True, align="end")
        Problem(n=1, m=700).check(normalizer=normalizer, is_causal=True, align="end")
        Problem(n=60, m=200).check(normalizer=normalizer, keep_logits=200 * 2 * 4 * 4 * 25)
        Problem(n=60, m=200).check(normalizer=normalizer, keep_logits=0)
        exact = dict(rtol=1e-9, atol=1e-11)
        Problem(dtype=torch.float64).check(rule="paper", normalizer=normalizer, close=exact)
        Problem(dtype=torch.bfloat16).check(rule="paper", normalizer=normalizer, close=dict(rtol=4e-2, atol=4e-2))


def uneven():
    for m in (1, 2, 7, 300):
        for rule in ("none", "paper", "target-entropy:0.9"):
            Problem(m=m).check(rule=rule)


def one_key_at_all():
    for holder in range(PROCESSES):
        Problem(m=1, bounds=[0] * (holder + 1) + [1] * (PROCESSES - holder)).check(rule="paper")


def blocks():
    """Logits that are kept change no bit beside those that are computed again; queries may go a few at a time."""
    for options in (dict(rule="target-entropy:0.7"), dict(rule="paper", is_causal=True, window=(30, None)),
                    dict(rule="paper", is_causal=True, align="end", whole={"query_scale": drawn(2, 4, 60, seed=9).abs()})):
        problem = Problem(n=60, m=200)
        more = options.pop("whole", {})
        mask = problem.cut("attn_mask", drawn(1, 1, 60, 200, seed=5) > -1)
        found = [attention(problem.query, problem.cut("key", problem.key), problem.cut("value", problem.value), mask,
                           keep_logits=size, **more, **options) for size in (0, 200 * 2 * 4 * 4 * 7, 1 << 20)]
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)  # a few queries go another way, as always
        problem.check(whole=more, keep_logits=200 * 2 * 4 * 4 * 25, **options)


def float64_and_bfloat16():
    for rule in ("none", "paper", "target-entropy:0.7"):
        exact = dict(rtol=1e-4, atol=1e-5) if "target" in rule else dict(rtol=1e-9, atol=1e-11)
        Problem(dtype=torch.float64).check(rule=rule, close=exact)
        Problem(dtype=torch.bfloat16).check(rule=rule, close=dict(rtol=4e-2, atol=4e-2))


def sharded_queries():
    """Each process has its part of both; a causal mask then hides most keys of the later ones."""
    for n, rule in ((40, "paper"), (PROCESSES, "none"), (7, "target-entropy:0.5")):
        whole = Problem(n=n, m=n)
        bounds = cuts(n)
        own = slice(bounds[RANK], bounds[RANK + 1])
        leaves = [tensor.clone().requires_grad_() for tensor in (whole.query, whole.key, whole.value)]
        expected = whole_attention(*leaves, is_causal=True, rule=rule, enable_gqa=True)
        gradients = torch.autograd.grad(expected, leaves, whole.grad)
        parts = [tensor[:, :, own].clone().requires_grad_() for tensor in (whole.query, whole.key, whole.value)]
        out = attention(*parts, is_causal=True, rule=rule, shard_queries=True)
        torch.testing.assert_close(out, expected[:, :, own].detach(), **CLOSE)
        for found, wanted in zip(torch.autograd.grad(out, parts, whole.grad[:, :, own]), gradients):
            torch.testing.assert_close(found, wanted[:, :, own], **CLOSE)


def decoding():
    for rule in RULES:
        Problem(n=1, m=700).check(rule=rule, is_causal=True, align="end")


def disagreement():
    """Every process says what differs, and where; the next call works."""
    problem = Problem()
    key, value = problem.cut("key", problem.key), problem.cut("value", problem.value)
    last = RANK == PROCESSES - 1
    wrong = [(dict(rule="paper" if last else "none"), f"rule: is ['paper'] on rank {PROCESSES - 1} and ['none'] on rank 0"),
             (dict(query=problem.query[:1] if last else problem.query), "query: is (1, 4, 9, 5) of float32 on rank"),
             (dict(value=value.double() if last else value), "value: is "),
             (dict(value=value[:, :, :-1] if last else value), "value: has "),
             (dict(scale=0.5 if last else None), "scale: is 0.5 on rank"),
             (dict(window=3 if last else None), "window: is 3 on rank")]
    for change, text in wrong:
        try:
            attention(**{"query": problem.query, "key": key, "value": value, **change})
        except ValueError as error:
            assert str(error).startswith(text), str(error)
        else:
            raise AssertionError(f"accepted {list(change)}")
    for change, text in ((dict(query=problem.query[0]), "query: has 3 dimensions"), (dict(normalizer="top-k:3"),
                         "normalizer: is 'top-k:3'"), (dict(align="middle"), "align: is 'middle'"),
                         (dict(rule=["none"] * 3), "rule: 3 given"), (dict(key=None), "key: is a NoneType")):
        try:
            attention(**{"query": problem.query, "key": key, "value": value, **change})
        except (TypeError, ValueError) as error:
            assert str(error).startswith(text), str(error)
        else:
            raise AssertionError(f"accepted {list(change)}")
    problem.check(rule="paper")


def dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (PROCESSES,))
    whole = Problem(n=4 * PROCESSES, m=8 * PROCESSES)

    def mine(tensor, placement):
        return tensor.chunk(PROCESSES, 2)[RANK] if placement == Shard(2) else tensor

    for placement, sharded in ((Replicate(), False), (Shard(2), True)):
        places = placement, Shard(2), Shard(2)
        tensors = whole.query, whole.key, whole.value
        given = [DTensor.from_local(mine(tensor, where).clone(), mesh, [where], run_check=False).requires_grad_()
                 for tensor, where in zip(tensors, places)]
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attention(*given, rule="paper", shard_queries=sharded)
        assert isinstance(out, DTensor) and tuple(out.placements) == (placement,) and out.shape == whole.grad.shape
        expected = whole_attention(*leaves, rule="paper", enable_gqa=True)
        torch.testing.assert_close(out.to_local(), mine(expected, placement), **CLOSE)
        out.backward(DTensor.from_local(mine(whole.grad, placement), mesh, [placement], run_check=False))
        expected.backward(whole.grad)
        for found, leaf, where in zip(given, leaves, places):
            assert tuple(found.grad.placements) == (where,)
            torch.testing.assert_close(found.grad.to_local(), mine(leaf.grad, where), **CLOSE)
    for wrong, text in (((given[0], given[1], whole.value), "value: is a Tensor, must be a DTensor as the others"),
                        ((given[1], given[1], given[1], None, False, None), "")):
        try:
            attention(*wrong, shard_queries=bool(text))
        except (TypeError, ValueError) as error:
            assert str(error).startswith(text or "query: its placements are (Shard(dim=2),), must be (R,)"), str(error)
        else:
            raise AssertionError("accepted")


def training():
    """A layer on sequences that each process has a part of: the same losses as on one."""
    def losses(parts):
        torch.manual_seed(0)
        layer, out = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)
        weights = [*layer.parameters(), *out.parameters()]
        optimizer = torch.optim.SGD(weights, 0.5)
        x, y = drawn(2, 24, 12, seed=1), drawn(2, 24, 12, seed=2)
        own = slice(24 * RANK // PROCESSES, 24 * (RANK + 1) // PROCESSES) if parts else slice(None)
        found = []
        for _ in range(4):
            q, k, v = layer(x[:, own]).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            if parts:
                mixed = attention(q, k, v, is_causal=True, rule="paper", shard_queries=True)
            else:
                mixed = whole_attention(q, k, v, is_causal=True, rule="paper")
            loss = (out(mixed.transpose(1, 2).flatten(2)) - y[:, own]).square().sum() / 100
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            if parts:
                for weight in weights:
                    dist.all_reduce(weight.grad)
                dist.all_reduce(total)
            optimizer.step()
            found.append(total.item())
        return found

    torch.testing.assert_close(torch.tensor(losses(True)), torch.tensor(losses(False)), rtol=1e-5, atol=0)


def death():
    problem = Problem()
    key, value = problem.cut("key", problem.key), problem.cut("value", problem.value)
    for step in range(1000):
        if RANK == 1 and step == 20:
            os._exit(7)
        try:
            attention(problem.query, key, value, rule="paper")
        except RuntimeError as error:
            print("ended:", str(error).splitlines()[0])
            sys.stdout.flush()
            os._exit(7)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], PROCESSES), rank=RANK, world_size=PROCESSES,
                            timeout=datetime.timedelta(seconds=30))
    for name in sys.argv[4:]:
        globals()[name]()
        print(name, flush=True)
    dist.barrier()
    os._exit(0)  # threads of gloo that see others leave may still end a process that is done


if __name__ == "__main__":
    main()
