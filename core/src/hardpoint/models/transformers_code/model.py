"""A model of Transformers' as the engine's: hidden states by its body's code, logits by its head's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardpoint.checkpoint.hf_config import HFConfig
from hardpoint.compilation.compiled import CompiledPass
from hardpoint.context import Context
from hardpoint.layers import CausalLM, ModelFacts
from hardpoint.logs import log_once
from hardpoint.models.transformers_code.architectures import model_class, read_config
from hardpoint.models.transformers_code.attention import Attend, register
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.fused_attention import AttentionMatch, FusedAttention, match_calls
from hardpoint.models.transformers_code.fused_layers import fuse_layers
from hardpoint.models.transformers_code.opened import Opened, Seen
from hardpoint.models.transformers_code.own_tensors import OwnTensor, OwnTensors, own_tensors
from hardpoint.models.transformers_code.probe import CannotRunError
from hardpoint.models.transformers_code.report import Report
from hardpoint.models.transformers_code.rotary_tables import RotaryTable, is_tabulable
from hardpoint.models.transformers_code.sharding import TensorPlan
from hardpoint.models.transformers_code.surgery import Surgery, replace_path
from hardpoint.models.transformers_code.weights import Conversion, Names, checkpoint_names, stored_names
from hardpoint_plugin_api import CheckpointError, ForwardStep

logger = logging.getLogger(__name__)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
"""Config keys of the longest sequence; a model without any, such as one with ALiBi, has no limit of its own."""


@dataclass(frozen=True)
class TransformersArgs:
    """A model that Transformers' code describes, not constructed yet."""

    architecture: str
    config: Any
    folder: Path
    facts: ModelFacts

    def build(self, ctx: Context) -> CausalLM:
        """Construct the model, without weights. Raises CheckpointError for code that cannot be run here."""
        try:
            return TransformersLM(ctx, self)
        except CannotRunError as error:
            raise CheckpointError(
                f"{self.folder}/config.json: {self.architecture} cannot run by Transformers' code: {error}"
            ) from error


