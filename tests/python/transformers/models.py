"""Small random models of many architectures, and attention written down row by row to compare with."""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import oracle

VOCABULARY = 99
_SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
              max_position_embeddings=128)
_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_GROUPED = dict(_SIZES, num_key_value_heads=2, **_TOKENS)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)

# Grouped heads in most; soft-caps in gemma2; windows in gemma2, gemma3, mistral and gpt_oss; sinks in gpt_oss; BERT sees
# keys on both sides.
_CONFIGS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", dict(_GROUPED, head_dim=16)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(_GROUPED, head_dim=16, sliding_window=8)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", dict(_GROUPED, head_dim=16, sliding_window=8)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", dict(_GROUPED, head_dim=16)),
    "mistral": ("MistralForCausalLM", "MistralConfig", dict(_GROUPED, sliding_window=8)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             dict(n_embd=64, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=128, **_TOKENS)),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", dict(_GROUPED, head_dim=16, sliding_window=8, **_EXPERTS)),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "bert": ("BertModel", "BertConfig", dict(_SIZES, pad_token_id=0)),
}
ARCHITECTURES = list(_CONFIGS)
LAYERS, HEADS = 3, 4


def small_model(architecture, **changes):
    """With random weights, the same each time; larger ones than a model starts with, so that attention isn't uniform."""
    model_class, config_class, values = _CONFIGS[architecture]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**values, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter *= 4
            if "sinks" in name:
                parameter.normal_()
    if architecture == "gpt_oss":
        model.set_experts_implementation("eager")  # the only one in float64
    return model


def tokens(batch=2, length=24, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(ids, side):
    """The attention mask of a batch whose second sequence has seven tokens less; None for none."""
    if side is None:
        return {}
    mask = torch.ones_like(ids)
    mask[1, :7 if side == "left" else None] = 0 if side == "left" else 1
    if side == "right":
        mask[1, -7:] = 0
    return {"attention_mask": mask}


# What the attention registered as "rows" does in each layer: a rule or one per head; and whether it keeps weights.
RULES = {}
WEIGHTS = []


def rows(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, softcap=None,
         s_aux=None, **_):
    """Attention in float64, one row at a time."""
    q, k, v = (tensor.detach().double().numpy() for tensor in (query, key, value))
    heads, queries = q.shape[1:3]
    group = heads // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    x = scaling * np.einsum("bhnd,bhmd->bhnm", q, k)
    if softcap:
        x = softcap * np.tanh(x / softcap)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        visible = np.broadcast_to(attention_mask.numpy(), x.shape)
    else:
        visible = np.ones(x.shape, bool) if not causal or queries == 1 else np.tri(*x.shape[-2:], dtype=bool)[None, None]
        visible = np.broadcast_to(visible, x.shape)
    x = np.where(visible, x, -np.inf)
    weights = np.zeros_like(x)
    rules = RULES.get(getattr(module, "layer_idx", None), "none")
    for at in np.ndindex(*x.shape[:-1]):
        row = x[at] if s_aux is None else np.append(x[at], float(s_aux[at[1]]))
        rule = rules if isinstance(rules, str) else rules[at[1]]
        if np.any(x[at] > -np.inf):
            weights[at] = oracle.weights_at(row, oracle.beta_of(rule, row, int(s_aux is not None)))[:x.shape[-1]]
    WEIGHTS.append(weights)
    out = np.einsum("bhnm,bhmd->bnhd", weights, v)
    return torch.from_numpy(out).to(query.dtype), None


AttentionInterface.register("rows", rows)
AttentionMaskInterface.register("rows", sdpa_mask)


def row_by_row(model, *arguments, rules=None, **keywords):
    """The first output of the model with that attention, and the weights of each layer."""
    before = model.config.get_text_config()._attn_implementation
    RULES.clear()
    RULES.update(rules or {})
    WEIGHTS.clear()
    model.set_attn_implementation("rows")
    try:
        with torch.no_grad():
            return model(*arguments, **keywords)[0], list(WEIGHTS)
    finally:
        model.set_attn_implementation(before)
