"""whet keeps attention sharp as inputs grow.

Softmax and attention for NumPy whose inverse temperature a rule chooses, row by row:

>>> import numpy as np, whet
>>> x = np.random.default_rng(0).normal(size=(2, 1000))
>>> w = whet.softmax(x, axis=-1, rule="paper")
>>> w, stats = whet.softmax(x, rule=whet.TargetEntropy(0.2), return_stats=True)
>>> bool(np.allclose(stats.sharp_entropy, 0.2, atol=1e-5))
True

Nothing changes until a rule is named. `whet.torch` and `whet.jax` are the same for those libraries.
"""

from whet._core import get_num_threads, set_num_threads, simd_target, simd_targets, version
from whet.attention import AttentionGradients, Extras, TileCounts, attention, attention_backward
from whet.horizon import horizon, largest_weight, spread
from whet.linear_attention import LinearAttentionGradients, linear_attention, linear_attention_backward
from whet.log_rows import log_softmax, log_softmax_backward
from whet.rows import STATE, merge, sharpen, softmax, softmax_backward, states
from whet.rules import (Fixed, Llama4, LogLength, LogPower, NoRule, Paper, Polynomial, Rule, RuleLike, SSMax,
                        TargetEntropy, TargetPeak, rule)
from whet.stats import Stats

__version__ = version()

__all__ = [
    "AttentionGradients", "Extras", "Fixed", "LinearAttentionGradients", "Llama4", "LogLength", "LogPower", "NoRule",
    "Paper", "Polynomial", "Rule", "RuleLike", "SSMax", "STATE", "Stats", "TargetEntropy", "TargetPeak", "TileCounts",
    "attention", "attention_backward", "get_num_threads", "horizon", "largest_weight", "linear_attention",
    "linear_attention_backward", "log_softmax", "log_softmax_backward", "merge", "rule", "set_num_threads", "sharpen",
    "simd_target", "simd_targets", "softmax", "softmax_backward", "spread", "states", "version",
]
