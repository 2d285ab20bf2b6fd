"""Attention whose keys and values lie on several processes of torch.distributed, with autograd.

>>> from whet.torch.distributed import attention
>>> out = attention(query, key_shard, value_shard, rule="paper", is_causal=True)  # doctest: +SKIP

Every process holds a contiguous range of the keys, in the order of their ranks, and of any number. Processes exchange a
few numbers per row and partial sums of the output; keys and values stay where they are, and no matrix of all pairs is
ever stored. Works on any backend that gathers and reduces tensors on the CPU, such as gloo.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from whet import _core
from whet._arguments import Window, flag, window_sides
from whet.rules import RuleLike, rule_names
from whet.torch._tensors import FLOATS, by_address, by_addresses, call, check, check_device, check_mask, with_file_read

__all__ = ["attention"]

_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal",
          "window_left": "window", "window_right": "window", "dout": "grad"}
_STATE, _SCALE, _WEIGHED, _SUMS, _THRESHOLD, _GRADIENT, _SLOPE = 6, 3, 4, 5, 3, 9, 13  # numbers of a record
_MAX, _Z, _T = 2, 3, 4  # places in a state
_FEW = 16  # rows that share their keys, up to which nothing is packed
_GATHERED = 8192  # numbers that are gathered rather than reduced: one exchange less


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
              scale: float | None = None, *, group: Any = None, shard_queries: bool = False,
              rule: RuleLike | Sequence[RuleLike] = None, normalizer: str = "softmax", softcap: float | None = 0.0,
              sinks: Tensor | None = None, window: Window = None, align: str = "start", query_scale: Tensor | None = None,
              hold_beta: bool = False, keep_logits: int = 256 << 20) -> Tensor:
    """whet.torch.attention over the keys of all processes of a group. Every process calls it.

    Args:
        query: (B, H, N, D), the same on every process; with shard_queries, its own.
        key, value: (B, K, M, D) and (B, K, M, E), the keys of this process and their values; K divides H. M may differ
            between processes, and be 0. DTensors work too: `query` replicated, or sharded along its third dimension,
            `key` and `value` sharded along it, one for each process.
        attn_mask: broadcast to (B, H, N, M), for the keys of this process and all queries: boolean, or floats that are
            added to the logits and have a gradient.
        is_causal, scale, rule, softcap, sinks, window, align, query_scale, hold_beta: as in whet.torch.attention, of
            the attention over all keys, and the same on every process.
        group: the processes. Default: all.
        shard_queries: queries, too, are cut in the order of ranks, and each process gets the output of its own. They
            are gathered, and the outputs scattered. query_scale is then of all queries.
        normalizer: "softmax", "hard", "sparsemax", "entmax15" or "entmax:A"; the others need more of a row than processes
            exchange.
        keep_logits: bytes in which the search for a beta or a threshold may keep the logits of some queries at a time, so
            that they needn't be computed again after each step. The same on every process.

    Returns:
        The output (B, H, N, E), the same on every process; with shard_queries, that of its own queries. Backward
        expects the gradient of that: where the output is the same everywhere, so is its gradient. Every process then
        has the gradient to the queries that it gave, to sinks and query_scale, and to its own keys and values.

    Raises:
        TypeError, ValueError: naming the argument; where processes disagree, on all of them, with the rank.
    """
    local, layout = _local(query, key, value, shard_queries)
    group = group if layout is None else layout.group(group)
    settings = _settings(*local, attn_mask, sinks, query_scale, is_causal=is_causal, scale=scale, rule=rule,
                         normalizer=normalizer, softcap=softcap, window=window, align=align, hold_beta=hold_beta)
    mask, bias = (attn_mask, None) if attn_mask is None or attn_mask.dtype == torch.bool else (None, attn_mask)
    settings["keep_logits"] = int(keep_logits)
    shard = _agree(local, bias, sinks, query_scale, settings, shard_queries, group)
    run = _Run(group, shard, settings, shard_queries, settings.pop("keep_logits"))
    out: Tensor = _Attention.apply(run, *local, mask, bias, sinks, query_scale)
    return out if layout is None else layout.wrapped(out)


class _Shard(NamedTuple):
    """What this process has of the keys and, if they are cut, of the queries."""

    first_key: int
    keys: list[int]  # how many each process has
    queries: list[int]


class _Run(NamedTuple):
    """One call."""

    group: Any
    shard: _Shard
    settings: dict[str, Any]
    shard_queries: bool
    keep_logits: int


class _Row(NamedTuple):
    """What forward leaves of the rows, in the order of attention's rows, the same on every process."""

    states: Tensor  # (B, H, N, 6) int64
    weighed: Tensor  # (B, H, N, 4): maximum, beta, mean, threshold
    mass: Tensor  # (B, H, N)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                bias: Tensor | None, sinks: Tensor | None, query_scale: Tensor | None) -> Tensor:
        sides = _Sides(mask, bias, sinks, query_scale)
        queries = _gathered(query, run) if run.shard_queries else query
        row, sums = _forward(run, queries, key, value, sides)
        exact = sums / row.mass[..., None].to(sums.dtype).clamp(min=torch.finfo(sums.dtype).tiny)
        ctx.run = run
        ctx.save_for_backward(query, key, value, mask, bias, sinks, query_scale, *row, exact)
        out = _own(exact, run) if run.shard_queries else exact
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, mask, bias, sinks, query_scale, states, weighed, mass, exact = ctx.saved_tensors
        run, sides, row = ctx.run, _Sides(mask, bias, sinks, query_scale), _Row(states, weighed, mass)
        queries, dout = (_gathered(tensor, run) if run.shard_queries else tensor for tensor in (query, grads[0]))
        wanted = dict(zip(("dq", "dk", "dv", "dbias", "dsinks", "dquery_scale"),
                          (*ctx.needs_input_grad[1:4], *ctx.needs_input_grad[5:])))
        found = _backward(run, queries, key, value, dout.contiguous(), sides, row, exact, wanted)
        dq = found["dq"]
        if dq is not None:
            dq = (_own(dq, run) if run.shard_queries else dq).to(query.dtype)
        return (None, dq, found["dk"], found["dv"], None, found["dbias"], _as(found["dsinks"], sinks),
                _as(found["dquery_scale"], query_scale))


