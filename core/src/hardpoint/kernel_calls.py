"""Calls of plugins' kernels while a step is prepared: which of them a graph engine records, and which each run repeats.

A graph engine may know torch's operators and its own plugin's kernels alone. Other work of a kernel, such as a call
into C++ with addresses, leaves no trace in such an engine's recording. So a call of a kernel that another plugin
brought passes through here. Outside of preparation it is the call and nothing else. While a step is prepared it is
recorded through, or stands in the step as an *opaque call*: each run calls the kernel again, on the same tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, register_dataclass, tree_flatten, tree_leaves, tree_unflatten

from hardpoint.adapters.candidates import AdaptedOffer
from hardpoint.kernel_results import Promise, check_first_plan, check_result
from hardpoint.ops.error_model import ErrorModel
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.record import CORE
from hardpoint_plugin_api import (
    API_VERSION,
    AttentionCall,
    BatchedExpertsCall,
    CapturedGraph,
    Contribution,
    EngineError,
    ExpertsCall,
    GraphEngine,
    LinearCall,
    PlatformError,
    Quantized,
    StoreCall,
)

METHODS: Mapping[str, tuple[str, ...]] = {
    "attention": ("store", "forward"),
    "experts": ("apply",),
    "layer": ("forward",),
    "linear": ("apply", "rows"),
}
"""The methods of a kernel that steps call, by family. Implementations of ops are functions."""

REPEATED = frozenset({"op", "experts", "linear"})
"""Families of which a kernel that is not ``capturable`` can be an opaque call. Layers may count their calls, and what
may be captured of attention its grades say."""

_ERRORS = ErrorModel()
"""Of a kernel that is no op's: its own results are the reference."""

_LARGEST_WATCHED = 2**26
"""Bytes: larger tensors are a model's, not a step's, and are not copied."""

_CALLS = (AttentionCall, StoreCall, ExpertsCall, BatchedExpertsCall, LinearCall)
"""The objects that hold a method's arguments."""

_WITH_OUT = (AttentionCall, ExpertsCall, BatchedExpertsCall)
"""Call objects of kernels that write to their field ``out`` and return nothing."""

_NOT_READ = frozenset({"out", "workspace"})
"""Fields of call objects that a kernel writes to, whatever they hold before."""

_COMPILED = Offer(
    Contribution("op", "compiled", "torch._inductor:standalone_compile"), "torch.compile", API_VERSION, "torch", ""
)
"""Code that is made at a start, and that no plugin contributes."""

_Arguments = tuple[Any, ...]
_Keywords = Mapping[str, Any]
_Written = Callable[[_Arguments, _Keywords, object], object]


def _result_and_out(args: _Arguments, kwargs: _Keywords, result: object) -> object:
    return result, [value.out for value in args if isinstance(value, _WITH_OUT)]


for _kind in (*_CALLS, Quantized):  # so that a look for tensors among arguments finds those that these hold
    register_dataclass(_kind)


@dataclass(eq=False)
class Kernel:
    """A function of a plugin's kernel. ``offer`` is whose; ``written`` finds the call's outputs among its arguments and
    its result, as far as they are tensors of the step. ``promise``, until the first result was compared with it, makes
    outputs like those that a call must return. ``is_watched``: whether results in a replay are compared with others."""

    offer: Offer
    name: str
    function: Callable[..., Any]
    capturable: bool
    traceable: bool
    errors: ErrorModel
    written: _Written
    promise: Promise | None = None
    is_watched: bool = True

    def __call__(self, args: _Arguments, kwargs: _Keywords) -> Any:
        """Call the function. Raises PluginLoadError where its first result is not what its interface asks for."""
        result = self.function(*args, **kwargs)
        if self.promise is not None:
            check_result(self.offer, self.name, result, self.promise(*args, **kwargs))
            self.promise = None
        return result


@dataclass(frozen=True)
class WatchedCall:
    """One call of a step that ran: copies of what the kernel was given, and of what came of it."""

    kernel: Kernel
    given: list[torch.Tensor]
    made: list[torch.Tensor]


