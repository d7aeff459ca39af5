"""Scales for a KV cache of 8 or 4 bits, from the largest keys and values of a text, and a checkpoint that has them.

The output follows compressed-tensors: ``ATTENTION.k_scale`` and ``ATTENTION.v_scale``, float32 [1], and
``kv_cache_scheme`` in the config. Model Optimizer's configs say NVFP4 by ``kv_cache_quant_algo``. A scale
of NVFP4 is the largest magnitude over 448 times 6, as Model Optimizer has it: then the scale of the largest group is
the largest number of float8_e4m3fn.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.config import EngineConfig
from hardpoint.engine.llm import LLM
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.layers.attention import Attention
from hardpoint.layers.base import walk
from hardpoint.layers.causal_lm import CausalLM
from hardpoint_plugin_api import GROUP_SIZE, NVFP4, AttentionBackend, AttentionCall, CheckpointError, ConfigError
from hardpoint_plugin_api.elements import BUILT_IN, FLOAT4_E2M1, FLOAT8_E4M3FN

WINDOW = 512
"""Tokens of a prompt."""
_FILE = "model-kv-scales.safetensors"
_INDEX = "model.safetensors.index.json"
_READERS = ("compressed-tensors", "fp8", "modelopt", "quark")
"""Methods that read scales of a cache."""


@dataclass
class Largest:
    """The largest magnitude of the keys and of the values of one attention layer."""

    k: float = 0.0
    v: float = 0.0

    def see(self, call: AttentionCall) -> None:
        """Take what a call adds to the cache into account."""
        self.k = max(self.k, float(call.k.abs().max()))
        self.v = max(self.v, float(call.v.abs().max()))


def measure(config: EngineConfig, text: str, windows: int) -> tuple[dict[str, Largest], int]:
    """Run up to ``windows`` prompts of WINDOW tokens of ``text``; per attention module of the checkpoint, the largest
    keys and values, and the number of tokens.

    Raises ConfigError for a text without tokens, CheckpointError for layers whose scales have no name: those whose
    projections are stored as one, and those without keys and values of their own (latents).
    """
    alone = config.on_one_rank().model_copy(update={"kv_cache_dtype": "auto", "enforce_eager": True})
    with LLM.from_config(alone) as llm:
        ids = llm.tokenizer.encode(text)[: windows * WINDOW]
        if not ids:
            raise ConfigError("--data has no tokens; give a longer text")
        prompts = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
        model = llm.core.blueprint.model
        names, found = _attention_modules(model), dict[str, Largest]()
        with _observed(model, names, found):
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return found, len(ids)


def _attention_modules(model: CausalLM) -> dict[str, str]:
    """Path of each attention layer -> the checkpoint's module. Raises CheckpointError."""
    modules = {}
    for name, place in model.weight_names.items():
        readings = place if isinstance(place, tuple) else ()
        addresses = [address for reading in readings for address in reading.places.values()]
        for address in (place,) if isinstance(place, str) else addresses:
            path, _, slot = address.partition(".qkv.")
            if slot == "weight[q]":
                module = readings[0].module.name if readings else name.removesuffix(".weight")
                modules[path] = module.rpartition(".")[0]
    unnamed = [path for path, layer in walk(model) if isinstance(layer, Attention) and path not in modules]
    if unnamed or not modules:
        which = f"layer {unnamed[0]!r}" if unnamed else "this model"
        raise CheckpointError(
            f"{which} has no projections of queries, keys and values of their own, beside which scales of a cache "
            "stand; use --kv-cache-dtype without them: each token's head then has a scale"
        )
    return modules


@contextmanager
def _observed(model: CausalLM, names: Mapping[str, str], found: dict[str, Largest]) -> Iterator[None]:
    """Have the attention backends of ``model`` show their calls to ``found`` meanwhile."""
    backends: list[AttentionBackend] = []
    for path, layer in walk(model):
        if isinstance(layer, Attention):
            _observe(layer.backend, found.setdefault(names[path], Largest()))
            backends.append(layer.backend)
    try:
        yield
    finally:
        for backend in backends:
            del vars(backend)["forward"]


