"""whet for JAX: softmax and attention on CPUs, with a rule where one is named.

`softmax` and `log_softmax` replace those of jax.nn, `attention` replaces jax.nn.dot_product_attention;
`linear_attention` has no counterpart there. `Entmax` is a normalizer whose parameter is learned. All work under jit, vmap,
grad, jvp, scan, checkpoint and shard_map.

>>> import jax.numpy as jnp
>>> from whet.jax import softmax
>>> weights = softmax(jnp.array([0.0, 1.0, 2.0]), rule="fixed:2")
>>> [f"{weight:.3f}" for weight in weights]
['0.016', '0.117', '0.867']
"""

from whet.jax.attention import attention
from whet.jax.linear_attention import linear_attention
from whet.jax.normalizers import Entmax
from whet.jax.rows import log_softmax, softmax

__all__ = ["Entmax", "attention", "linear_attention", "log_softmax", "softmax"]