class _Sides(NamedTuple):
    mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    query_scale: Tensor | None

    def addresses(self) -> dict[str, Any]:
        return by_addresses(**self._asdict())

    def of(self, queries: slice) -> _Sides:
        """Those of some queries."""
        def cut(tensor: Tensor | None) -> Any:
            return tensor if tensor is None or tensor.shape[2] == 1 else tensor[:, :, queries]

        return _Sides(cut(self.mask), cut(self.bias), self.sinks, cut(self.query_scale))


def _forward(run: _Run, query: Tensor, key: Tensor, value: Tensor, sides: _Sides) -> tuple[_Row, Tensor]:
    """The rows, and the sums of weighted values of all processes, not normalised."""
    betas = None if _has_threshold(run) else _known_betas(run.settings["rule"], query, sides.sinks is not None)
    if betas is None:
        return _forward_in_two(run, query, key, value, sides)
    return _forward_in_one(run, query, key, value, sides, betas)


def _known_betas(rules: Sequence[str], query: Tensor, sinks: bool) -> Tensor | None:
    """Where no state decides beta: that of every row. Where a row has one key, fixed is 1, which only a sink shows."""
    known = []
    for rule in rules:
        name, _, parameter = rule.partition(":")
        if name != "none" and (name != "fixed" or sinks):
            return None
        known.append(float(parameter or 1))
    return torch.tensor(known, dtype=torch.float64)[:, None].expand(query.shape[:3]).contiguous()


