"""Attention over keys kept apart, piece by piece, for any transport.

Several devices, processes or files each hold a contiguous range of the keys and their values; together they give attention
over all keys, with two exchanges of a few numbers per row. Between the pieces of this module the caller exchanges what they
return:

1. Every shard finds the `states` of all rows over its keys; whet.merge joins those of all shards.
2. A `Search` gives from them the maximum and beta of every row. Rules with a target need an exchange more per step: every
   shard finds the `sums` at the search's rows, which add up.
3. With sparsemax, entmax15 and entmax:A a `ThresholdSearch` finds the threshold of every row in a few steps: every shard
   finds the `threshold_sums` at its rows, which add up.
4. Every shard computes `attention`, unnormalised; `merge_outputs` joins those of all shards.

And for gradients:

5. Every shard finds its `gradient_sums`, which add up. Where no beta follows the logits, and rows have no threshold
   (`beta_moves` says), `output_sums` are enough, without an exchange.
6. `slopes` are what a shard needs of each row for `backward`: gradients to its own keys, values and columns of a bias, and
   its parts of those to queries, sinks and query_scale, which add up.

Whoever merges or adds should do so in the same order everywhere: all then have the same bits. Options are those of
whet.attention without rule, with mask and bias cut to the columns of the shard; is_causal, window and lengths count the keys
of all shards. Packed sequences can't be cut, and normalizers are softmax, hard, sparsemax, entmax15 and entmax:A: the others
need more of a row.

>>> import numpy as np, whet
>>> from whet import shards
>>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4))          # heads, queries or keys, size
>>> cuts = [(0, k[:, :4], v[:, :4]), (4, k[:, 4:], v[:, 4:])]
>>> parts = [shards.states(q, key, first_key=first, all_keys=6) for first, key, _ in cuts]
>>> rows = shards.Search(whet.merge(*parts), "paper").rows
>>> outs, masses = zip(*(shards.attention(q, key, value, rows, first_key=first, all_keys=6) for first, key, value in cuts))
>>> bool(np.allclose(shards.merge_outputs(outs, masses), whet.attention(q, k, v, rule="paper")))
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from whet import _core
from whet._arguments import array, call, check_unmasked, flag, floats, four_axes, with_axes
from whet.attention import _NAMES, _options, _shaped
from whet.rows import STATE
from whet.rules import RuleLike, rule_names

__all__ = ["Gradients", "Search", "ShardOptions", "ThresholdSearch", "attention", "backward", "beta_moves",
           "gradient_sums", "merge_outputs", "output_sums", "slopes", "states", "sums", "threshold_sums"]

_WEIGHED, _SUMS, _THRESHOLD, _GRADIENT, _SLOPE = 4, 5, 3, 9, 13  # numbers of a record
_TAU = 3  # its place in a record of rows


class ShardOptions(TypedDict, total=False):
    """What the functions of a shard take by name; all but first_key and all_keys have defaults.

    The keys of the shard are [first_key, first_key + M) of all_keys. The queries of a call may be a part, too:
    [first_query, first_query + N) of all_queries (default: those of query), for whom is_causal, window, align and
    dropout are as in a call with all. ``logits``, (B, H, N, M) of the type of the arithmetic (float64 for float64, else
    float32), is where `states` leaves the logits for `sums` and `attention`, which compute them again without. The
    others are whet.attention's.
    """

    first_key: int
    all_keys: int
    first_query: int
    all_queries: int
    logits: np.ndarray | None
    normalizer: str
    scale: float | None
    is_causal: bool
    align: str
    window: Any
    mask: Any
    bias: Any
    lengths: Any
    softcap: float | None
    sinks: Any
    query_scale: Any
    dropout_p: float
    dropout_seed: int
    threads: int


class Gradients(NamedTuple):
    """What one shard finds. Whole: dkey, dvalue, dbias (columns of the shard; one column that all keys share is a part).
    Parts, which add up over shards: dquery, dsinks, dquery_scale, in the type of the arithmetic. None where nothing was
    given."""

    dquery: np.ndarray
    dkey: np.ndarray
    dvalue: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None
    dquery_scale: np.ndarray | None


def states(query: Any, key: Any, **options: Unpack[ShardOptions]) -> np.ndarray:
    """The states of all rows over the keys of this shard.

    Args:
        query, key: (B, H, N, D) of all shards alike, and (B, K, M, D) of this one; M may be 0. Both without batch (3 axes)
            or without batch and heads (2 axes) too.
        options: see ShardOptions.

    Returns:
        One whet.STATE per row, (B, H, N). whet.merge joins those of all shards into the states of whole rows.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    query, key = floats(query, "query"), floats(key, "key")
    given = _shard(query, options)
    out = np.empty(query.shape[:-1], STATE)
    call(_core.shard_states, _SHARD_NAMES, *four_axes(query=query, key=key), out.reshape(-1).view(np.int64), **given)
    return out


