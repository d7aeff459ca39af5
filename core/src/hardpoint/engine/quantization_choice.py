"""From a checkpoint's config and the user's flags to the method in use."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.random_weights import NoTensors
from hardpoint.config import EngineConfig
from hardpoint.config.removed import removed_quantization
from hardpoint.context import Context
from hardpoint.plugin_host import PluginSet
from hardpoint.plugin_host.blame import blame, misbehaved
from hardpoint.quantization.assignment import Method, Quantization
from hardpoint_plugin_api import (
    CheckpointError,
    CheckpointTensors,
    ConfigError,
    MethodRequest,
    QuantizationMethod,
    QuantizationWorkload,
    UnknownNameError,
)

_ONLINE = "_online"
"""Ends the names of methods that quantize while loading; users may leave it out."""


def method_name(config: EngineConfig, checkpoint: Checkpoint, plugins: PluginSet) -> str | None:
    """The method to use (the ``of`` of its contributions), None where nothing is quantized.

    Raises UnknownNameError for a method that no plugin has, ConfigError for one that is gone for good, and for flags
    that contradict the checkpoint.
    """
    stored, wanted = checkpoint.quantization_method, config.quantization
    every = {str(offer.contribution.of) for offer in plugins.offers("quantization")}
    name = stored or wanted
    if stored and wanted in every and not _is_online(wanted) and wanted.startswith(f"{stored}_"):
        return wanted  # a reader of some of that method's checkpoints
    if stored and wanted not in (None, stored):
        raise ConfigError(
            f"--quantization {wanted} contradicts {checkpoint.config_path}, by which the weights are quantized by "
            f"{stored!r} already; leave the flag out, or give the model that was not quantized"
        )
    if config.quantization_options and (stored or not wanted):
        given = f"--quantization-options {','.join(config.quantization_options)}"
        if stored:
            why = f"the checkpoint is quantized already, as {checkpoint.config_path} says; leave the flag out"
        else:
            why = "only weights that are quantized while loading have options; add --quantization METHOD"
        raise ConfigError(f"{given}: {why}")
    if name is None:
        return None
    if not stored and f"{name}{_ONLINE}" in every:
        return name + _ONLINE
    known = {k for k in every if not _is_online(k)} if stored else {_typed(k) for k in every}
    if name not in known:
        where = f"It stands in {checkpoint.config_path}." if stored else "Asked for by --quantization."
        gone = removed_quantization(name, where, known)
        hint = " ".join(filter(None, [where, plugins.told_unused("quantization", name)]))
        raise gone or UnknownNameError("quantization method", name, known, hint)
    return name


def choose_quantization(ctx: Context, checkpoint: Checkpoint, name: str | None) -> Quantization:
    """Select and build the method ``name``; None is no quantization.

    Raises what the method says of its config, and ConfigError for one that cannot quantize a checkpoint that is not.
    """
    if name is None:
        return Quantization()
    offer = ctx.select(QuantizationWorkload(of=name)).offer
    kind = ctx.load(offer)
    if not (isinstance(kind, type) and issubclass(kind, QuantizationMethod)):
        raise misbehaved(offer, "is no QuantizationMethod")
    stored = checkpoint.quantization_config
    if stored is None and not kind.online:
        online = {
            _typed(str(o.contribution.of)) for o in ctx.plugins.offers("quantization") if _is_online(o.contribution.of)
        }
        raise ConfigError(
            f"--quantization {ctx.config.quantization}: it reads checkpoints that were quantized by it, and "
            f"{checkpoint.folder} is not quantized; methods that quantize while loading: {', '.join(sorted(online))}"
        )
    tensors = _tensors(ctx, checkpoint)
    request = MethodRequest(
        config=stored,
        options=_options(ctx.config),
        tensors=tensors,
        dtype=str(ctx.dtype).removeprefix("torch."),
        device=ctx.device,
        where=str(checkpoint.config_path),
    )
    with blame(offer):
        return Quantization(Method(kind(request), offer, tensors), ctx.device.fp8)


def _tensors(ctx: Context, checkpoint: Checkpoint) -> CheckpointTensors:
    folder = checkpoint.folder
    if ctx.config.load_format != "random":
        return open_files(folder).tensors()
    if checkpoint.quantization_config is not None:
        raise CheckpointError(
            f"{folder}: no random weights can be made for this config.json: its weights are quantized; remove "
            "'quantization_config' from it, and quantize while loading by --quantization"
        )
    return NoTensors(folder)


def _options(config: EngineConfig) -> Mapping[str, str]:
    pairs = [option.partition("=") for option in config.quantization_options]
    return {key: value for key, _, value in pairs}


def _is_online(name: str | None) -> bool:
    return str(name).endswith(_ONLINE)


def _typed(name: str) -> str:
    return name.removesuffix(_ONLINE)