def _forward_in_one(run: _Run, query: Tensor, key: Tensor, value: Tensor, sides: _Sides,
                    betas: Tensor) -> tuple[_Row, Tensor]:
    """One pass over the keys, measured from the maximum of each process, and one exchange; two with many rows, of which
    sums are reduced rather than gathered."""
    rows, size, arithmetic = query.shape[:3], value.shape[3], _arithmetic(query)
    states, masses = torch.empty((*rows, _STATE), dtype=torch.int64), torch.empty(rows, dtype=torch.float64)
    out = torch.empty((*rows, size), dtype=arithmetic)
    q, k, v = (by_address(tensor) for tensor in (query, key, value))
    call(_core.shard_partial_attention, _NAMES, q, k, v, by_address(betas), by_address(out), by_address(states),
         by_address(masses), **_shared(run), **sides.addresses())
    gathers = masses.numel() * (size + 7) <= _GATHERED
    own = states.view(torch.float64)
    everyone = _all(torch.cat([own, masses[..., None], out.to(torch.float64)], -1) if gathers else own, run.group)
    found = [one[..., :_STATE].contiguous().view(torch.int64) for one in everyone]
    merged = found[0].clone()
    for other in found[1:]:
        _core.merge(by_address(merged), by_address(other), by_address(merged))
    top = merged.view(torch.float64)[..., _MAX]

    def factor(states: Tensor) -> Tensor:
        own = states.view(torch.float64)[..., _MAX]
        largest = (own == top).to(torch.float64)
        if run.settings["normalizer"] == "hard":
            return largest
        return torch.where((own == top) | (own == -math.inf), largest, (betas * (own - top)).exp())

    if gathers:
        sums = torch.stack([one[..., _STATE:] * factor(states)[..., None] for one, states in zip(everyone, found)]).sum(0)
        mass, total = sums[..., 0].contiguous(), sums[..., 1:].to(arithmetic)
    else:
        sums = torch.cat([out, masses[..., None].to(arithmetic)], -1) * factor(states)[..., None].to(arithmetic)
        dist.all_reduce(sums, group=run.group)
        mass, total = sums[..., size].to(torch.float64).contiguous(), sums[..., :size]
    means = (merged.view(torch.float64)[..., _T] / merged.view(torch.float64)[..., _Z]).nan_to_num()
    return _Row(merged, torch.stack([top, betas, means, torch.zeros_like(top)], -1), mass), total


def _forward_in_two(run: _Run, query: Tensor, key: Tensor, value: Tensor, sides: _Sides) -> tuple[_Row, Tensor]:
    """States first, then weights. Where logits are kept from one exchange to the next, queries are taken in blocks; keys are
    packed once for all of them."""
    rows, arithmetic = query.shape[:3], _arithmetic(query)
    states = torch.empty((*rows, _STATE), dtype=torch.int64)
    weighed = torch.empty((*rows, _WEIGHED), dtype=torch.float64)
    size = value.shape[3]
    sums = torch.empty((*rows, size + 1), dtype=arithmetic)  # the last is the mass
    step = _block(run, query, key.shape[1])
    logits = torch.empty((*rows[:2], min(step, rows[2]), key.shape[2]), dtype=arithmetic) if step > 0 else None
    packed = _core.PackedShard()
    for begin in range(0, rows[2], step or rows[2]):
        block = slice(begin, begin + (step or rows[2]))
        own, beside = query[:, :, block], sides.of(block)
        options = {**_shared(run), **beside.addresses(), "first_query": begin, "all_queries": rows[2], "packed": packed}
        if logits is not None:
            kept = logits[:, :, :own.shape[2]]
            options |= by_addresses(logits=kept)
        q, k, v = (by_address(tensor) for tensor in (own, key, value))
        merged = torch.empty((*own.shape[:3], _STATE), dtype=torch.int64)
        call(_core.shard_states, _NAMES, q, k, by_address(merged), **options)
        merged, *others = _all(merged, run.group)
        for other in others:  # in the order of ranks, so that every process has the same bits
            _core.merge(by_address(merged), by_address(other), by_address(merged))
        scales, means = _scales(run, merged, q, k, options)
        if _has_threshold(run):
            _find_thresholds(run, merged, scales, q, k, options, arithmetic == torch.float64)
        masses = torch.empty(own.shape[:3], dtype=torch.float64)
        call(_core.shard_attention, _NAMES, q, k, v, by_address(scales), by_address(sums[:, :, block, :size]),
             by_address(masses), **options)
        states[:, :, block], sums[:, :, block, size] = merged, masses.to(arithmetic)
        weighed[:, :, block] = torch.stack([*scales[..., :2].unbind(-1), means, scales[..., 2]], -1)
    dist.all_reduce(sums, group=run.group)
    return _Row(states, weighed, sums[..., size].to(torch.float64).contiguous()), sums[..., :size]