class Search:
    """The maximum and beta of every row from the merged states: at once for most rules, in steps for the two targets.

    Args:
        states: whet.STATE, the merged states of all shards, (B, H, N) or without leading axes.
        rule: a rule or its name, or a list with one per query head. Default: none.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import numpy as np, whet
    >>> from whet import shards
    >>> q, k = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> search = shards.Search(shards.states(q, k, first_key=0, all_keys=6), "target-entropy:0.5")
    >>> while not search.done:
    ...     search.absorb(shards.sums(q, k, search.rows, first_key=0, all_keys=6))
    >>> expected = whet.attention(q, k, k, rule="target-entropy:0.5", return_stats=True)[1].beta
    >>> bool(np.allclose(search.rows[:, 1], expected, rtol=1e-4))
    True
    """

    def __init__(self, states: np.ndarray, rule: RuleLike | Sequence[RuleLike] = None) -> None:
        merged = _states(states)
        self._rows = np.zeros((*merged.shape, _WEIGHED))
        self._rows[..., 0], self._rows[..., 1] = merged["max"], 1
        with np.errstate(invalid="ignore", divide="ignore"):
            self._rows[..., 2] = np.nan_to_num(merged["t"] / merged["z"], posinf=0, neginf=0)
        self._searches: list[tuple[Any, Any]] = []
        self._done = True
        for heads, name in _by_rule(rule, merged.shape):
            part = np.ascontiguousarray(merged[heads])
            if name.startswith("target-"):
                self._searches.append((heads, _core.BetaSearches(name, _numbers(part))))
            else:
                betas = np.empty(part.shape)
                _core.betas(_numbers(part), betas.reshape(-1), name)
                self._rows[..., 1][heads] = betas
        self._look()

    @property
    def done(self) -> bool:
        """Whether all rows have their beta. Otherwise `absorb` the sums of all shards at `rows`."""
        return self._done

    @property
    def rows(self) -> np.ndarray:
        """float64 (B, H, N, 4): of each row its maximum, its beta (that of the next step until `done`), about where the
        mean of logits below the maximum is under its weights, and its threshold, 0 until a ThresholdSearch finds it."""
        return self._rows.copy()

    def absorb(self, sums: np.ndarray) -> None:
        """Takes one step with the `sums` of all shards at `rows`, added up: float64 (B, H, N, 5)."""
        added = _records(sums, _SUMS, "sums", self._rows.shape[:-1])
        for heads, search in self._searches:
            part = np.ascontiguousarray(added[heads])
            search.absorb(part.reshape(-1))
            with np.errstate(invalid="ignore", divide="ignore"):
                means = np.nan_to_num(part[..., 1] / part[..., 0], posinf=0, neginf=0)
            self._rows[..., 2][heads] = means
        self._look()

    def _look(self) -> None:
        done = True
        for heads, search in self._searches:
            betas = np.empty(self._rows[heads].shape[:-1])
            done = search.betas(betas.reshape(-1)) and done
            self._rows[..., 1][heads] = betas
        self._done = done


