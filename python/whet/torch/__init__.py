"""whet for PyTorch: softmax and attention whose inverse temperature a rule chooses, row by row.

>>> import torch
>>> from whet.torch import attention, softmax
>>> x = torch.randn(2, 1000)
>>> torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
>>> w, stats = softmax(x, rule="target-entropy:0.2", return_stats=True)
>>> q, k, v = torch.randn(3, 1, 4, 10, 16).unbind()
>>> out = attention(q, k, v, is_causal=True, rule="paper")

`attention` has the signature of torch.nn.functional.scaled_dot_product_attention, plus keywords. Both functions train,
compile, export and vmap, and have forward mode; `linear_attention` all but the last. Tensors on the CPU only. Nothing
changes until a rule is named.
"""

from whet.attention import Extras
from whet.stats import Stats
from whet.torch.attention import attention
from whet.torch.linear_attention import linear_attention
from whet.torch.modules import LengthScale, MultiheadAttention, Softmax
from whet.torch.normalizers import Entmax
from whet.torch.rows import log_softmax, softmax

__all__ = ["Entmax", "Extras", "LengthScale", "MultiheadAttention", "Softmax", "Stats", "attention", "linear_attention",
           "log_softmax", "softmax"]
