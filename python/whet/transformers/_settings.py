"""Which layers and heads of a model have which rule and normalizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

import whet
from whet.rules import RuleLike
from whet.torch.normalizers import Entmax, NormalizerLike
from whet.transformers._attention import ATTRIBUTE, NAME, Layer

RulesLike = RuleLike | Sequence[RuleLike] | Mapping[int, RuleLike | Sequence[RuleLike]] | os.PathLike[str]

_BEFORE = "_whet_before"  # of a model: the attention implementation it had
_LARGEST_RULES_FILE = 16 << 20


class Enabled:
    """What enable() did, as a context manager: leaving it brings back what was before."""

    def __init__(self, model: PreTrainedModel, before: _Snapshot) -> None:
        self._model, self._before = model, before

    def __enter__(self) -> PreTrainedModel:
        return self._model

    def __exit__(self, *_: object) -> None:
        self._before.restore()


def enable(model: PreTrainedModel, rule: RulesLike = None, normalizer: NormalizerLike = "softmax", *,
           layers: Iterable[int] | None = None, heads: Iterable[int] | None = None,
           query_scale: Tensor | None = None) -> Enabled:
    """Has a model compute its attention with whet, from now on or, used with ``with``, inside that block.

    Args:
        model: a decoder or an encoder of Hugging Face Transformers that takes its attention from AttentionInterface.
        rule: a rule or its name, or a list with one per head. Or a mapping from layers to either, or the path of a .json
            file that has one (as ``whet tune`` writes it). Default: none, plain attention.
        normalizer: by its name, or a whet.torch.Entmax. Default: softmax.
        layers: numbers of the layers that have the rule and the normalizer. Default: all. The others have none.
        heads: numbers of the heads, in each of those layers, likewise.
        query_scale: (layers, heads), multiplies the logits of each head, and has a gradient.

    Calling it again replaces all of it. Masks, caches, grouped heads, sliding windows, soft-caps and sinks are as the
    model has them; a feature that isn't known, such as a position bias, raises NotImplementedError when it is met.

    Raises:
        TypeError, ValueError: naming the argument; the model is as it was.
    """
    found = attention_modules(model)
    count = head_count(model)
    chosen_layers = _chosen(layers, {index for index, _ in found}, "layers", "layer")
    chosen_heads = _chosen(heads, set(range(count)), "heads", "head")
    rules = _rules_by_layer(rule, sorted({index for index, _ in found}), count)
    _check_name(normalizer)
    if query_scale is not None:
        if not isinstance(query_scale, Tensor):
            raise TypeError(f"query_scale: is a {type(query_scale).__name__}, must be a tensor (layers, heads)")
        wanted = (max(index for index, _ in found) + 1, count)
        if tuple(query_scale.shape) != wanted:
            raise ValueError(f"query_scale: its shape is {tuple(query_scale.shape)}, must be (layers, heads), {wanted}")
    before = _Snapshot(model, found)
    some_heads = sorted(chosen_heads) if heads is not None else None
    for index, module in found:
        if index in chosen_layers:
            layer = Layer(index, _for_heads(rules.get(index), some_heads, count), normalizer, some_heads, query_scale)
        else:
            layer = Layer(index, query_scale=query_scale)
        previous = getattr(module, ATTRIBUTE, None)
        layer.collector = None if previous is None else previous.collector
        setattr(module, ATTRIBUTE, layer)
    if not hasattr(model, _BEFORE):
        setattr(model, _BEFORE, implementation(model))
    set_implementation(model, NAME)
    return Enabled(model, before)


def disable(model: PreTrainedModel) -> None:
    """Gives a model back the attention it had before enable(). One that has it already stays as it is."""
    for _, module in attention_modules(model):
        if hasattr(module, ATTRIBUTE):
            delattr(module, ATTRIBUTE)
    if hasattr(model, _BEFORE):
        set_implementation(model, getattr(model, _BEFORE))
        delattr(model, _BEFORE)


def read_rules(path: str | os.PathLike[str], layers: int | None = None,
               heads: int | None = None) -> dict[int, list[RuleLike]]:
    """The rules of a file that ``whet tune`` wrote: for each layer that has any, one per head.

    ValueError, naming the file, if it isn't such a file, or is for a model of other numbers of layers and heads than
    those given.
    """
    path = Path(path)

    def wrong(problem: str) -> ValueError:
        return ValueError(f"rule: {path} {problem}")

    try:
        if path.stat().st_size > _LARGEST_RULES_FILE:
            raise wrong("is too large for a file of rules")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise wrong(f"can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if str(error).startswith("rule: "):
            raise
        raise wrong("isn't JSON") from None
    if not isinstance(content, dict) or content.get("kind") != "rules" or not isinstance(content.get("rules"), dict):
        raise wrong("isn't a file of rules, as whet tune writes them")
    for what, wanted in (("layers", layers), ("heads", heads)):
        if wanted is not None and content.get(what, wanted) != wanted:
            raise wrong(f"is for a model with {content[what]!r} {what} where this one has {wanted}")
    rules: dict[int, list[RuleLike]] = {}
    for layer, names in content["rules"].items():
        if not re.fullmatch("[0-9]{1,6}", layer) or not isinstance(names, list):
            raise wrong(f"must have lists of rules by number of layer, and has '{layer[:40]}'")
        for name in names:
            try:
                whet.rule(name)
            except (TypeError, ValueError) as error:
                raise wrong(f"has for layer {layer}: {error}") from None
        rules[int(layer)] = names
    return rules


class _Snapshot:
    """Everything enable() changes."""

    def __init__(self, model: PreTrainedModel, found: list[tuple[int, nn.Module]]) -> None:
        self._model = model
        self._layers = [(module, getattr(module, ATTRIBUTE, None)) for _, module in found]
        self._implementation = implementation(model)
        self._before = getattr(model, _BEFORE, None)

    def restore(self) -> None:
        for module, layer in self._layers:
            if layer is not None:
                setattr(module, ATTRIBUTE, layer)
            elif hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
        set_implementation(self._model, self._implementation)
        if self._before is None and hasattr(self._model, _BEFORE):
            delattr(self._model, _BEFORE)


def is_enabled(model: PreTrainedModel) -> bool:
    return hasattr(model, _BEFORE)


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def head_count(model: PreTrainedModel) -> int:
    return int(text_config(model).num_attention_heads)


def implementation(model: PreTrainedModel) -> str:
    return str(text_config(model)._attn_implementation)


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Of the part that reads text, if a model has several."""
    nested = text_config(model) is not model.config
    if nested:
        key = next((key for key in model.config.sub_configs if getattr(model.config, key) is text_config(model)), None)
        model.set_attn_implementation({key: name} if key else name)
    else:
        model.set_attn_implementation(name)