def _block(run: _Run, query: Tensor, key_heads: int) -> int:
    """Queries whose logits are kept; 0: none, and products are computed again, which takes no longer than to write and read
    them. A search would compute them in every step, and few queries would read all keys again."""
    batch, heads, queries, _ = query.shape
    few = queries * (heads // max(1, key_heads)) <= _FEW
    if not few and not _has_threshold(run) and not any(_searches(rule) for rule in run.settings["rule"]):
        return 0
    return min(queries, run.keep_logits // max(1, batch * heads * max(run.shard.keys) * _arithmetic(query).itemsize))


def _scales(run: _Run, merged: Tensor, q: Any, k: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Maximum and beta of every row with a place for its threshold, and a number near the mean of y = x - max under its
    weights."""
    numbers = merged.view(torch.float64)
    top = numbers[..., _MAX]
    scales = torch.zeros((*top.shape, _SCALE), dtype=torch.float64)
    scales[..., 0], scales[..., 1] = top, 1
    means = (numbers[..., _T] / numbers[..., _Z]).nan_to_num()
    searches = []
    for heads, rule in _by_rule(run.settings["rule"], merged.shape[1]):
        states = merged[:, heads].contiguous()
        betas = torch.empty(states.shape[:3], dtype=torch.float64)
        if _searches(rule):
            searches.append((heads, _core.BetaSearches(rule, by_address(states)), betas))
        else:
            _core.betas(by_address(states), by_address(betas), rule)
            scales[:, heads, :, 1] = betas
    while searches:
        done = [search.betas(by_address(betas)) for _, search, betas in searches]
        for heads, _, betas in searches:
            scales[:, heads, :, 1] = betas
        if all(done):
            break
        sums = torch.empty((*merged.shape[:3], _SUMS), dtype=torch.float64)
        call(_core.shard_sums, _NAMES, q, k, by_address(scales), by_address(sums), **options)
        added = _total(sums, run.group)
        for heads, search, _ in searches:
            own = added[:, heads].contiguous()
            search.absorb(by_address(own))
            means[:, heads] = (own[..., 1] / own[..., 0]).nan_to_num()
    return scales, means


def _find_thresholds(run: _Run, merged: Tensor, scales: Tensor, q: Any, k: Any, options: dict[str, Any],
                     wide: bool) -> None:
    """Puts the threshold of every row into its scale. `wide`: arithmetic is in float64."""
    betas, taus = scales[..., 1].contiguous(), torch.empty(merged.shape[:3], dtype=torch.float64)
    search = _core.ThresholdSearches(run.settings["normalizer"], by_address(merged), by_address(betas), wide)
    while True:
        done = search.taus(by_address(taus))
        scales[..., 2] = taus
        if done:
            return
        sums = torch.empty((*merged.shape[:3], _THRESHOLD), dtype=torch.float64)
        call(_core.shard_threshold_sums, _NAMES, q, k, by_address(scales), by_address(sums), **options)
        added = _total(sums, run.group)
        search.absorb(by_address(added))


def _backward(run: _Run, query: Tensor, key: Tensor, value: Tensor, dout: Tensor, sides: _Sides, row: _Row,
              exact: Tensor, wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """Gradients by name; those of queries, sinks and query_scale are of all processes."""
    options = {**_shared(run), **sides.addresses()}
    q, k, v, g = (by_address(tensor) for tensor in (query, key, value, dout))
    rules, hold = run.settings["rule"], run.settings["hold_beta"]
    sums = torch.zeros((*query.shape[:3], _GRADIENT), dtype=torch.float64)
    groups = list(_by_rule(rules, query.shape[1]))
    betas = {rule: row.weighed[:, heads, :, 1].contiguous() for heads, rule in groups}
    threshold = _has_threshold(run)
    if threshold or any(_core.betas_move(by_address(found), rule, hold) for rule, found in betas.items()):
        call(_core.shard_gradient_sums, _NAMES, q, k, v, g, by_address(row.weighed), by_address(sums), **options)
        count = _GRADIENT if threshold else _SUMS  # the others are 0
        sums[..., :count] = _total(sums[..., :count], run.group)
    else:
        sums[..., 0] = row.mass * (dout.to(torch.float64) * exact).sum(-1)
    slopes = torch.empty((*query.shape[:3], _SLOPE), dtype=torch.float64)
    for heads, rule in groups:
        parts = [tensor[:, heads].contiguous() for tensor in (row.states, row.weighed, row.mass, sums, slopes)]
        states, weighed, mass, added, to = (by_address(part) for part in parts)
        _core.row_slopes(states, weighed, mass, added, to, rule, hold)
        slopes[:, heads] = parts[-1]
    buffers = _buffers(query, key, value, sides, wanted)
    call(_core.shard_backward, _NAMES, q, k, v, g, by_address(slopes), **by_addresses(**buffers), **options)
    for name in ("dq", "dsinks", "dquery_scale"):
        if (part_of := buffers[name]) is not None:
            dist.all_reduce(part_of, group=run.group)
    return buffers


def _buffers(query: Tensor, key: Tensor, value: Tensor, sides: _Sides,
             wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """What is a part of a sum is in the type of the arithmetic."""
    arithmetic = _arithmetic(query)
    kinds = {"dq": (query, arithmetic), "dk": (key, None), "dv": (value, None), "dbias": (sides.bias, None),
             "dsinks": (sides.sinks, arithmetic), "dquery_scale": (sides.query_scale, arithmetic)}
    return {name: torch.empty(like.shape, dtype=dtype or like.dtype) if wanted[name] and like is not None else None
            for name, (like, dtype) in kinds.items()}


# ---- arguments


def _settings(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, sinks: Tensor | None,
              query_scale: Tensor | None, *, is_causal: bool, scale: float | None,
              rule: RuleLike | Sequence[RuleLike], normalizer: str, softcap: float | None, window: Window, align: str,
              hold_beta: bool) -> dict[str, Any]:
    """Options as the extension takes them, once tensors are what they must be."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name}: has {tensor.dim()} dimensions, must have 4")
    if attn_mask is not None:
        check_mask(attn_mask, "attn_mask", (torch.bool, *FLOATS))
        if attn_mask.dim() != 4:
            raise ValueError(f"attn_mask: has {attn_mask.dim()} dimensions, must have 4")
    for name, side, axes in (("sinks", sinks, 1), ("query_scale", query_scale, 3)):
        if side is not None:
            check(side, name)
            if side.dim() != axes:
                raise ValueError(f"{name}: has {side.dim()} dimensions, must have {axes}")
    check_device(query=query, key=key, value=value, attn_mask=attn_mask, sinks=sinks, query_scale=query_scale)
    if align not in ("start", "end"):
        raise ValueError(f"align: is {align!r}, must be 'start' or 'end'")
    if normalizer not in ("softmax", "hard"):
        normalizer = _core.normalizer_name(normalizer)
        if not _core.needs_threshold(normalizer):
            raise ValueError(f"normalizer: is {normalizer!r}, must be 'softmax', 'hard', 'sparsemax', 'entmax15' or "
                             "'entmax:A', which processes can merge")
    names = rule_names(rule)
    rules = [with_file_read(name) for name in names] if isinstance(names, list) else [with_file_read(names or "none")]
    if len(rules) not in (1, query.shape[1]):
        raise ValueError(f"rule: {len(rules)} given, must be one per query head, {query.shape[1]}")
    left, right = window_sides(window, "window")
    return {"rule": rules, "normalizer": normalizer, "scale": None if scale is None else float(scale),
            "causal": flag(is_causal, "is_causal"), "align": align, "window_left": left, "window_right": right,
            "softcap": 0.0 if softcap is None else float(softcap), "hold_beta": flag(hold_beta, "hold_beta")}


_ARGUMENTS = {"causal": "is_causal", "window_left": "window", "window_right": "window"}


def _agree(local: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, sinks: Tensor | None, query_scale: Tensor | None,
           settings: dict[str, Any], shard_queries: bool, group: Any) -> _Shard:
    """Where this process stands among the others. A ValueError on all of them if they don't fit together."""
    query, key, value = local
    shapes = {name: None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))
              for name, tensor in (("query", query), ("key", key), ("value", value), ("sinks", sinks),
                                   ("query_scale", query_scale))}
    mine = {"shard_queries": shard_queries, "attn_mask": str(getattr(bias, "dtype", None)), **shapes, **settings}
    fits = [_comparable(name, given, shard_queries) for name, given in mine.items()]
    own_rows = key.shape[2] == value.shape[2]
    summary = torch.tensor([query.shape[2], key.shape[2], zlib.crc32(repr(fits).encode()), own_rows])
    everyone = torch.stack(_all(summary, group)).tolist()
    if any(other[2:] != [everyone[0][2], 1] for other in everyone):
        _refuse(mine, shard_queries, group)
    keys = [rows for _, rows, *_ in everyone]
    return _Shard(sum(keys[:dist.get_rank(group)]), keys, [rows for rows, *_ in everyone])


