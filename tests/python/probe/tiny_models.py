"""Tiny models with random weights, in folders as save_pretrained writes them, and as GGUF files."""

import numpy as np
import torch

LAYERS, HEADS, KEY_HEADS, SIZE, CONTEXT = 2, 4, 2, 32, 512
WORDS = ["[UNK]", *"0123456789", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", *" .,:;?!'\"()-\n"]


def make_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


def make_model(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=SIZE, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                 num_key_value_heads=KEY_HEADS, vocab_size=len(WORDS), max_position_embeddings=CONTEXT)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():  # as drawn, all heads attend to everything alike
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(12)
    return model


def write_gguf(path, blocks=LAYERS, tokenizer=True, architecture="llama"):
    """A tiny llama with a byte-pair tokenizer of single letters."""
    import gguf

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    for add, value in ((writer.add_block_count, blocks), (writer.add_context_length, CONTEXT),
                       (writer.add_embedding_length, SIZE), (writer.add_feed_forward_length, 64),
                       (writer.add_head_count, HEADS), (writer.add_head_count_kv, KEY_HEADS),
                       (writer.add_rope_freq_base, 10000.0), (writer.add_layer_norm_rms_eps, 1e-5)):
        add(value)
    tokens = ["<|endoftext|>", *"0123456789", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", *".,:;?!'", "Ġ", "th", "is"]
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_token_merges(["t h", "i s"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    def tensor(name, *shape):
        writer.add_tensor(name, random.normal(size=shape, scale=0.2).astype(np.float32))

    tensor("token_embd.weight", len(tokens), SIZE)
    tensor("output_norm.weight", SIZE)
    keys = SIZE // HEADS * KEY_HEADS
    for i in range(LAYERS):
        for name, *shape in (("attn_norm", SIZE), ("ffn_norm", SIZE), ("attn_q", SIZE, SIZE), ("attn_k", keys, SIZE),
                             ("attn_v", keys, SIZE), ("attn_output", SIZE, SIZE), ("ffn_gate", 64, SIZE),
                             ("ffn_up", 64, SIZE), ("ffn_down", SIZE, 64)):
            tensor(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
