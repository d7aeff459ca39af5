"""The part of a model that compiles its forward pass once the weights are there, and runs it from then on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardpoint.compilation.artefacts import Artefacts, default_folder
from hardpoint.compilation.division import Divided, PieceGraph, divide
from hardpoint.compilation.program import BoundProgram, Call, PieceFunction, Program
from hardpoint.compilation.tracing import TOKENS, trace
from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer
from hardpoint.ops.tracing import CannotCompileError
from hardpoint.selection import SelectionTable
from hardpoint_plugin_api import ForwardStep

logger = logging.getLogger(__name__)

Hidden = Callable[[torch.Tensor, ForwardStep], torch.Tensor]

_DISTRIBUTIONS = ("hardpoint-core", "torch", "transformers", "triton", "numpy")
_FORMAT = 2
"""Of programs and pieces; another number where older ones cannot be read, or are wrong."""

_MOST_CONSTANT = 64
"""Elements: a tensor that code makes of numbers is part of the program up to this size."""

_NUMBERS = (1, TOKENS)
"""Numbers of tokens that a pass is traced with: tensors of one row are handled otherwise than those of several."""


class CompiledPass(PluggableLayer):
    """A model's forward pass, which ``compile_pass`` compiles. It has no weights of its own.

    ``root`` holds the layers. ``traced`` is the pass that is compiled, ``hidden`` the one that runs where it cannot be,
    and ``identity`` says which model it is.
    """

    traceable = True

    def __init__(self, ctx: Context, root: nn.Module, traced: Hidden, hidden: Hidden, identity: str) -> None:
        super().__init__(ctx)
        self._ctx, self._root, self._identity = ctx, (root,), identity
        self._traced, self._hidden = traced, hidden
        self._bound: dict[bool, BoundProgram] = {}
        self._made: dict[bool, tuple[Program, dict[str, PieceFunction]]] = {}

    def forward(self, ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T] -> hidden states [T, hidden]."""
        bound = self._bound.get(ids.shape[0] == 1)
        return self._hidden(ids, step) if bound is None else bound.run(ids, step)

    def bind(self) -> None:
        """Take the weights that were loaded now, where the pass is compiled already."""
        tensors = dict(_tensors(self._root[0]))
        for is_one, (program, pieces) in self._made.items():
            constants = {
                slot: _constant(name, tensors, self._ctx.torch_device) for slot, name in program.constants.items()
            }
            self._bound[is_one] = BoundProgram(program, constants, pieces, self._layer)

    def release(self) -> None:
        self._bound.clear()
        super().release()

    def compile_pass(self) -> None:
        """Compile the pass, or load what an earlier start compiled. The weights are there.

        A pass that cannot be compiled runs as it is, with a warning. Raises ConfigError for a folder that others may
        write to.
        """
        ctx, began = self._ctx, time.perf_counter()
        folder = Path(ctx.config.compile_cache).expanduser() if ctx.config.compile_cache else default_folder()
        artefacts = Artefacts(folder, _environment(ctx), ctx.torch_device.index)
        try:
            made = {number == 1: self._program(artefacts, number) for number in _NUMBERS}
        except CannotCompileError as error:
            logger.warning("the model runs without compilation: %s", error)
            return
        wrap = ctx.kernel_calls.wrap_compiled
        for is_one, (program, pieces) in made.items():
            self._made[is_one] = program, {key: wrap(key, piece) for key, piece in pieces.items()}
        counter = ctx.metrics.counter(
            "compiled_pieces", "Pieces of the model that were compiled or loaded.", ["source"]
        )
        counter.labels("compiled").inc(artefacts.num_compiled)
        counter.labels("loaded").inc(artefacts.num_loaded)
        self.bind()
        logger.info(
            "the model's forward pass: %d pieces compiled, %d loaded from %s, %.1f s",
            *(artefacts.num_compiled, artefacts.num_loaded, folder, time.perf_counter() - began),
        )

    def _program(self, artefacts: Artefacts, number: int) -> tuple[Program, dict[str, PieceFunction]]:
        """The program for one token or for several, with its pieces: as stored, or else traced."""
        ranks = self._ctx.parallel.tp
        text = f"{self._identity} {number} {ranks.rank}/{ranks.size} {self._ctx.dtype} {self._selection}"
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if (stored := artefacts.program(key)) is not None:
            program = self._fitting(stored)
            if program is not None:
                pieces = artefacts.load(program.keys)
                if len(pieces) == len(program.keys):
                    return program, pieces
        divided = self._divided(number)
        tokens = "one token" if number == 1 else "several tokens"
        logger.info("compiling %d pieces for steps of %s, some seconds each", len(divided.pieces), tokens)
        pieces = {key: _get(artefacts, piece) for key, piece in divided.pieces.items()}
        artefacts.keep_program(key, divided.program.as_json())
        return divided.program, pieces

    def _fitting(self, stored: Any) -> Program | None:
        """The program that was ``stored``; None where it is none, or of a model with other layers or tensors."""
        try:
            program = Program.of_json(stored)
        except (ValueError, KeyError, TypeError):
            return None
        layers, tensors = dict(self._root[0].named_modules()), dict(_tensors(self._root[0]))
        called = {step.address for step in program.steps if isinstance(step, Call)}
        named = {name for name in program.constants.values() if isinstance(name, str)}
        is_known = all(address in layers or address.startswith("tp.") for address in called)
        return program if is_known and named <= tensors.keys() else None

    def _divided(self, number: int) -> Divided:
        ctx = self._ctx
        assert ctx.op_tracing is not None
        traced = trace(self._root[0], self._traced, ctx.op_tracing, ctx.parallel.tp, ctx.torch_device, number)
        divided = divide(traced)
        names = {_place(tensor): name for name, tensor in _tensors(self._root[0])}
        for slot, tensor in divided.constants.items():
            divided.program.constants[slot] = names.get(_place(tensor)) or _numbers(tensor)
        return divided

    @property
    def _selection(self) -> str:
        """A digest of all selections: kernels decide the form of what layers pass on."""
        return SelectionTable(self._ctx.selector.plans).digest

    def _layer(self, address: str) -> Callable[..., Any]:
        if address.startswith("tp."):
            found: Callable[..., Any] = getattr(self._ctx.parallel.tp, address.removeprefix("tp."))
            return found
        return self._root[0].get_submodule(address)