def sums(query: Any, key: Any, rows: np.ndarray, **options: Unpack[ShardOptions]) -> np.ndarray:
    """What a Search needs of the keys of this shard for a step.

    Args:
        query, key, options: as in `states`.
        rows: the rows of the Search, float64 (B, H, N, 4).

    Returns:
        float64 (B, H, N, 5), which add up over shards: with y = x - maximum, of exp(beta y) times 1, y, y^2, y^3, y^4.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    query, key = floats(query, "query"), floats(key, "key")
    given = _shard(query, options)
    out = np.empty((*query.shape[:-1], _SUMS))
    call(_core.shard_sums, _SHARD_NAMES, *four_axes(query=query, key=key), _scales(rows, query), out, **given)
    return out


class ThresholdSearch:
    """The threshold of every row for sparsemax, entmax15 and entmax:A, in steps, a few mostly.

    Args:
        states: whet.STATE, the merged states of all shards, (B, H, N) or without leading axes.
        rows: those of a Search that is done, float64 (B, H, N, 4).
        normalizer: "sparsemax", "entmax15" or "entmax:A".
        dtype: of the queries.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> import numpy as np, whet
    >>> from whet import shards
    >>> q, k = np.random.default_rng(0).normal(size=(2, 6, 4))
    >>> options = {"first_key": 0, "all_keys": 6, "normalizer": "sparsemax"}
    >>> states = shards.states(q, k, **options)
    >>> search = shards.ThresholdSearch(states, shards.Search(states).rows, "sparsemax", q.dtype)
    >>> while not search.done:
    ...     search.absorb(shards.threshold_sums(q, k, search.rows, **options))
    >>> out, mass = shards.attention(q, k, k, search.rows, **options)
    >>> bool(np.allclose(out, whet.attention(q, k, k, normalizer="sparsemax")))
    True
    """

    def __init__(self, states: np.ndarray, rows: np.ndarray, normalizer: str, dtype: Any = np.float32) -> None:
        merged = _states(states)
        self._rows = _records(rows, _WEIGHED, "rows", merged.shape).copy()
        betas = np.ascontiguousarray(self._rows[..., 1]).reshape(-1)
        states = _numbers(np.ascontiguousarray(merged))
        self._search = _core.ThresholdSearches(normalizer, states, betas, bool(np.dtype(dtype) == np.float64))
        self._look()

    @property
    def done(self) -> bool:
        """Whether all rows have their threshold. Otherwise `absorb` the threshold_sums of all shards at `rows`."""
        return self._done

    @property
    def rows(self) -> np.ndarray:
        """float64 (B, H, N, 4): those given, with the threshold (that of the next step until `done`)."""
        return self._rows.copy()

    def absorb(self, sums: np.ndarray) -> None:
        """Takes one step with the `threshold_sums` of all shards at `rows`, added up: float64 (B, H, N, 3)."""
        self._search.absorb(_records(sums, _THRESHOLD, "sums", self._rows.shape[:-1]).reshape(-1))
        self._look()

    def _look(self) -> None:
        taus = np.empty(self._rows.shape[:-1])
        self._done = self._search.taus(taus.reshape(-1))
        self._rows[..., _TAU] = taus


def threshold_sums(query: Any, key: Any, rows: np.ndarray, **options: Unpack[ShardOptions]) -> np.ndarray:
    """What a ThresholdSearch needs of the keys of this shard for a step.

    Args:
        query, key, options: as in `states`, with the normalizer of the search.
        rows: the rows of the ThresholdSearch, float64 (B, H, N, 4).

    Returns:
        float64 (B, H, N, 3), which add up over shards: with v = (A - 1) beta y - threshold where that is above 0 and p =
        1 / (A - 1), of v^p, v^(p-1) and v^(p-2).

    Raises:
        TypeError, ValueError: naming the argument.
    """
    query, key = floats(query, "query"), floats(key, "key")
    given = _shard(query, options)
    out = np.empty((*query.shape[:-1], _THRESHOLD))
    call(_core.shard_threshold_sums, _SHARD_NAMES, *four_axes(query=query, key=key), _scales(rows, query), out, **given)
    return out


def attention(query: Any, key: Any, value: Any, rows: np.ndarray,
              **options: Unpack[ShardOptions]) -> tuple[np.ndarray, np.ndarray]:
    """The unnormalised output over the keys of this shard.

    Args:
        query, key, options: as in `states`.
        value: (B, K, M, E).
        rows: those of a Search, or a ThresholdSearch, that is done, float64 (B, H, N, 4).

    Returns:
        The sum of exp(beta y) value, (B, H, N, E) in the type of the arithmetic, and the mass, float64 (B, H, N): the sum of
        exp(beta y). With a threshold, of the weights. `merge_outputs` joins them, or whoever adds both up and divides.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    given = _shard(query, options)
    out = np.empty((*query.shape[:-1], *value.shape[-1:]), _arithmetic(query))
    mass = np.empty(query.shape[:-1])
    *arrays, to = four_axes(query=query, key=key, value=value, out=out)
    call(_core.shard_attention, _SHARD_NAMES, *arrays, _scales(rows, query), to, mass, **given)
    return out, mass