class KernelCalls:
    """One engine's kernels of plugins other than core and ``home``, which is the platform's own.

    Kernels of those are left as they are, but for what cannot be captured. With ``is_on`` False no step is prepared,
    and calls pass through here for the check of their first result alone.
    """

    def __init__(self, home: str = CORE, is_on: bool = True) -> None:
        self._home, self._is_on = frozenset({CORE, home}), is_on
        self._kernels: list[Kernel] = []
        self._compiled: list[Kernel] = []
        self._repeated: set[Offer] = set()
        self._stage: _Noting | _Recording | _Watching | None = None

    def wrap(
        self,
        offer: Offer,
        target: object,
        function: Callable[..., Any],
        written: Sequence[str] = (),
        errors: ErrorModel = _ERRORS,
        promise: Promise | None = None,
    ) -> Callable[..., Any]:
        """``function``, an implementation of an op with these ``errors`` that writes to its parameters ``written``.

        Its first result is compared with what ``promise`` makes of the same arguments.
        """

        def changed(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> object:
            if not written:
                return result
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            return result, [arguments.get(name) for name in written]

        name = offer.contribution.of or offer.contribution.name
        return self._seam(offer, (function, target), name, function, changed, errors, promise)

    def wrap_compiled(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which a compiler made of torch operators, and which writes to no argument.

        It is taken for right, so that nothing that it returns is watched; an engine that records operators does not see
        what it launches.
        """
        kernel = Kernel(
            _COMPILED, name, function, True, False, _ERRORS, lambda args, kwargs, result: result, is_watched=False
        )
        if self._is_on:
            self._compiled.append(kernel)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            stage = self._stage
            return function(*args) if stage is None else stage.call(kernel, args, {})

        return call

    def attach(self, offer: Offer, kernel: object, promises: Mapping[str, Promise] = MappingProxyType({})) -> None:
        """Have what steps call of ``kernel``, an instance that ``offer`` made, pass through here.

        The first results of the methods in ``promises`` are compared with what those make of the same arguments.
        """
        family = offer.contribution.family
        for name in METHODS[family]:
            function = getattr(kernel, name)
            seam = self._seam(offer, (kernel,), name, function, _result_and_out, promise=promises.get(name))
            if seam is not function:
                setattr(kernel, name, seam)
        if family == "attention" and offer.plugin not in self._home:
            check_first_plan(offer, kernel)

    @property
    def offers(self) -> list[Offer]:
        """The contributions whose calls pass through here, each once."""
        return list(dict.fromkeys(kernel.offer for kernel in self._kernels))

    @property
    def third_party(self) -> list[Offer]:
        """The contributions that neither core nor the platform's plugin brought."""
        return [offer for offer in self.offers if offer.plugin not in self._home]

    def repeat(self, offer: Offer) -> bool:
        """From now on have calls of ``offer`` stand as opaque calls in what is prepared; False where they did."""
        new = offer not in self._repeated
        self._repeated.add(offer)
        return new

    def opaque(self, engine: GraphEngine) -> list[Kernel]:
        """The kernels whose calls ``engine`` does not record, and each run repeats."""
        return [kernel for kernel in (*self._kernels, *self._compiled) if self._is_opaque(kernel, engine)]

    def prepare(
        self,
        engine: GraphEngine,
        key: Hashable,
        fn: Callable[..., Any],
        inputs: Mapping[str, Any],
        watched: list[WatchedCall] | None = None,
    ) -> CapturedGraph:
        """``engine.prepare(key, fn, inputs)``, with the kernels' calls in it as they belong there.

        Where any is opaque, ``fn`` runs once before: that shows what these calls return. Each run of the graph
        appends its calls to ``watched``, where given. Raises PlatformError for an engine that takes no opaque calls.
        """
        noted: list[_Noted] = []
        if self.opaque(engine):
            held = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
            with self._at(_Noting(self, engine, noted)), torch.no_grad():
                fn(**inputs)
            for name, x in held.items():
                inputs[name].copy_(x)
        recording = _Recording(self, engine, key, noted, watched)

        @functools.wraps(fn)
        def recorded(**arguments: Any) -> Any:
            recording.num_opaque = 0
            return fn(**arguments)

        with self._at(recording):
            return engine.prepare(key, recorded, inputs)

    def watch(self, engine: GraphEngine, fn: Callable[..., Any], inputs: Mapping[str, Any]) -> list[WatchedCall]:
        """Run ``fn(**inputs)``, and return the calls that a watched graph's run has, in the same order."""
        calls: list[WatchedCall] = []
        with self._at(_Watching(self, engine, calls)):
            fn(**inputs)
        return calls

    def _is_opaque(self, kernel: Kernel, engine: GraphEngine) -> bool:
        is_seen = engine.sees_all_kernels or kernel.traceable or kernel.offer.plugin in self._home
        return not kernel.capturable or not is_seen or kernel.offer in self._repeated

    def _seam(
        self,
        offer: Offer,
        declaring: tuple[object, ...],
        name: str,
        function: Callable[..., Any],
        written: _Written,
        errors: ErrorModel = _ERRORS,
        promise: Promise | None = None,
    ) -> Callable[..., Any]:
        capturable = all(getattr(each, "capturable", True) for each in declaring)
        is_home = offer.plugin in self._home
        if (is_home and capturable) or not (self._is_on or promise):
            return function
        offer = offer.inner if isinstance(offer, AdaptedOffer) else offer
        traceable = any(getattr(each, "traceable", False) for each in declaring)
        kernel = Kernel(offer, name, function, capturable, traceable, errors, written, None if is_home else promise)
        if self._is_on:
            self._kernels.append(kernel)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            stage = self._stage
            if stage is not None:
                return stage.call(kernel, args, kwargs)
            return function(*args, **kwargs) if kernel.promise is None else kernel(args, kwargs)

        return call

    @contextmanager
    def _at(self, stage: _Noting | _Recording | _Watching | None) -> Iterator[None]:
        before, self._stage = self._stage, stage
        try:
            yield
        finally:
            self._stage = before

    def plainly(self, kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call ``kernel`` with nothing within it passing through here: what an opaque call does, all of it."""
        with self._at(None):
            return kernel(args, kwargs)


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a result lies: in memory of its own, or in that of argument number ``argument``.

    ``offset`` is from the argument's first element, in elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    argument: int | None
    offset: int

    @classmethod
    def of(cls, x: torch.Tensor, arguments: Sequence[object]) -> _Place:
        number, offset = None, 0
        for i, given in enumerate(arguments):
            if isinstance(given, torch.Tensor) and x.numel() and _same_storage(x, given) and x.dtype == given.dtype:
                number, offset = i, int(x.storage_offset()) - int(given.storage_offset())
                break
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.device, number, offset)

    def make(self, arguments: Sequence[object]) -> torch.Tensor:
        if self.argument is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        given = arguments[self.argument]
        assert isinstance(given, torch.Tensor)
        return given.as_strided(self.shape, self.stride, int(given.storage_offset()) + self.offset)


@dataclass(frozen=True)
class _Noted:
    """The result of an opaque call."""

    kernel: Kernel
    values: list[object]
    spec: TreeSpec

    @classmethod
    def of(cls, kernel: Kernel, result: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Noted:
        values, spec = tree_flatten(result)
        arguments = tree_leaves((args, dict(kwargs)))
        return cls(kernel, [_Place.of(x, arguments) if isinstance(x, torch.Tensor) else x for x in values], spec)

    def make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[object]:
        arguments = tree_leaves((args, dict(kwargs)))
        return [x.make(arguments) if isinstance(x, _Place) else x for x in self.values]


@dataclass
class _Noting:
    """The run before recording."""

    calls: KernelCalls
    engine: GraphEngine
    noted: list[_Noted]

    def call(self, kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self.calls._is_opaque(kernel, self.engine):
            return kernel(args, kwargs)
        result = self.calls.plainly(kernel, args, kwargs)
        self.noted.append(_Noted.of(kernel, result, args, kwargs))
        return result


@dataclass
class _Recording:
    """The function is being prepared. Engines may call it several times."""

    calls: KernelCalls
    engine: GraphEngine
    key: Hashable
    noted: list[_Noted]
    watched: list[WatchedCall] | None
    num_opaque: int = 0

    def call(self, kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given: list[torch.Tensor] = []
        watched = self.watched if kernel.is_watched else None
        if watched is not None:
            self.engine.opaque(lambda *values: given.extend(_copies(values)), *_given(args, kwargs))
        if self.calls._is_opaque(kernel, self.engine):
            result = self._repeat(kernel, args, kwargs)
        else:
            result = kernel.function(*args, **kwargs)
        if watched is not None:
            done = functools.partial(_note, watched, kernel, given)
            self.engine.opaque(done, *_tensors(kernel.written(args, kwargs, result)))
        return result

    def _repeat(self, kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        known = self.noted[self.num_opaque] if self.num_opaque < len(self.noted) else None
        if known is None or known.kernel is not kernel:
            raise PlatformError(
                f"step {self.key!r} cannot be prepared: it takes another course when it runs again, at {kernel.name} "
                f"of {kernel.offer.contribution}"
            )
        self.num_opaque += 1
        outputs = known.make(args, kwargs)
        arguments, spec = tree_flatten((args, dict(kwargs)))
        self.engine.opaque(functools.partial(_run_again, self.calls, kernel, spec), outputs, arguments)
        return tree_unflatten(outputs, known.spec)


@dataclass
class _Watching:
    """A run that is looked at."""

    calls: KernelCalls
    engine: GraphEngine
    watched: list[WatchedCall]

    def call(self, kernel: Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = _copies(_given(args, kwargs)) if kernel.is_watched else []
        if self.calls._is_opaque(kernel, self.engine):
            result = self.calls.plainly(kernel, args, kwargs)
        else:
            result = kernel(args, kwargs)
        if not kernel.is_watched:
            return result
        _note(self.watched, kernel, given, *_tensors(kernel.written(args, kwargs, result)))
        return result


def can_repeat(engine: GraphEngine) -> bool:
    """Whether what ``engine`` prepares may hold opaque calls."""
    kind = type(engine)
    return kind.opaque is not GraphEngine.opaque or kind.interrupt is not GraphEngine.interrupt


def _run_again(calls: KernelCalls, kernel: Kernel, spec: TreeSpec, outputs: list[object], arguments: list[Any]) -> None:
    """Call ``kernel`` with the leaves ``arguments`` of ``spec``, and bring its result to where the step expects it."""
    args, kwargs = tree_unflatten(arguments, spec)
    values = tree_leaves(calls.plainly(kernel, args, kwargs))
    for wanted, value in zip(outputs, values, strict=True):
        if not isinstance(wanted, torch.Tensor):
            continue
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise EngineError(
                f"{kernel.offer.contribution} of plugin {kernel.offer.plugin}: {kernel.name} returned "
                f"{value.dtype} {list(value.shape)}, and {wanted.dtype} {list(wanted.shape)} for the same shapes before"
            )
        if value.data_ptr() != wanted.data_ptr() or value.stride() != wanted.stride():
            wanted.copy_(value)


def _note(watched: list[WatchedCall], kernel: Kernel, given: list[torch.Tensor], *made: torch.Tensor) -> None:
    watched.append(WatchedCall(kernel, list(given), _copies(made)))
    given.clear()


def _given(args: _Arguments, kwargs: _Keywords) -> list[torch.Tensor]:
    return _tensors([*args, *kwargs.values()])


def _tensors(values: object) -> list[torch.Tensor]:
    """The tensors of a step among ``values``: weights and caches come in dicts, and models' tables are large.

    Of a call object, those that the kernel reads.
    """
    if isinstance(values, torch.Tensor):
        return [values] if values.nbytes <= _LARGEST_WATCHED and values.layout == torch.strided else []
    if isinstance(values, Quantized):
        return _tensors((values.data, values.scale))
    if isinstance(values, _CALLS):
        return _tensors([getattr(values, field.name) for field in fields(values) if field.name not in _NOT_READ])
    if isinstance(values, tuple | list):
        return [x for value in values for x in _tensors(value)]
    return []


def _copies(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in values]


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
