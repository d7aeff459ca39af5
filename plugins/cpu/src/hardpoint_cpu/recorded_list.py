"""Steps as recorded lists: what a function calls is written down with the memory it uses, and done again.

Compiled kernels stand in a list that is replayed by one call into C and one wake of the threads; other torch operators,
and kernels of other plugins (opaque calls), are called again from Python, between lists. While a step is recorded
nothing is computed: memory holds NaN, so what asks for a tensor's values cannot be recorded.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hardpoint.platforms.host_parameters import rebinds
from hardpoint_cpu import native
from hardpoint_cpu.arena import Arena, Block, Geometry
from hardpoint_plugin_api import GraphEngine, PlatformError

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

_aten = torch.ops.aten

_ALLOCATIONS = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
_VIEWS_IN_ALL_BUT_NAME = {_aten._unsafe_view, _aten.lift_fresh, _aten.detach_}
_MASKABLE = {_aten.index, _aten._unsafe_index}
_HOST_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
"""Methods that read a tensor's values past the dispatcher."""

_NOTHING = 0xFF
"""Each byte of memory that is handed out while a step is recorded: NaN in floats, -1 in integers.

Values that earlier runs left there could be right by chance, for a kernel that wrongly reads them: its fault would show
in later steps alone.
"""

_TASK_BYTES = 400
"""Bytes of a recorded call of a kernel: csrc/task.h and csrc/team.h."""


class RecordedLists(GraphEngine):
    """The graph engine of CPUs.

    All its graphs share the memory of what lies between their operators, so that no two may run at the same time.
    Results have memory of their own: they are valid until the same graph runs again.
    """

    collectives_allowed = False
    sees_all_kernels = False

    def __init__(self) -> None:
        self._arena = Arena()
        self._recorder: _Recorder | None = None
        self.bytes_per_graph = 0  # the most that one has taken so far, beside the shared memory
        self._alive: weakref.WeakSet[RecordedList] = weakref.WeakSet()

    @property
    def shared_bytes(self) -> int:
        """Bytes that all graphs share."""
        return self._arena.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that all graphs take."""
        return self.shared_bytes + sum(graph.nbytes for graph in self._alive)

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> RecordedList:
        """Record ``fn(**inputs)``: it is called once, computes nothing, and changes no memory.

        Numbers among ``inputs`` are part of the recording; a run with others calls ``fn`` anew. Other tensors that
        ``fn`` reads or writes must keep their addresses. Raises PlatformError for a step that asks for a tensor's
        values, changes a tensor's shape in place, keeps tensors, or is prepared within another; ``fn``'s own errors
        come through.
        """
        recorder = _Recorder(key, self._arena)
        before, self._recorder = self._recorder, recorder
        try:
            result = recorder.record(fn, inputs)
        finally:
            self._recorder = before
        prepared = recorder.finish(result)
        del result
        recorder.check_that_nothing_is_kept()
        graph = RecordedList(fn, dict(inputs), prepared, self._arena)
        self.bytes_per_graph = max(self.bytes_per_graph, graph.nbytes)
        self._alive.add(graph)
        return graph

    def opaque(self, call: Callable[..., None], *arguments: Any) -> None:
        """See GraphEngine; ``call`` is not called while it is recorded."""
        if self._recorder is None:
            call(*arguments)
        else:
            self._recorder.write_opaque(call, arguments)

    def transient(self, result: torch.Tensor) -> torch.Tensor:
        """Leave ``result`` in the arena that all graphs share: it is valid until any graph of this engine runs.

        See GraphEngine.transient.
        """
        if self._recorder is not None:
            self._recorder.leave_in_arena(result)
        return result


@dataclass(frozen=True)
class _Place:
    """A tensor in the arena: where it lies, without keeping its block."""

    block: Block
    geometry: Geometry


@dataclass
class _Operator:
    """A torch operator to be called again. Fresh results are copied to ``targets``, in the order of the leaves."""

    func: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[int]
    targets: list[Any]

    def map_places(self, place: Callable[[_Place], torch.Tensor]) -> None:
        """Replace places by tensors."""
        self.args, self.kwargs, self.targets = tree_map_only(_Place, place, (self.args, self.kwargs, self.targets))

    def __call__(self) -> None:
        result = self.func(*self.args, **self.kwargs)
        if self.fresh:
            values = result if len(self.func._schema.returns) > 1 else (result,)
            for target, value in zip(self.targets, tree_leaves([values[i] for i in self.fresh]), strict=True):
                if isinstance(target, torch.Tensor):
                    target.copy_(value)


@dataclass
class _OpaqueCall:
    """A function to be called again on the same tensors."""

    call: Callable[..., None]
    arguments: tuple[Any, ...]

    def map_places(self, place: Callable[[_Place], torch.Tensor]) -> None:
        """Replace places by tensors."""
        self.arguments = tree_map_only(_Place, place, self.arguments)

    def __call__(self) -> None:
        self.call(*self.arguments)


_FromPython = _Operator | _OpaqueCall


@dataclass
class _Recording:
    """The calls of a replay, in order, and its result. ``constants``: tensors whose addresses lists may hold."""

    steps: list[CapsuleType | _FromPython]
    result: Any
    constants: list[torch.Tensor]
    result_bytes: int = 0


@dataclass
class _Birth:
    """When a block was handed out: before this step, and before this task of the list that was being recorded."""

    block: Block
    step: int
    task: int


class RecordedList:
    """A CapturedGraph. It keeps its function, inputs and results alive."""

    def __init__(self, fn: Callable[..., Any], inputs: dict[str, object], recording: _Recording, arena: Arena) -> None:
        self._fn, self._inputs, self._recording, self._arena = fn, inputs, recording, arena
        steps = recording.steps
        self._lists = [step for step in steps if not isinstance(step, _FromPython)]
        self._only_list = self._lists[0] if len(steps) == len(self._lists) == 1 else None

    @property
    def num_lists(self) -> int:
        """The number of calls into C that a run makes."""
        return len(self._lists)

    @property
    def num_kernels(self) -> int:
        """How many calls of compiled kernels were recorded."""
        return sum(native.length(tasks) for tasks in self._lists)

    @property
    def num_operators(self) -> int:
        """The number of operators that a run calls from Python."""
        return sum(isinstance(step, _Operator) for step in self._recording.steps)

    @property
    def num_opaque_calls(self) -> int:
        """How many calls of other plugins' kernels each run repeats."""
        return len(self._recording.steps) - self.num_lists - self.num_operators

    @property
    def nbytes(self) -> int:
        """Bytes that this graph alone takes."""
        return self._recording.result_bytes + self.num_kernels * _TASK_BYTES

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        """Run once; results are where they were. With other numbers the function itself runs, and results are new.

        Raises PlatformError for an update of what is not a number.
        """
        if update and rebinds(self._inputs, update):
            with torch.no_grad():
                return self._fn(**(self._inputs | dict(update)))
        if self._only_list is not None:
            native.replay(self._only_list)
            return self._recording.result
        with torch.inference_mode():
            for step in self._recording.steps:
                if isinstance(step, _FromPython):
                    step()
                else:
                    native.replay(step)
        return self._recording.result