class TransformersLM(CausalLM):
    """The attributes are those of CausalLM. ``body`` and ``head_code`` are Transformers' modules, with layers in them.

    A step's tokens are one row [1, T] to the model's code, whatever their requests: attention tells them apart, by the
    step's metadata, and everything else takes each token by itself.
    """

    def __init__(self, ctx: Context, args: TransformersArgs) -> None:
        nn.Module.__init__(self)
        register()
        self.report = Report(args.architecture)
        self._current = current = Current(ForwardStep.empty(ctx.torch_device))
        opened = Opened.of(args.architecture, args.config, ctx.dtype, args.folder, ctx.max_model_len)
        conversion, stored = Conversion(opened.model, opened.keys), stored_names(args.folder)
        plan = TensorPlan(opened.model.tp_plan, ctx.parallel.tp, args.folder)
        surgery = Surgery(current, plan, self.report)
        surgery.replace(opened.model)
        seen = opened.run(current)
        self.body, self.head_code, self._given, self._output = seen.body, seen.head_code, seen.given, seen.output

        root = {opened.prefix: "body"}
        groups = surgery.name_all(seen.probe, root)
        surgery.name_ends(root, opened.tied)
        found = frozenset(conversion.find(name)[0] for name in stored or ())
        tensors = own_tensors(opened.whole(seen), plan, ctx.dtype, found)
        names = _with_own(surgery.names, tensors, opened, seen)
        unneeded = opened.computed - tensors.keys()
        names = checkpoint_names(names, surgery.stacks, conversion, stored, unneeded)
        ctx = ctx.for_model(names)
        fused = self._fuse(seen, surgery, ctx.dtype)
        surgery.build(ctx, seen.probe, groups, root, opened.tied)
        alive = set(self.modules())
        self.own = OwnTensors(ctx.child("own"), tensors, [each for each in opened.buffers if each[0] in alive])
        layers = [
            Attend(replace_path(ctx, f"attention.{number}"), call, fused[number].scalars if number in fused else None)
            for number, call in enumerate(seen.probe.attention)
        ]
        self.attention, current.attention = nn.ModuleList(layers), layers
        self.rotary_tables = self._tabulate(ctx, opened, {m.turn.in_a_row for m in fused.values() if m.turn})
        self.report.replaced["attention"] = len(layers)
        self.weight_names = ctx.quantization.weight_names(names)
        self.module_names = {
            name.removesuffix(".weight"): address
            for name, address in names.items()
            if address is not None and name.endswith(".weight")
        }
        self.compiled = None
        if ctx.op_tracing is not None:
            identity = f"{args.architecture} {args.config.to_json_string()}"
            self.compiled = CompiledPass(ctx.child("compiled"), self, self._traced, self._hidden, identity)
        self.notes = tuple(self.report.lines())
        for line in self.notes:
            log_once(logger, logging.INFO, ("transformers", args.folder, line), line, scope=ctx.plugins)

    def _fuse(self, seen: Seen, surgery: Surgery, dtype: torch.dtype) -> dict[int, AttentionMatch]:
        """Have code between layers run as fused ops where it can; returns the matches by number of attention's call."""
        fused = match_calls(seen.probe, dict(surgery.norms), dtype)
        for number, (module, match) in fused.items():
            module.forward = FusedAttention(module, number, match, self._current)
        self.report.fused["attention"] = len(fused)
        self.report.fused["layers"] = fuse_layers(seen.probe, dtype, self._current)
        return {number: match for number, (_, match) in fused.items()}

    def _tabulate(self, ctx: Context, opened: Opened, kinds: set[bool]) -> nn.ModuleList:
        """A table for each rotary module that can have one, where attention that is fused reads such ``kinds``."""
        buffers: dict[nn.Module, dict[str, torch.Tensor]] = {}
        for module, name, value in opened.buffers:
            buffers.setdefault(module, {})[name] = value
        found = [
            (module, buffers.get(module, {}))
            for module in (self.body.modules() if kinds else ())
            if is_tabulable(module, buffers.get(module, {}), ctx.dtype, ctx.max_model_len)
        ]
        self.report.tabulated = len(found)
        tables = (
            RotaryTable(replace_path(ctx, f"rotary_tables.{number}"), module, own, frozenset(kinds), self._current)
            for number, (module, own) in enumerate(found)
        )
        return nn.ModuleList(tables)

    def hidden(self, inputs: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T] -> hidden states [T, hidden]."""
        if self.compiled is None:
            return self._hidden(inputs, step)
        hidden: torch.Tensor = self.compiled(inputs, step)
        return hidden

    def compile_pass(self) -> bool:
        if self.compiled is not None:
            self.compiled.compile_pass()
        return True

    def _traced(self, inputs: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """As ``_hidden``, with the model's own code wherever it is torch operators."""
        self._current.is_traced = True
        try:
            return self._hidden(inputs, step)
        finally:
            self._current.is_traced = False

    def _hidden(self, inputs: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        current = self._current
        current.step, current.calls = step, 0
        positions = step.rotary_positions[None]
        try:
            output = self.body(input_ids=inputs[None], position_ids=positions, use_cache=False)
        finally:
            current.tables.clear()
            current.products.clear()
            current.residual = None
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab], by the code behind the model's body."""
        self._given.output = self._output(last_hidden_state=hidden[None])
        try:
            ids = hidden.new_empty((1, hidden.shape[0]), dtype=torch.int64)  # code may look at its shape
            logits: torch.Tensor = self.head_code(input_ids=ids, use_cache=False).logits
        finally:
            self._given.output = None
        return logits[0]


def _with_own(names: Names, tensors: dict[str, OwnTensor], opened: Opened, seen: Seen) -> Names:
    """``names`` with those of sinks, of the tensors that no layer took, and of others that stand there twice."""
    sinks = {id(call.sinks): number for number, call in enumerate(seen.probe.attention) if call.sinks is not None}
    for name, parameter in opened.whole(seen).named_parameters(remove_duplicate=False):
        if id(parameter) in sinks:
            names[name] = f"attention.{sinks[id(parameter)]}.sinks"
            tensors.pop(name, None)
    names |= {name: f"own.{name}" for name in tensors if name not in names}
    return names | {name: None for name in opened.keys if name not in names}


def transformers_model(config: HFConfig) -> TransformersArgs:
    """The family of any architecture that Transformers has: see docs/running.md."""
    architecture = str((config.data.get("architectures") or [""])[0])
    model_class(architecture, config.path)
    found = read_config(config)
    text: Any = found.get_text_config()
    key = next((name for name in _LENGTHS if isinstance(getattr(text, name, None), int)), None)
    longest = getattr(text, key) if key and getattr(text, key) > 0 else 2048
    most = longest if key else 2**20
    limit = f"{key or 'max_position_embeddings'} in its config.json"
    facts = ModelFacts(int(text.vocab_size), longest, most, limit, int(text.hidden_size))
    return TransformersArgs(architecture, found, config.folder, facts)
