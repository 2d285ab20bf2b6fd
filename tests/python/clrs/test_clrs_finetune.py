"""Fine-tuning of a tiny random model: the loss falls, it goes on, and only what should be is changed."""

import importlib.util
import json

import pytest
import torch

pytest.importorskip("transformers")
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from whet.clrs import command, files, finetune
from whet.clrs.distributed import Group
from whet.clrs.errors import ClrsError
from whet.clrs.finetune import Tuning, tune
from whet.probe.models import load

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="LoRA needs peft")
LETTERS = ["?", *"abcdefghijklmnopqrstuvwxyz_0123456789.,:|[]() \n"]
TUNING = Tuning(("insertion_sort",), sizes=(3,), batch=4, steps=8, rate=1e-2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    splitter = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    splitter.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=splitter, unk_token="?").save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, vocab_size=len(LETTERS))).save_pretrained(folder)
    return folder


def losses(folder):
    return [line["loss"] for line in files.read_lines(folder / files.METRICS)]


def tuned(folder, tiny, tuning, progress=lambda step: None):
    with Group() as group:
        return tune(folder, load(str(tiny)), tuning, group, 1, progress)


def test_all_weights(tiny, tmp_path, often):
    tuned(tmp_path / "run", tiny, TUNING._replace(lora=0, rule="paper", steps=40))
    found = losses(tmp_path / "run")
    assert found[-1] < 0.8 * found[0]
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "run" / finetune.MODEL)
    before = LlamaForCausalLM.from_pretrained(tiny)
    assert not any(torch.equal(a, b) for a, b in zip(saved.parameters(), before.parameters()))


@needs_peft
def test_lora_goes_on(tiny, tmp_path, often):
    whole = tuned(tmp_path / "whole", tiny, TUNING)
    assert {name.split(".")[-3] for name, one in whole.named_parameters() if one.requires_grad} == {"lora_A", "lora_B"}

    class Killed(Exception):
        pass

    def kill(step):
        if step.step == 6:
            raise Killed

    with pytest.raises(Killed):
        tuned(tmp_path / "killed", tiny, TUNING, kill)
    tuned(tmp_path / "killed", tiny, TUNING)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 4
    a, b = ((tmp_path / name / files.CHECKPOINT).read_bytes() for name in ("killed", "whole"))
    assert a == b and len(a) < sum(path.stat().st_size for path in tiny.glob("*.safetensors")) * 4
    assert (tmp_path / "whole" / finetune.MODEL / "adapter_config.json").exists()
    with pytest.raises(ClrsError, match="holds a fine-tuning whose rate is 0.01 where this one has 0.1"):
        tuned(tmp_path / "whole", tiny, TUNING._replace(rate=0.1))


def test_the_loss_is_that_of_answers(tiny):
    """Against transformers' own loss with the question hidden."""
    from whet.clrs.data import Problem

    loaded = load(str(tiny))
    problems = [Problem("minimum", 2, "minimum:\nkey: [0.1 0.2]\nmin:\n", "0\n\n"),
                Problem("minimum", 3, "minimum:\nkey: [0.15 0.2 0.3]\nmin:\n", "10\n\n")]
    logits, targets, answers, _ = finetune._forward_of(loaded, Group())(loaded.model, problems)
    found = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    expected = 0.0
    for problem in problems:
        question, answer = finetune._encoded(loaded.tokenizer, problem)
        labels = torch.tensor([[-100] * len(question) + answer])
        expected += float(loaded.model(torch.tensor([question + answer]), labels=labels).loss) * len(answer)
    assert answers == 7 and float(found) == pytest.approx(expected, rel=1e-5)


def test_the_command(tiny, tmp_path, capsys, often):
    line = ["finetune", "--model", str(tiny), "--out", str(tmp_path / "run"), "--sizes", "3", "--steps", "2", "--batch", "2",
            "--lora", "0", "--threads", "1"]
    command.main([*line, "--rule", "paper"])
    said = capsys.readouterr().err
    assert "step 2 of 2: loss " in said and f"{tmp_path / 'run' / 'model'} holds the model" in said
    assert json.loads((tmp_path / "run" / files.CONFIG).read_text())["rule"] == "paper"
    for arguments, text in (([*line, "--rule", "papr"], "--rule papr: rule: "), (line, "holds a fine-tuning whose rule is")):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments)
        assert ended.value.code == 1 and text in capsys.readouterr().err.strip().splitlines()[-1]


def test_without_peft(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(finetune.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClrsError, match="LoRA needs the Python package peft: run pip install .* or give --lora 0"):
        finetune._trained(_loaded(tiny), TUNING)


def _loaded(tiny):
    from whet.probe.models import Loaded

    return Loaded("tiny", LlamaForCausalLM.from_pretrained(tiny), None)