def merge_outputs(outs: Sequence[np.ndarray], masses: Sequence[np.ndarray], dtype: Any = None) -> np.ndarray:
    """The output of attention from those of the shards, added in the order given.

    Args:
        outs, masses: what `attention` returned, one of each per shard.
        dtype: of the result. Default: that of the first of `outs`.

    Returns:
        (B, H, N, E); 0 in rows that no key of any shard is visible to.

    Raises:
        ValueError: naming the argument.
    """
    if len(outs) == 0:
        raise ValueError("outs: none given, must be one per shard")
    if len(masses) != len(outs):
        raise ValueError(f"masses: {len(masses)} given, must be as many as outs, {len(outs)}")
    first = array(outs[0], "outs")
    total, mass = np.zeros(first.shape), np.zeros(first.shape[:-1])
    for out, own in zip(outs, masses):
        for name, given, shape in (("outs", out, total.shape), ("masses", own, mass.shape)):
            if np.shape(given) != shape:
                raise ValueError(f"{name}: one has the shape {np.shape(given)}, must be {shape} as the first of outs says")
        total += out
        mass += own
    whole = np.divide(total, mass[..., None], out=np.zeros(first.shape), where=mass[..., None] != 0)
    return whole.astype(first.dtype if dtype is None else dtype)


def beta_moves(rows: np.ndarray, rule: RuleLike | Sequence[RuleLike] = None, *, hold_beta: bool = False) -> bool:
    """Whether `slopes` need the gradient_sums of all shards; otherwise output_sums are enough.

    Args:
        rows: those that `attention` was given, float64 (B, H, N, 4).
        rule: what the Search was given.
        hold_beta: whether gradients count beta as a constant.

    >>> import numpy as np
    >>> from whet import shards
    >>> rows = np.array([[2.5, 1.7, -0.3, 0]])
    >>> shards.beta_moves(rows, "paper"), shards.beta_moves(rows, "fixed:1.7")
    (True, False)
    """
    weighed = _records(rows, _WEIGHED, "rows")
    hold_beta = flag(hold_beta, "hold_beta")
    if (weighed[..., _TAU] < 0).any():
        return True
    return any(_core.betas_move(np.ascontiguousarray(weighed[..., 1][heads]).reshape(-1), name, hold_beta)
               for heads, name in _by_rule(rule, weighed.shape[:-1]))


