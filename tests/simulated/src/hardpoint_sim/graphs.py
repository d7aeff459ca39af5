"""Steps as recorded lists: the operators that a function called, with the memory they used, called again.

Recording leaves memory as it was, as capturing does where nothing runs; a replay puts new results where the first ones
were. Numbers among the inputs are host parameters. Which arguments they became is found by recording twice, with other
numbers the second time: an argument that changed must be one of them, and nothing else may differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias, TypeGuard, cast

from hardpoint_plugin_api import GraphEngine, PlatformError
from hardpoint_sim import _C

Number = int | float
Place = tuple[int, int]
"""A node of a recording, and an argument of it."""
Piece: TypeAlias = "_C.Recording | Callable[[], None]"
"""A part of a step, which is replayed or called."""


class RecordedLists(GraphEngine):
    """One device's graph engine."""

    max_graphs = 16
    collectives_allowed = False
    piece_sizes = (24, 48)

    def __init__(self, device: int) -> None:
        self._device = device
        self._pieces: list[Piece] | None = None
        self._alive: weakref.WeakSet[RecordedList] = weakref.WeakSet()

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> RecordedList:
        """Record ``fn(**inputs)``. It runs once, or twice where numbers are among ``inputs``; memory is left as it was.

        Raises PlatformError where ``fn`` waits for the device or does what cannot be recorded, where a number decides
        about more than arguments, and for more graphs than may be kept.
        """
        if len(self._alive) >= self.max_graphs:
            raise PlatformError(f"{self.max_graphs} recorded steps are kept already; drop one before {key!r}")
        numbers: dict[str, Number] = {n: v for n, v in inputs.items() if _is_number(v)}
        pieces, result = self._record(key, fn, inputs)
        places = {}
        if numbers:
            others = {name: _another(value, i) for i, (name, value) in enumerate(numbers.items())}
            second, _ = self._record(key, fn, dict(inputs) | others)
            if len(pieces) > 1 or len(second) > 1:
                raise PlatformError(f"step {key!r} cannot be recorded: it is in pieces, and has host parameters")
            places = _places(key, numbers, others, *(_C.describe(cast("_C.Recording", x[0])) for x in (pieces, second)))
        prepared = RecordedList(pieces, result, dict(inputs), numbers, places)
        self._alive.add(prepared)
        return prepared

    def interrupt(self, call: Callable[[], None]) -> None:
        """End the recording here and begin another behind ``call``; it is not called while recordings are made."""
        if self._pieces is None:
            call()
            return
        _C.end_recording(cast("_C.Recording", self._pieces[-1]))
        self._pieces += [call, _C.begin_recording(self._device)]

    def _record(
        self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]
    ) -> tuple[list[Piece], object]:
        tag = _C.exchange_tag("graphs")
        try:
            pieces: list[Piece] = [_C.begin_recording(self._device)]
            self._pieces = pieces
            try:
                return pieces, fn(**inputs)
            except RuntimeError as error:
                raise PlatformError(f"step {key!r} cannot be recorded: {error}") from error
            finally:
                _C.end_recording(cast("_C.Recording", pieces[-1]))
                self._pieces = None
        finally:
            _C.exchange_tag(tag)


class RecordedList:
    """A CapturedGraph. It keeps its inputs and results alive."""

    def __init__(
        self,
        pieces: list[Piece],
        result: object,
        inputs: dict[str, object],
        numbers: dict[str, Number],
        places: dict[str, list[Place]],
    ) -> None:
        self._pieces, self._result, self._inputs = pieces, result, inputs
        self._numbers, self._places, self._bound = numbers, places, dict(numbers)

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        """Replay; results are where they were. Raises PlatformError for an update of what is no host parameter."""
        update = update or {}
        for name, value in update.items():
            self._check(name, value)
        for name, value in self._numbers.items():
            self._bind(name, cast(Number, update.get(name, value)))
        for piece in self._pieces:
            if callable(piece):
                piece()
            else:
                _C.replay(piece)
        return self._result

    def _check(self, name: str, value: object) -> None:
        if name not in self._numbers:
            kind = "a fixed buffer: write into it" if name in self._inputs else "no input"
            raise PlatformError(f"{name!r} is {kind}; host parameters are: {', '.join(self._numbers) or 'none'}")
        if not _is_number(value):
            raise PlatformError(f"host parameter {name!r} must be a number, got {value!r}")
        if value != self._numbers[name] and not self._places[name]:
            raise PlatformError(f"host parameter {name!r} reaches no operator, so {value!r} would change nothing")

    def _bind(self, name: str, value: Number) -> None:
        if value != self._bound[name]:
            for node, argument in self._places[name]:
                _C.rebind(cast("_C.Recording", self._pieces[0]), node, argument, value)
            self._bound[name] = value


def _is_number(value: object) -> TypeGuard[Number]:
    return type(value) in (int, float)  # a bool decides, and is none


def _another(value: Number, index: int) -> Number:
    """A number unlike ``value``, and unlike what other parameters of the same value get."""
    return value + abs(value) + 1 + index


def _places(
    key: Hashable,
    numbers: Mapping[str, Number],
    others: Mapping[str, Number],
    first: list[tuple[str, tuple[Any, ...]]],
    second: list[tuple[str, tuple[Any, ...]]],
) -> dict[str, list[Place]]:
    """Where each host parameter stands, by what differs between two recordings."""
    places: dict[str, list[Place]] = {name: [] for name in numbers}
    if [(op, len(arguments)) for op, arguments in first] != [(op, len(arguments)) for op, arguments in second]:
        raise PlatformError(f"step {key!r} cannot be recorded: {', '.join(numbers)} decide which operators run")
    for node, ((op, before), (_, after)) in enumerate(zip(first, second, strict=True)):
        for argument, pair in enumerate(zip(before, after, strict=True)):
            if pair[0] == pair[1]:
                continue
            name = next((name for name in numbers if pair == (numbers[name], others[name])), None)
            if name is None:
                raise PlatformError(
                    f"step {key!r} cannot be recorded: an argument of {op}, {pair[0]}, follows from a host parameter "
                    f"({', '.join(numbers)}) without being one"
                )
            places[name].append((node, argument))
    return places
