"""A model's forward pass as a graph of torch operators and calls of layers.

The pass runs once on tensors without values, whose number of tokens is a symbol. A layer that has ``allocate`` is one
node of the graph, ``hardpoint::layer``; all other code is seen through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hardpoint.layers.base import PluggableLayer
from hardpoint.ops.tracing import CannotCompileError, OpTracing
from hardpoint_plugin_api import ForwardStep, Quantized, RankGroup

Form = list[Any]
"""How arguments or results are made of tensors, as JSON has it: ``["tensor", 0]`` is the first tensor, ``["step"]`` the
step, ``["quantized", DATA, SCALE]``, ``["tuple", [...]]``, ``["dict", {...}]``, ``["value", 3]``."""

TOKENS = 61
"""Of the traced pass. A prime that is no size of a model."""

_library = torch.library.Library("hardpoint", "FRAGMENT")
_library.define("layer(Tensor[] given, int number) -> Tensor[]")
_allocating: ContextVar[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = ContextVar("hardpoint_allocating")


def _fake_layer(given: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    return _allocating.get()(given)


torch.library.register_fake("hardpoint::layer", _fake_layer, lib=_library)
torch.fx.node.has_side_effect(torch.ops.hardpoint.layer.default)


@dataclass(frozen=True)
class LayerCall:
    """A call that the graph holds as one node. ``address``: the layer's place in the model, or ``tp.all_reduce``."""

    address: str
    arguments: Form
    results: Form


@dataclass
class Traced:
    """``graph`` holds ``hardpoint::layer`` with numbers of ``calls``; its first inputs are ids and positions."""

    graph: torch.fx.GraphModule
    calls: list[LayerCall] = field(default_factory=list)


def form_of(value: object, tensors: list[torch.Tensor]) -> Form:
    """The form of ``value``; its tensors are appended to ``tensors``. Raises CannotCompileError for other objects."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, ForwardStep):
        return ["step"]
    if isinstance(value, Quantized):
        return ["quantized", form_of(value.data, tensors), form_of(value.scale, tensors)]
    if isinstance(value, tuple | list):
        return ["tuple", [form_of(each, tensors) for each in value]]
    if isinstance(value, dict):
        return ["dict", {str(name): form_of(each, tensors) for name, each in value.items()}]
    if value is None or isinstance(value, bool | float | str) or type(value) is int:
        return ["value", value]
    raise CannotCompileError(f"a layer is called with {type(value).__name__}")


def with_form(form: Form, tensors: Sequence[Any], step: object, layer: object = None) -> Any:
    """The value of this form that is made of ``tensors``; ``layer`` knows the format of what is quantized for it."""
    kind, *parts = form
    match kind:
        case "tensor":
            return tensors[parts[0]]
        case "step":
            return step
        case "quantized":
            data, scale = (with_form(part, tensors, step) for part in parts)
            return Quantized(data, scale, getattr(layer, "input_spec"))  # noqa: B009  # of any layer that takes it
        case "tuple":
            return tuple(with_form(part, tensors, step, layer) for part in parts[0])
        case "dict":
            return {name: with_form(part, tensors, step, layer) for name, part in parts[0].items()}
    return parts[0]


class _Tracer:
    """Writes down the calls of one pass."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def call(self, address: str, layer: object, allocate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of ``layer``, whose results are like those of ``allocate``."""
        if kwargs:
            raise CannotCompileError(f"{address} is called with keyword arguments ({', '.join(kwargs)})")
        given: list[torch.Tensor] = []
        arguments = form_of(args, given)
        step = next((x for x in args if isinstance(x, ForwardStep)), None)
        form: Form = []

        def results(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            made: list[torch.Tensor] = []
            form[:] = form_of(allocate(*with_form(arguments, tensors, step, layer)), made)
            return made

        token = _allocating.set(results)
        try:
            found = torch.ops.hardpoint.layer(given, len(self.calls))
        finally:
            _allocating.reset(token)
        self.calls.append(LayerCall(address, arguments, form))
        return with_form(form, found, step, layer)


def trace(
    root: nn.Module,
    hidden: Callable[[torch.Tensor, ForwardStep], torch.Tensor],
    ops: OpTracing,
    group: RankGroup,
    device: torch.device,
    num_tokens: int = TOKENS,
) -> Traced:
    """The graph of ``hidden(ids [T], step)``, of the layers of ``root``, for any T of at least 2.

    With ``num_tokens`` 1 it is the graph for one token. Raises CannotCompileError for code that cannot be traced.
    """
    with quiet():
        from torch.fx.experimental.proxy_tensor import make_fx

    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return hidden(ids, ForwardStep(positions, positions, [], []))

    tracer = _Tracer()
    inputs = [torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(2)]
    try:
        with quiet(), _as_nodes(root, group, tracer), ops.on(), torch.inference_mode(False), torch.no_grad():
            functional = torch.func.functionalize(run, remove="mutations")
            graph = make_fx(functional, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    except CannotCompileError:
        raise
    except Exception as error:  # code of hundreds of models
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CannotCompileError(f"its code cannot be traced: {type(error).__name__}: {first:.200}") from error
    return Traced(graph, tracer.calls)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop the warnings that torch's compiler gives of its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _as_nodes(root: nn.Module, group: RankGroup, tracer: _Tracer) -> Iterator[None]:
    """Have layers that allocate, and collectives of ``group``, be nodes inside."""
    with ExitStack() as stack:
        for address, layer in root.named_modules():
            if not isinstance(layer, PluggableLayer):
                continue
            if layer.allocate is not None:
                stack.enter_context(_replaced(layer, "forward", partial(tracer.call, address, layer, layer.allocate)))
            elif not (layer.traceable or type(layer).__module__.startswith("hardpoint.")):
                raise CannotCompileError(f"{address} is a layer of another plugin, and is not traceable")
        if group.size > 1:
            made: dict[str, Callable[..., Any]] = {
                "all_reduce": torch.empty_like,
                "all_gather": partial(_gathered, group.size),
            }
            for name, results in made.items():
                call = partial(tracer.call, f"tp.{name}", None, results)
                stack.enter_context(_replaced(group, name, call))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """``owner.name`` is ``value`` inside."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _gathered(size: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])