def gradient_sums(query: Any, key: Any, value: Any, dout: Any, rows: np.ndarray,
                  **options: Unpack[ShardOptions]) -> np.ndarray:
    """What the gradient of a row needs of the keys of this shard.

    Args:
        query, key, value, options: as in `attention`.
        dout: (B, H, N, E), the gradient to the output of all shards.
        rows: those that `attention` was given, float64 (B, H, N, 4).

    Returns:
        float64 (B, H, N, 9), which add up over shards. The last four are 0 where rows have no threshold.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    given = _shard(query, options)
    out = np.empty((*query.shape[:-1], _GRADIENT))
    weighed = _records(rows, _WEIGHED, "rows", query.shape[:-1])
    call(_core.shard_gradient_sums, _SHARD_NAMES, *four_axes(query=query, key=key, value=value, dout=floats(dout, "dout")),
         weighed.reshape(-1), out, **given)
    return out


def output_sums(out: Any, dout: Any, mass: np.ndarray) -> np.ndarray:
    """What `slopes` take in place of the gradient_sums of all shards where beta doesn't move: no exchange is needed.

    Args:
        out, dout: (B, H, N, E), the output of all shards and the gradient to it.
        mass: float64 (B, H, N), added up over shards.

    Returns:
        float64 (B, H, N, 9).

    Raises:
        ValueError: naming the argument.
    """
    out, dout = floats(out, "out"), floats(dout, "dout")
    if dout.shape != out.shape:
        raise ValueError(f"dout: its shape is {dout.shape}, must be that of out, {out.shape}")
    found = np.zeros((*out.shape[:-1], _GRADIENT))
    found[..., 0] = _masses(mass, out.shape[:-1]) * (out.astype(np.float64) * dout.astype(np.float64)).sum(-1)
    return found


def slopes(states: np.ndarray, rows: np.ndarray, mass: np.ndarray, sums: np.ndarray,
           rule: RuleLike | Sequence[RuleLike] = None, *, hold_beta: bool = False) -> np.ndarray:
    """What `backward` needs of each row.

    Args:
        states: whet.STATE (B, H, N), the merged states of all shards.
        rows: those that `attention` was given, float64 (B, H, N, 4).
        mass: float64 (B, H, N), added up over shards.
        sums: float64 (B, H, N, 9), the gradient_sums of all shards added up, or the output_sums.
        rule: what the Search was given.
        hold_beta: count beta as a constant. By default gradients go through the rule, as in the published code.

    Returns:
        float64 (B, H, N, 13), the same for all shards.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    merged = _states(states)
    weighed = _records(rows, _WEIGHED, "rows", merged.shape)
    masses, added = _masses(mass, merged.shape), _records(sums, _GRADIENT, "sums", merged.shape)
    hold_beta = flag(hold_beta, "hold_beta")
    out = np.empty((*merged.shape, _SLOPE))
    for heads, name in _by_rule(rule, merged.shape):
        one, two, three = (np.ascontiguousarray(given[heads]).reshape(-1) for given in (weighed, masses, added))
        part = np.empty((*masses[heads].shape, _SLOPE))
        _core.row_slopes(_numbers(np.ascontiguousarray(merged[heads])), one, two, three, part.reshape(-1), name,
                         hold_beta)
        out[heads] = part
    return out