def _refuse(mine: dict[str, Any], shard_queries: bool, group: Any) -> None:
    """Says what differs, and where. On every process."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, other in enumerate(everyone):
        for name, given in other.items():
            first = everyone[0][name]
            if _comparable(name, given, shard_queries) != _comparable(name, first, shard_queries):
                raise ValueError(f"{_ARGUMENTS.get(name, name)}: is {_shown(given)} on rank {rank} and {_shown(first)} on "
                                 "rank 0, must fit")
        (*_, keys, _), (*_, values, _) = other["key"][0], other["value"][0]
        if keys != values:
            raise ValueError(f"value: has {values} rows on rank {rank}, must have those of key, {keys}")


def _comparable(name: str, given: Any, shard_queries: bool) -> Any:
    """What must be the same on all processes: not how many keys each has, nor queries that are cut."""
    if name in ("key", "value") or (name == "query" and shard_queries):
        shape, dtype = given
        return (*shape[:2], *shape[3:]), dtype
    return given


def _shown(given: Any) -> str:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple):
        return f"{given[0]} of {given[1].removeprefix('torch.')}"
    return repr(given)


def _shared(run: _Run) -> dict[str, Any]:
    options = {name: value for name, value in run.settings.items() if name not in ("rule", "hold_beta")}
    return {**options, "first_key": run.shard.first_key, "all_keys": sum(run.shard.keys)}


def _by_rule(rules: list[str], heads: int) -> list[tuple[list[int], str]]:
    """The heads that have each rule."""
    by_head = rules if len(rules) == heads else rules * heads
    return [([head for head in range(heads) if by_head[head] == rule], rule) for rule in dict.fromkeys(by_head)]


def _searches(rule: str) -> bool:
    return rule.startswith("target-")


def _has_threshold(run: _Run) -> bool:
    return run.settings["normalizer"] not in ("softmax", "hard")


def _arithmetic(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)


# ---- between processes


def _all(tensor: Tensor, group: Any) -> list[Tensor]:
    """The tensors of all processes, in the order of their ranks."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def _total(tensor: Tensor, group: Any) -> Tensor:
    """Their sum, added in that order: every process has the same bits."""
    return torch.stack(_all(tensor, group)).sum(0)


