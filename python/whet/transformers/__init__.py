"""whet's attention inside models of Hugging Face Transformers, through its AttentionInterface: no model code is patched.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> import torch, whet.transformers
>>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
>>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
>>> with torch.no_grad(), whet.transformers.collect(model) as stats:
...     _ = model(torch.arange(1, 9)[None])
>>> stats.entropy.shape  # layer, batch, head, query
(2, 1, 4, 8)
>>> with whet.transformers.enable(model, rule="paper", layers=[1]), torch.no_grad():
...     _ = model(torch.arange(1, 9)[None])
"""

from whet.transformers._settings import Enabled, disable, enable, read_rules
from whet.transformers._statistics import FIELDS, Rows, Summary, collect

__all__ = ["FIELDS", "Enabled", "Rows", "Summary", "collect", "disable", "enable", "read_rules"]
