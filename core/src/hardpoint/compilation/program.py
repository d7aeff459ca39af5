"""The order in which a compiled forward pass runs: pieces, views and layers over numbered slots.

A Program is plain data, which is stored beside its pieces. ``BoundProgram`` runs one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from hardpoint.compilation.tracing import Form, with_form
from hardpoint_plugin_api import ForwardStep

Reference = list[Any]
"""How a step reads a value: ``["slot", 3]``, ``["size", a, b]`` for ``a * T + b`` of T tokens, ``["value", 1]``,
``["list", [...]]``."""

PieceFunction = Callable[..., Sequence[torch.Tensor]]
"""A compiled piece: inputs -> outputs."""


@dataclass
class Piece:
    """A run of the compiled piece ``key``. ``forget``, here and below: the slots that no later step reads."""

    key: str
    reads: list[Reference]
    makes: list[int]
    forget: list[int] = field(default_factory=list)
    kind: str = "piece"


@dataclass
class View:
    """A view, by the operator's name. It costs no kernel."""

    operator: str
    reads: list[Reference]
    makes: int
    forget: list[int] = field(default_factory=list)
    kind: str = "view"


@dataclass
class Call:
    """A call of the layer at ``address``. ``makes``: a slot for each tensor of its results, None for one unread."""

    address: str
    arguments: Form
    reads: list[Reference]
    results: Form
    makes: list[int | None]
    forget: list[int] = field(default_factory=list)
    kind: str = "call"


Step = Piece | View | Call


@dataclass
class Program:
    """``inputs``: the slots of ids and positions. ``constants``: names of the model's tensors, or numbers, by slot."""

    inputs: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    result: Reference = field(default_factory=list)
    num_slots: int = 0
    constants: dict[int, Any] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The pieces' keys, each once."""
        return list(dict.fromkeys(step.key for step in self.steps if isinstance(step, Piece)))

    def forget_early(self) -> None:
        """Note at each step the slots that it reads or makes last: their memory is free from there on."""
        kept, last = {*_slots(self.result), *self.constants}, dict[int, Step]()
        for step in self.steps:
            made = step.makes if isinstance(step.makes, list) else [step.makes]
            for slot in [*_slots(step.reads), *(slot for slot in made if slot is not None)]:
                last[slot] = step
        for slot, step in last.items():
            if slot not in kept:
                step.forget.append(slot)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Self:
        """The program of ``as_json``. Raises ValueError, KeyError or TypeError for other data."""
        kinds = {"piece": Piece, "view": View, "call": Call}
        steps = [kinds[step["kind"]](**step) for step in data["steps"]]
        constants = {int(slot): value for slot, value in data["constants"].items()}
        return cls(data["inputs"], steps, data["result"], data["num_slots"], constants)


_Run = Callable[[list[Any], ForwardStep, int], None]


class BoundProgram:
    """A program over the tensors and layers of one model."""

    def __init__(
        self,
        program: Program,
        constants: Mapping[int, torch.Tensor],
        pieces: Mapping[str, PieceFunction],
        layer: Callable[[str], Callable[..., Any]],
    ) -> None:
        """``layer`` finds what is called at an address."""
        self._first: list[Any] = [None] * program.num_slots
        for slot, tensor in constants.items():
            self._first[slot] = tensor
        self._ids, self._positions = program.inputs
        self._steps = [_bound(step, pieces, layer) for step in program.steps]
        self._result = _reader(program.result)

    def run(self, ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T] -> hidden states [T, hidden]."""
        slots, tokens = self._first.copy(), ids.shape[0]
        slots[self._ids], slots[self._positions] = ids, step.rotary_positions
        for run in self._steps:
            run(slots, step, tokens)
        result: torch.Tensor = self._result(slots, tokens)
        return result


def _bound(step: Step, pieces: Mapping[str, PieceFunction], layer: Callable[[str], Callable[..., Any]]) -> _Run:
    forget = step.forget
    match step:
        case Piece():
            readers, makes, piece = [_reader(each) for each in step.reads], step.makes, pieces[step.key]

            def run(slots: list[Any], step: ForwardStep, tokens: int) -> None:
                made = piece(*[read(slots, tokens) for read in readers])
                for slot, value in zip(makes, made, strict=True):
                    slots[slot] = value
                for slot in forget:
                    slots[slot] = None

        case View():
            function, readers, to = _view(step.operator), [_reader(each) for each in step.reads], step.makes

            def run(slots: list[Any], step: ForwardStep, tokens: int) -> None:
                slots[to] = function(*[read(slots, tokens) for read in readers])
                for slot in forget:
                    slots[slot] = None

        case Call():
            called, readers = layer(step.address), [_reader(each) for each in step.reads]
            arguments, targets, results = step.arguments, step.makes, step.results
            is_one = results == ["tensor", 0]

            def run(slots: list[Any], step: ForwardStep, tokens: int) -> None:
                given = [read(slots, tokens) for read in readers]
                found = called(*with_form(arguments, given, step, called))
                for slot, value in zip(targets, [found] if is_one else _tensors(results, found), strict=True):
                    if slot is not None:
                        slots[slot] = value if value.is_contiguous() else value.contiguous()
                for slot in forget:
                    slots[slot] = None

    return run


def _tensors(form: Form, value: Any) -> list[torch.Tensor]:
    """The tensors of ``value``, in the order of its form."""
    kind, *parts = form
    match kind:
        case "tensor":
            return [value]
        case "tuple":
            return [x for part, each in zip(parts[0], value, strict=True) for x in _tensors(part, each)]
        case "dict":
            return [x for name, part in parts[0].items() for x in _tensors(part, value[name])]
        case "quantized":
            return [value.data, value.scale]
    return []


def _reader(reference: Reference) -> Callable[[list[Any], int], Any]:
    kind, *parts = reference
    match kind:
        case "slot":
            slot = parts[0]
            return lambda slots, tokens: slots[slot]
        case "size":
            a, b = parts
            return lambda slots, tokens: a * tokens + b
        case "list":
            readers = [_reader(each) for each in parts[0]]
            return lambda slots, tokens: [read(slots, tokens) for read in readers]
    value = parts[0]
    return lambda slots, tokens: value


def _view(name: str) -> Callable[..., Any]:
    """The operator called ``name``, such as ``aten.view.default``."""
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def _slots(references: Any) -> list[int]:
    """The slots within a reference, or a list of them."""
    if not references:
        return []
    if references[0] == "slot":
        return [references[1]]
    if references[0] in ("size", "value"):
        return []
    nested = references[1] if references[0] == "list" else references
    return [slot for each in nested for slot in _slots(each)]