def attention_modules(model: PreTrainedModel) -> list[tuple[int, nn.Module]]:
    """The modules that may call an attention function, with the numbers of their layers, in the order of the model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: is a {type(model).__name__}, must be a model of Hugging Face Transformers")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: {name} has an encoder and a decoder; whet knows models with one of them")
    if not all(part._can_set_attn_implementation() for part in model.modules() if isinstance(part, PreTrainedModel)):
        raise ValueError(f"model: {name} doesn't take its attention from transformers' AttentionInterface, so that it "
                         "can't be replaced")
    config = text_config(model)
    if not getattr(config, "num_attention_heads", None):
        raise ValueError(f"model: {name} has no attention heads")
    found = []
    for path, module in model.named_modules():
        # A module that computes attention has a configuration; one of several that a model has is that of its text.
        if "Attention" in type(module).__name__ and getattr(module, "config", config) is config:
            number = getattr(module, "layer_idx", None)
            if number is None:  # encoders have none: "encoder.layer.3.attention.self"
                match = re.search(r"(?:^|\.)([0-9]+)(?:\.|$)", path)
                number = int(match[1]) if match else 0
            found.append((int(number), module))
    if not found:
        raise ValueError(f"model: {name} has no attention modules that whet can find")
    return found


def _chosen(numbers: Iterable[int] | None, known: set[int], argument: str, what: str) -> set[int]:
    if numbers is None:
        return known
    if isinstance(numbers, (int, str)):
        raise TypeError(f"{argument}: is {numbers!r}, must be a list of numbers")
    chosen = set(numbers)
    for number in chosen:
        if number not in known:
            raise ValueError(f"{argument}: has {number!r}, but the model has no such {what}; it has {min(known)} to "
                             f"{max(known)}")
    return chosen


def _check_name(normalizer: NormalizerLike) -> None:
    """By using it: a wrong name is to be seen before the model runs."""
    if isinstance(normalizer, str):
        whet.softmax([0.0, 0.0], normalizer=normalizer)
    elif not isinstance(normalizer, Entmax):
        raise TypeError(f"normalizer: is a {type(normalizer).__name__}, must be a name or a whet.torch.Entmax")


def _rules_by_layer(rule: RulesLike, layers: list[int], heads: int) -> dict[int, RuleLike | list[RuleLike]]:
    if isinstance(rule, os.PathLike) or (isinstance(rule, str) and rule.endswith(".json")
                                         and not rule.startswith("polynomial:")):
        rule = read_rules(rule, len(layers), heads)
    if not isinstance(rule, Mapping):
        one = _checked(rule, heads)
        return dict.fromkeys(layers, one)
    for layer in rule:
        if layer not in layers:
            raise ValueError(f"rule: is for layer {layer!r}, but the model has no such layer; it has {layers[0]} to "
                             f"{layers[-1]}")
    return {layer: _checked(value, heads) for layer, value in rule.items()}


def _checked(rule: Any, heads: int) -> RuleLike | list[RuleLike]:
    if rule is None or isinstance(rule, (str, whet.Rule)):
        return None if rule is None else whet.rule(rule).name
    if not isinstance(rule, Sequence):
        raise TypeError(f"rule: is a {type(rule).__name__}, must be a rule, its name, or a list with one per head")
    if len(rule) != heads:
        raise ValueError(f"rule: {len(rule)} given, must be one per head, {heads}")
    return [whet.rule(one).name for one in rule]


def _for_heads(rule: RuleLike | list[RuleLike], heads: list[int] | None, count: int) -> RuleLike | list[RuleLike]:
    """The rules of a layer in which only some heads have one."""
    if heads is None or rule is None:
        return rule
    rules = rule if isinstance(rule, list) else [rule] * count
    return [rules[head] if head in heads else "none" for head in range(count)]