def _gathered(tensor: Tensor, run: _Run) -> Tensor:
    """The rows of all processes, along the third dimension."""
    most = max(run.shard.queries)
    padded = tensor.new_zeros((*tensor.shape[:2], most, tensor.shape[3]))
    padded[:, :, :tensor.shape[2]] = tensor
    parts = _all(padded, run.group)
    return torch.cat([part[:, :, :count] for part, count in zip(parts, run.shard.queries)], 2)


def _own(tensor: Tensor, run: _Run) -> Tensor:
    """The rows of this process."""
    rank = dist.get_rank(run.group)
    return tensor.narrow(2, sum(run.shard.queries[:rank]), run.shard.queries[rank]).contiguous()


# ---- DTensor


class _Layout(NamedTuple):
    """Where the DTensors of a call lie."""

    mesh: Any
    placement: Any  # of queries and output

    def group(self, given: Any) -> Any:
        if given is not None:
            raise ValueError("group: given, must not be with DTensors, whose mesh is it")
        return self.mesh.get_group()

    def wrapped(self, out: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(out, self.mesh, [self.placement])


def _local(query: Tensor, key: Tensor, value: Tensor,
           shard_queries: bool) -> tuple[tuple[Tensor, Tensor, Tensor], _Layout | None]:
    given: dict[str, Any] = {"query": query, "key": key, "value": value}
    if not any(type(tensor).__name__ == "DTensor" for tensor in given.values()):
        return (query, key, value), None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    wanted = {"query": Shard(2) if shard_queries else Replicate(), "key": Shard(2), "value": Shard(2)}
    for name, tensor in given.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name}: is a {type(tensor).__name__}, must be a DTensor as the others")
    for name, tensor in given.items():
        if tensor.device_mesh != given["key"].device_mesh or tensor.device_mesh.ndim != 1:
            raise ValueError(f"{name}: must lie on the one-dimensional mesh of the others")
        if tuple(tensor.placements) != (wanted[name],):
            raise ValueError(f"{name}: its placements are {tuple(tensor.placements)}, must be ({wanted[name]},)")
    query, key, value = (tensor.to_local() for tensor in given.values())
    return (query, key, value), _Layout(given["key"].device_mesh, wanted["query"])
