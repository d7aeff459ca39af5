"""A model of Transformers' before it is the engine's: opened without weights, and seen running on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardpoint.models.transformers_code.architectures import model_class, skeleton
from hardpoint.models.transformers_code.attention import CURRENT
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.fused_layers import might_match
from hardpoint.models.transformers_code.probe import CannotRunError, Probe
from hardpoint.models.transformers_code.rotary_lengths import fix_rotary_lengths
from hardpoint.models.transformers_code.stand_ins import Given, NormStandIn


@dataclass(frozen=True)
class Seen:
    """A model in two halves, and what a run of both showed. ``output``: the class of what the body returns."""

    probe: Probe
    body: nn.Module
    head_code: nn.Module
    given: Given
    output: type


@dataclass(frozen=True)
class Opened:
    """``prefix`` is the name of the body in ``model``; ``keys`` are its tensors by name. ``buffers`` hold what its code
    computed. ``tied``: embedding and head are one tensor."""

    model: Any
    prefix: str
    keys: Mapping[str, torch.Tensor]
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    computed: frozenset[str]
    tied: bool

    @classmethod
    def of(cls, architecture: str, config: Any, dtype: torch.dtype, folder: Path, max_positions: int) -> Opened:
        """Raises CheckpointError where the model cannot be constructed, CannotRunError for one of another build."""
        model: Any = skeleton(model_class(architecture, folder), copy.deepcopy(config), dtype, folder)
        fix_rotary_lengths(model, max_positions)
        prefix = _body_of(model)
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        if getattr(model.config, "is_encoder_decoder", False):
            raise CannotRunError("it has an encoder")
        buffers = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
        tied = inputs is not None and outputs is not None and _ties(model.config)
        return cls(model, prefix, model.state_dict(), buffers, frozenset(n for n, _ in model.named_buffers()), tied)

    def run(self, current: Current) -> Seen:
        """Run body and head, in which stand-ins are, on the meta device, and take them apart. Raises CannotRunError."""
        for module, name, value in self.buffers:
            module._buffers[name] = torch.empty_like(value, device="meta")
        readers = [module for module in self.model.modules() if isinstance(module, NormStandIn) or might_match(module)]
        probe, given = Probe({module: path for path, module in self.model.named_modules()}, readers), Given()
        for module in (*self.model.modules(), given):
            object.__setattr__(module, CURRENT, current)
        current.probe, body = probe, getattr(self.model, self.prefix)
        given.output = probe.run(body)
        if not probe.reads_positions and not all(call.alibi for call in probe.attention):
            raise CannotRunError("its code counts positions itself, and takes none")
        if getattr(given.output, "last_hidden_state", None) is None:
            raise CannotRunError("its body returns no hidden states")
        setattr(self.model, self.prefix, given)
        if getattr(probe.run(self.model), "logits", None) is None:
            raise CannotRunError("its head returns no logits")
        if not probe.attention:
            raise CannotRunError("its code does not call Transformers' attention interface")
        seen = Seen(probe, body, self.model, given, type(given.output))
        current.probe, given.output = None, None
        return seen

    def whole(self, seen: Seen) -> nn.Module:
        """The tensors of both halves, by the names that they had before."""
        return _Whole(seen.body, self.model, self.prefix)


def _body_of(model: Any) -> str:
    """The name of the body in ``model``: the one of its class, or that of the one model within it."""
    from transformers import PreTrainedModel

    named = model.base_model_prefix
    inner = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    if named and isinstance(getattr(model, named, None), nn.Module):
        return str(named)
    if len(inner) != 1:
        raise CannotRunError("its head is not apart from its body")
    return str(inner[0])


def _ties(config: Any) -> bool:
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


class _Whole(nn.Module):
    def __init__(self, body: nn.Module, rest: Any, prefix: str) -> None:
        super().__init__()
        self._keep_in_fp32_modules = rest._keep_in_fp32_modules
        self._keep_in_fp32_modules_strict = rest._keep_in_fp32_modules_strict
        for name, child in rest.named_children():
            self.add_module(name, body if name == prefix else child)
        for name, parameter in rest.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
