"""The model classes that Transformers has for causal language models, and a model of one without weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint_plugin_api import CheckpointError, UnknownNameError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "hardpoint"
"""The name of our attention in Transformers' attention interface. It has no mask function, so no mask is built."""

_CONSTRUCTING = threading.Lock()


def known_architectures() -> frozenset[str]:
    """The classes that Transformers has for causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def read_config(config: HFConfig) -> PreTrainedConfig:
    """The config as Transformers' own class. Raises CheckpointError; code of the checkpoint's own is never imported."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        own_code = "auto_map" in config.data
        remote = " Its 'auto_map' names code of the checkpoint's own, which is never run." if own_code else ""
        raise CheckpointError(
            f"{config.path}: the installed Transformers has no 'model_type' {kind!r}; install a newer one.{remote}"
        )
    data = {key: _number(value) for key, value in config.data.items() if key != "quantization_config"}
    try:
        found: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:  # each class checks its keys in its own way
        raise CheckpointError(f"{config.path}: Transformers refuses it: {type(error).__name__}: {error}") from error
    return found


def _number(value: Any) -> Any:
    """``value`` with floats that JSON has no numbers for; Transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _number(v) for k, v in value.items()}
    return [_number(each) for each in value] if isinstance(value, list) else value


def model_class(architecture: str, path: object) -> type[PreTrainedModel]:
    """The class of this name. Raises UnknownNameError where Transformers has no such causal language model."""
    import transformers

    if architecture not in known_architectures():
        raise UnknownNameError("model architecture", architecture, known_architectures(), f"It stands in {path}.")
    found: type[PreTrainedModel] = getattr(transformers, architecture)
    return found


def skeleton(
    kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, path: object
) -> PreTrainedModel:
    """A model with parameters on the meta device, and buffers as its code makes them, on the host.

    Raises CheckpointError where its code cannot be constructed from ``config``.
    """
    try:
        with _CONSTRUCTING, _parameters_on_meta():
            model: Any = kind._from_config(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # code of hundreds of models
        raise CheckpointError(
            f"{path}: Transformers' {kind.__name__} cannot be constructed from it: {type(error).__name__}: {error}"
        ) from error
    for module in model.modules():  # not before: some models choose classes of their own by this name
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = ATTENTION
    model.eval()
    model.requires_grad_(False)
    found: PreTrainedModel = model
    return found


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as soon as a module gets them; buffers are computed."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.data.to("meta"), requires_grad=False)

    patched: Any = nn.Module
    patched.register_parameter = on_meta
    try:
        yield
    finally:
        patched.register_parameter = register