class _NoHostReads(TorchFunctionMode):
    """Refuses methods that read values without the dispatcher's knowing."""

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self._key = key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            raise _refusal(self._key, func.__name__, "asks for a tensor's values")
        return func(*args, **(kwargs or {}))


@dataclass
class _Written:
    """The tensors that an operator writes, by alias set."""

    by_set: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Written:
        written = cls()
        for i, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            if info is not None and info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                written.by_set |= dict.fromkeys(info.before_set, value)
        return written

    def returned(self, alias_info: Any) -> Any:
        """The result of an operator that returns the tensor it wrote."""
        return self.by_set[next(iter(alias_info.before_set))]


class _Recorder(TorchDispatchMode):
    """Writes down one step."""

    def __init__(self, key: Hashable, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, which says nothing of types
        self._key, self._arena = key, arena
        self._steps: list[CapsuleType | _FromPython] = []
        self._list = native.new_list()
        self._births: list[_Birth] = []
        self._constants: list[torch.Tensor] = []
        self._in_arena: set[Block] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own hook: otherwise a first call imports its compiler, which takes more than a second."""
        return False

    def record(self, fn: Callable[..., Any], inputs: Mapping[str, object]) -> Any:
        """Call ``fn``; afterwards this thread records nothing, whatever happened."""
        if native.is_recording():
            raise PlatformError(f"step {self._key!r} cannot be recorded within another")
        native.record(self._list)
        try:
            with torch.no_grad(), _NoHostReads(self._key), self:
                return fn(**inputs)
        finally:
            native.record(None)

    def finish(self, result: Any) -> _Recording:
        """Give results memory of their own, and operators their tensors."""
        self._close_list()
        own: dict[Block, torch.Tensor] = {}

        def on_own_memory(x: torch.Tensor) -> torch.Tensor:
            block = self._arena.block_of(x)
            if block is None:
                return x
            if block in self._in_arena:
                return Geometry.of(x).on(block.bytes())
            if block not in own:
                own[block] = torch.zeros(block.size, dtype=torch.uint8)
                self._relocate(block, own[block])
            return Geometry.of(x).on(own[block])

        result = tree_map_only(torch.Tensor, on_own_memory, result)
        for step in self._steps:
            if isinstance(step, _FromPython):
                step.map_places(lambda at: at.geometry.on(own.get(at.block, at.block.bytes())))
        return _Recording(self._steps, result, self._constants, sum(memory.numel() for memory in own.values()))

    def write_opaque(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Write down ``call(*arguments)``, which is not called now."""
        self._close_list()
        self._steps.append(_OpaqueCall(call, tree_map_only(torch.Tensor, self._place, arguments)))

    def leave_in_arena(self, x: torch.Tensor) -> None:
        """Give ``x``, which is to be a result, no memory of its own."""
        if (block := self._arena.block_of(x)) is not None:
            self._in_arena.add(block)

    def check_that_nothing_is_kept(self) -> None:
        """Raise PlatformError where tensors of this step outlive it: other steps would write over them."""
        self._arena.collect()
        if any(birth.block.alive for birth in self._births):
            gc.collect()  # they may be held by nothing but a cycle
            self._arena.collect()
        kept = sum(birth.block.size for birth in self._births if birth.block.alive)
        if kept:
            raise PlatformError(
                f"step {self._key!r} cannot be recorded: it keeps {kept:,} bytes of tensors that it does not return in "
                "lists, tuples or dicts; allocate before preparing what is to stay"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        device = _device(func, args, kwargs)
        if func.is_view or func.overloadpacket in _VIEWS_IN_ALL_BUT_NAME or device == "meta" or _returns_facts(func):
            result = func(*args, **kwargs)
            if func.overloadpacket is _aten.lift_fresh:
                self._constants.append(result)
            return result
        if device != "cpu":
            raise _refusal(self._key, func, f"runs on {device}")
        return self._write_down(func, args, kwargs)

    def _write_down(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _Written.of(func, args, kwargs)
        returns = func._schema.returns
        outputs = self._shapes(func, args, kwargs)
        fresh = [i for i, one in enumerate(returns) if one.alias_info is None]
        values = [
            tree_map_only(torch.Tensor, self._allocate, outputs[i]) if i in fresh else written.returned(one.alias_info)
            for i, one in enumerate(returns)
        ]
        if func.overloadpacket not in _ALLOCATIONS:
            self._close_list()
            targets = tree_leaves([values[i] for i in fresh])
            entry = tree_map_only(torch.Tensor, self._place, (args, kwargs, targets))
            self._steps.append(_Operator(func, entry[0], entry[1], fresh, entry[2]))
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def _shapes(self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The operator's outputs, on the meta device; of allocations themselves, which cost less than to import it."""
        if func.overloadpacket in _ALLOCATIONS:
            return (func(*args, **kwargs),)
        if (known := _known_shape(func, args, kwargs)) is not None:
            return (known,)
        on_meta: dict[int, torch.Tensor] = {}

        def meta(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in on_meta:
                stride = x.stride() if x.layout == torch.strided else None
                on_meta[id(x)] = (
                    torch.empty(x.shape, dtype=x.dtype, device="meta")
                    if stride is None
                    else torch.empty_strided(x.shape, stride, dtype=x.dtype, device="meta")
                )
            return on_meta[id(x)]

        meta_args, meta_kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
        meta_args, meta_kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (meta_args, meta_kwargs))
        if "device" in kwargs or _is_factory(func, args, kwargs):
            meta_kwargs = meta_kwargs | {"device": torch.device("meta")}
        meta_kwargs.pop("pin_memory", None)
        try:
            result = func(*meta_args, **meta_kwargs)
        except RuntimeError as error:  # NotImplementedError among them; some have no rule for a dtype that they run in
            raise _refusal(self._key, func, f"does not tell the shape of its results: {error}") from error
        for value in _Written.of(func, args, kwargs).by_set.values():
            for x in tree_leaves(value):
                if isinstance(x, torch.Tensor) and meta(x).shape != x.shape:
                    raise _refusal(self._key, func, "changes the shape of a tensor in place")
        returns = len(func._schema.returns)
        return result if returns > 1 else (result,) if returns else ()

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        if like.layout != torch.strided:
            raise PlatformError(f"step {self._key!r} cannot be recorded: a tensor has the layout {like.layout}")
        geometry = Geometry(like.dtype, tuple(like.size()), tuple(like.stride()))
        if not geometry.nbytes:
            return torch.empty_strided(geometry.size, geometry.stride, dtype=like.dtype)
        x, block = self._arena.allocate(geometry)
        ctypes.memset(block.address, _NOTHING, block.size)
        self._births.append(_Birth(block, len(self._steps), native.length(self._list)))
        return x

    def _place(self, x: torch.Tensor) -> torch.Tensor | _Place:
        block = self._arena.block_of(x)
        return x if block is None else _Place(block, Geometry.of(x))

    def _close_list(self) -> None:
        if native.length(self._list):
            self._steps.append(self._list)
            self._list = native.new_list()
            if native.is_recording():
                native.record(self._list)

    def _relocate(self, block: Block, memory: torch.Tensor) -> None:
        """Have lists use ``memory`` for a block, from when it was handed out: before, its place was another's."""
        birth = next(birth for birth in self._births if birth.block is block)
        for number, step in enumerate(self._steps[birth.step :], birth.step):
            if not isinstance(step, _FromPython):
                first = birth.task if number == birth.step else 0
                native.relocate(step, first, block.address, block.address + block.size, memory.data_ptr())

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(func, OpOverload):
            raise _refusal(self._key, func, "is no plain operator")
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _refusal(self._key, func, "waits for other ranks")
        tags = func.tags
        by_data = torch.Tag.dynamic_output_shape in tags
        if func.overloadpacket in _MASKABLE:
            indices = args[1] if len(args) > 1 else kwargs["indices"]
            by_data = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if by_data or torch.Tag.data_dependent_output in tags:
            raise _refusal(self._key, func, "asks for a tensor's values")
        if torch.Tag.inplace_view in tags and func.overloadpacket not in _VIEWS_IN_ALL_BUT_NAME:
            raise _refusal(self._key, func, "changes the shape of a tensor in place")


def _known_shape(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of operators on elements, and of look-ups, on the meta device; None for other operators.

    Torch imports its compiler to answer for these on the meta device, which takes one to two seconds. Strides of
    results follow those of operands; here are the cases in which they are those of a contiguous tensor.
    """
    if "out" in kwargs:
        return None
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if torch.Tag.pointwise in func.tags and all(x.is_contiguous() for x in tensors):
        ones: dict[int, torch.Tensor] = {}  # a tensor that stands there twice is one tensor

        def one(x: torch.Tensor) -> torch.Tensor:
            return ones.setdefault(id(x), torch.ones((1,) * x.ndim, dtype=x.dtype))

        result = func(*tree_map_only(torch.Tensor, one, args), **tree_map_only(torch.Tensor, one, kwargs))
        return _on_meta(result.dtype, *(x.shape for x in tensors)) if isinstance(result, torch.Tensor) else None
    if func is _aten.index.Tensor and not kwargs and len(args) == 2:
        x, indices = args
        whole = x.is_contiguous() or x.ndim == len(indices)
        if whole and all(index is not None and index.is_contiguous() for index in indices):
            return _on_meta(x.dtype, *(index.shape for index in indices), rest=x.shape[len(indices) :])
    return None


def _on_meta(dtype: torch.dtype, *shapes: Sequence[int], rest: Sequence[int] = ()) -> torch.Tensor:
    """A tensor of the shape that ``shapes`` are broadcast to, then ``rest``."""
    shape = np.broadcast_shapes(*shapes)  # torch.broadcast_shapes imports the compiler, too
    return torch.empty((*shape, *rest), dtype=dtype, device="meta")


def _device(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The type of device that an operator runs on."""
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked).type
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    others = [x.device.type for x in tensors if x.device.type != "cpu"]
    return others[0] if others else "cpu"


def _is_factory(func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator makes a tensor out of none, on a device that it is to be told."""
    takes_device = any(argument.name == "device" for argument in func._schema.arguments)
    return takes_device and not any(isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs)))


def _returns_facts(func: OpOverload[..., Any]) -> bool:
    """Whether an operator writes nothing and returns no tensor, but what follows from shapes and settings."""
    return not func._schema.is_mutable and not any("Tensor" in str(one.type) for one in func._schema.returns)


def _refusal(key: Hashable, func: object, why: str) -> PlatformError:
    return PlatformError(f"step {key!r} cannot be recorded: operator {func} {why}")