def backward(query: Any, key: Any, value: Any, dout: Any, slopes: np.ndarray,
             **options: Unpack[ShardOptions]) -> Gradients:
    """The gradients that this shard finds.

    Args:
        query, key, value, options: as in `attention`, without logits.
        dout: (B, H, N, E), the gradient to the output of all shards.
        slopes: what `slopes` returned, float64 (B, H, N, 13).

    Returns:
        Gradients: those to its keys, values and bias, and its parts of the others.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    query, key, value = floats(query, "query"), floats(key, "key"), floats(value, "value")
    given = _shard(query, options)
    part = _arithmetic(query)
    found = Gradients(np.empty(query.shape, part), np.empty_like(key, subok=False), np.empty_like(value, subok=False),
                      _like(given.get("bias"), None), _like(given.get("sinks"), part), _like(given.get("query_scale"), part))
    dq, dk, dv = four_axes(dquery=found.dquery, dkey=found.dkey, dvalue=found.dvalue)
    lines = _records(slopes, _SLOPE, "slopes", query.shape[:-1])
    call(_core.shard_backward, _SHARD_NAMES, *four_axes(query=query, key=key, value=value, dout=floats(dout, "dout")),
         lines.reshape(-1), dq=dq, dk=dk, dv=dv, dbias=found.dbias, dsinks=found.dsinks, dquery_scale=found.dquery_scale,
         **given)
    return found._replace(dbias=_shaped(found.dbias, options.get("bias")),
                          dquery_scale=_shaped(found.dquery_scale, options.get("query_scale")))


# ---- arguments

_SHARD_NAMES = {name: given for name, given in _NAMES.items() if name != "head_rules"} | {"shard": "first_key"}


def _shard(query: np.ndarray, options: ShardOptions) -> dict[str, Any]:
    """Options as the extension takes them."""
    given: dict[str, Any] = dict(options)
    own = {name: given.pop(name, None) for name in ("first_key", "all_keys", "first_query", "all_queries", "logits")}
    for name in ("first_key", "all_keys"):
        if own[name] is None:
            raise TypeError(f"{name}: not given, must say where this shard's keys are among those of all")
    if "rule" in given:
        raise TypeError("rule: isn't an option of a shard, must be given to Search and slopes")
    if own["logits"] is not None:
        check_unmasked(own["logits"], "logits")
        own["logits"] = with_axes(own["logits"], 4, "logits")
    bias, sinks = given.pop("bias", None), given.pop("sinks", None)
    found = _options(query, bias=bias, sinks=sinks, **given)
    return {**found, **{name: value for name, value in own.items() if value is not None}}


def _states(states: np.ndarray) -> np.ndarray:
    given = array(states, "states")
    if given.dtype != STATE:
        raise TypeError(f"states: its dtype is {given.dtype}, must be whet.STATE")
    return given


def _records(values: np.ndarray, numbers: int, name: str, rows: tuple[int, ...] | None = None) -> np.ndarray:
    """Contiguous float64, so many numbers per row."""
    given = array(values, name)
    if given.dtype != np.float64:
        raise TypeError(f"{name}: its dtype is {given.dtype}, must be float64")
    wanted = (*(given.shape[:-1] if rows is None else rows), numbers)
    if given.shape != wanted:
        raise ValueError(f"{name}: its shape is {given.shape}, must be {wanted}")
    return np.ascontiguousarray(given)


def _masses(mass: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    given = array(mass, "mass")
    if given.shape != rows:
        raise ValueError(f"mass: its shape is {given.shape}, must be {rows}")
    return np.ascontiguousarray(given, np.float64)


def _scales(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Maximum, beta and threshold of each row."""
    return np.ascontiguousarray(_records(rows, _WEIGHED, "rows", query.shape[:-1])[..., [0, 1, _TAU]]).reshape(-1)


def _by_rule(rule: RuleLike | Sequence[RuleLike], rows: tuple[int, ...]) -> list[tuple[Any, str]]:
    """An index of the rows that have each rule, and its name."""
    names = rule_names(rule)
    if not isinstance(names, list):
        return [(..., names or "none")]
    heads = rows[-2] if len(rows) > 1 else 1
    if len(names) != heads:
        raise ValueError(f"rule: {len(names)} are given, must be one or one per query head, {heads}")
    axes = (slice(None),) * (len(rows) - 2)
    return [((*axes, [head for head in range(heads) if names[head] == name]) if len(rows) > 1 else ..., name)
            for name in dict.fromkeys(names)]


def _numbers(states: np.ndarray) -> np.ndarray:
    """States as the extension takes them: six times 64 bits each."""
    return states.reshape(-1).view(np.int64)


def _like(values: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    return None if values is None else np.empty(values.shape, dtype or values.dtype)


def _arithmetic(query: np.ndarray) -> type:
    return np.float64 if query.dtype == np.float64 else np.float32