def _get(artefacts: Artefacts, piece: PieceGraph) -> PieceFunction:
    try:
        return artefacts.get(piece)
    except Exception as error:  # a compiler's
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CannotCompileError(f"a piece cannot be compiled: {type(error).__name__}: {first:.200}") from error


def _tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the model, by place."""
    for path, module in root.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}:{name}", tensor.detach()
        if isinstance(module, PluggableLayer):
            for name, tensor in module.weights.items():
                yield f"{path}:weights.{name}", tensor


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _numbers(x: torch.Tensor) -> list[Any]:
    """A tensor that the code made of numbers, as JSON has it."""
    if x.numel() > _MOST_CONSTANT:
        raise CannotCompileError(f"its code uses a tensor {list(x.shape)} that is none of the model's")
    return [str(x.dtype).removeprefix("torch."), list(x.shape), x.flatten().tolist()]


def _constant(stored: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    if isinstance(stored, str):
        return tensors[stored]
    dtype, shape, values = stored
    return torch.tensor(values, dtype=getattr(torch, dtype), device=device).view(shape)


def _environment(ctx: Context) -> str:
    """All that compiled code depends on, beside the code itself."""
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("TORCHINDUCTOR", "TORCH_COMPILE"))
    }
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    device = [ctx.device.platform, ctx.device.name, ctx.device.arch, ctx.device.isa, ctx.device.driver]
    host = [sys.version, platform.machine(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]
    return json.dumps([_FORMAT, versions, variables, host, str(ctx.torch_device), device], sort_keys=True)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