def _observe(backend: AttentionBackend, largest: Largest) -> None:
    forward = backend.forward

    def observed(call: AttentionCall) -> Any:
        largest.see(call)
        return forward(call)

    vars(backend)["forward"] = observed


def _largest_number(element: str) -> float:
    """The largest number that a cache of ``element`` holds, less the scale that is calibrated."""
    return FLOAT8_E4M3FN.largest * FLOAT4_E2M1.largest if element == NVFP4 else BUILT_IN[element].largest


def check(checkpoint: Checkpoint, out: Path, element: str) -> None:
    """Raise ConfigError, as far as it is known before anything is measured, where ``write`` would: for a folder that is
    there, and for checkpoints in other formats than Hugging Face's or whose quantization method reads no scales."""
    method = checkpoint.quantization_method
    if out.exists():
        raise ConfigError(f"--output {out}: is there already; name a new folder")
    if checkpoint.config_path.name != "config.json":
        raise ConfigError(
            f"{checkpoint.config_path}: a copy with scales of a cache is written in Hugging Face's format alone; take "
            "the checkpoint in that format (a folder with a config.json)"
        )
    if method not in (None, *_READERS):
        raise ConfigError(
            f"{checkpoint.config_path}: checkpoints of quantization method {method!r} have no scales of a cache; those "
            f"of {', '.join(_READERS)} do, and those that are not quantized"
        )
    _config(checkpoint, element)


def write(checkpoint: Checkpoint, out: Path, found: Mapping[str, Largest], element: str) -> None:
    """Write the checkpoint to the new folder ``out``, with scales for a cache of ``element``.

    That is int8, float8_e4m3fn or nvfp4. Files are linked where the file system can, else copied. Raises ConfigError as
    ``check`` does, and for checkpoints that have scales.
    """
    check(checkpoint, out, element)
    files = SafetensorsFiles(checkpoint.folder)
    top = _largest_number(element)
    scales = {
        f"{name}.{part}_scale": torch.tensor([getattr(largest, part) / top or 1.0])
        for name, largest in found.items()
        for part in "kv"
    }
    if held := sorted(scales.keys() & files.names):
        raise ConfigError(f"{checkpoint.folder}: has scales of a cache already ({held[0]}, ...); remove them first")
    config = _config(checkpoint, element)
    out.mkdir(parents=True)
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_file() and path.name not in ("config.json", _INDEX):
            _link(path, out / path.name)
    save_file(scales, out / _FILE, metadata={"format": "pt"})
    weight_map = {name: files.file_of(name).name for name in sorted(files.names)} | dict.fromkeys(scales, _FILE)
    (out / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n", "utf-8")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _config(checkpoint: Checkpoint, element: str) -> dict[str, Any]:
    config = dict(checkpoint.config.data)
    stored = checkpoint.quantization_config
    scheme = {"num_bits": 8, "type": "int" if element == "int8" else "float", "strategy": "tensor", "dynamic": False}
    if element == NVFP4:  # as compressed-tensors' preset of NVFP4 has it for activations
        scheme |= {"num_bits": 4, "strategy": "tensor_group", "group_size": GROUP_SIZE, "dynamic": "local"}
    if stored is None:
        stored = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": {}}
    if stored["quant_method"] == "compressed-tensors":
        config["quantization_config"] = {**stored, "kv_cache_scheme": {**scheme, "symmetric": True}}
    elif element == NVFP4 and stored["quant_method"] == "modelopt":
        inner = {**stored.get("quantization", stored), "kv_cache_quant_algo": "NVFP4"}
        inner.pop("kv_cache_scheme", None)
        config["quantization_config"] = {**stored, "quantization": inner} if "quantization" in stored else inner
    elif element != "float8_e4m3fn":
        raise ConfigError(
            f"{checkpoint.config_path}: quantization method {stored['quant_method']!r} has scales of 8-bit floats "
            "alone for a cache; calibrate for --kv-cache-dtype fp8"
        )
    return config


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path.resolve(), target)
    except OSError:
        shutil.copyfile(path, target)
