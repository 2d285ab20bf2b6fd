"""What whet should compute, in plain float64 NumPy: one row at a time, formulas as they are written down."""

import numpy as np

PAPER = [-0.037, 0.481, -2.3, 4.917, -1.791]
RULES = ["none", "paper", "fixed:1.5", "log-length:4", "log-length:4,0.8", "ssmax:0.4", "log-power:0.5,0.3,1.5",
         "llama4:4", "llama4:3,0.5", "target-entropy:0.2", "target-peak:0.9", "polynomial:0.3,1.2:gate=0.2:hold=2"]


def weights_at(x, beta):
    """softmax(beta x) of a row in which -inf is hidden."""
    if not np.any(x > -np.inf):
        return np.zeros_like(x)
    e = np.exp(beta * (x - x.max()))
    return e / e.sum()


def entropy_of(p):
    p = p[p > 0]
    return float(-(p * np.log(p)).sum())


def solved(measure, target):
    """The beta >= 1 at which a measure that falls with beta has come down to the target."""
    low, high = 1.0, 1.0
    while measure(high) > target:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) > target else (low, middle)
    return high


def beta_of(rule, x, sinks=0):
    """A sink stands at the end of the row and isn't counted."""
    count = np.count_nonzero(x > -np.inf) - sinks
    if count <= 1:
        return 1.0
    entropy = entropy_of(weights_at(x, 1.0))
    kind, _, rest = rule.partition(":")
    values = [float(value) for value in rest.split(":")[0].split(",")] if rest else []
    if kind == "paper":
        return max(1.0, np.polyval(PAPER, entropy)) if entropy > 0.5 else 1.0
    if kind == "polynomial":
        fields = dict(field.split("=") for field in rest.split(":")[1:])
        inside = min(entropy, float(fields["hold"]))
        return max(1.0, np.polyval(values, inside)) if entropy > float(fields["gate"]) else 1.0
    if kind == "fixed":
        return values[0]
    if kind == "ssmax":
        return values[0] * np.log(count)
    if kind == "log-power":
        return values[0] + values[1] * np.log(count) ** values[2]
    if kind == "llama4":
        return 1 + (values[1:] or [0.1])[0] * np.log(count // values[0] + 1)
    if kind == "log-length":
        return max(1.0, (values[1:] or [1.0])[0] * np.log(count) / np.log(values[0]))
    if kind == "target-entropy":
        return solved(lambda beta: entropy_of(weights_at(x, beta)), values[0])
    if kind == "target-peak":
        return solved(lambda beta: -weights_at(x, beta).max(), -values[0])
    assert kind == "none"
    return 1.0


def softmax(x, rule="none", axis=-1, where=None):
    x = np.where(True if where is None else where, np.asarray(x, np.float64), -np.inf)
    return np.apply_along_axis(lambda row: weights_at(row, beta_of(rule, row)), axis, x)


def attention(q, k, v, rule="none", *, scale=None, is_causal=False, align="start", window=(-1, -1), mask=True, bias=0.0,
              lengths=None, softcap=0.0, sinks=None, query_scale=1.0):
    """Output and weights, (B, H, N, E) and (B, H, N, M). `rule` may be a list with one per head."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    (batch, heads, queries, size), keys = q.shape, k.shape[2]
    k, v = (np.repeat(a, heads // k.shape[1], axis=1) for a in (k, v))
    x = q @ k.swapaxes(2, 3) * (size**-0.5 if scale is None else scale) * np.asarray(query_scale)[..., None]
    x = (softcap * np.tanh(x / softcap) if softcap else x) + bias

    ends = np.full(batch, keys) if lengths is None else np.asarray(lengths)
    position = np.arange(queries) + np.where(align == "end", ends - queries, 0)[:, None]
    step = np.arange(keys) - position[:, None, :, None]
    visible = (np.arange(keys) < ends[:, None, None, None]) & mask
    visible = visible & ((step <= 0) if is_causal else True)
    visible = visible & (True if window[0] < 0 else step >= -window[0]) & (True if window[1] < 0 else step <= window[1])
    x = np.where(visible, x, -np.inf)

    weights = np.empty_like(x)
    for b, h, n in np.ndindex(x.shape[:3]):
        row = x[b, h, n]
        if sinks is not None:
            row = np.append(row, sinks[h])
        one = rule if isinstance(rule, str) else rule[h]
        beta = beta_of(one, row, sinks is not None)
        weights[b, h, n] = weights_at(row, beta)[:keys] if np.any(row[:keys] > -np.inf) else 0
    return weights @ v, weights
