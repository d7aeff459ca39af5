"""The platform: everything that core asks of a kind of device.

``detect`` is the only call made before the platform is chosen; it must not create a device context (no driver
initialisation that a later fork or another process would notice). Everything else is called on the chosen platform.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from hardpoint_plugin_api.device import DeviceInfo, MemorySnapshot
from hardpoint_plugin_api.errors import PlatformError
from hardpoint_plugin_api.manifest import ConfigValue
from hardpoint_plugin_api.reasons import Reason

if TYPE_CHECKING:
    import torch


NO_DEVICE = "no-device"
"""The code of a Reason from ``detect`` that says: nothing of this kind is here. Any other code means that devices are,
or may be, here and cannot be used: core then refuses to fall back to a CPU in silence."""


@dataclass(frozen=True)
class StepLimits:
    """Limits of one step. The scheduler obeys the intersection of the platform's limits and the backends'.

    ``None`` means no limit. ``token_buckets``: a step's token count is padded up to the next of these sizes (empty: no
    padding). ``chunk_multiple``: the length of a prefill chunk must be a multiple of this, except for the last chunk of
    a prompt. ``mixed_phases``: prefill and decode may share a step.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    max_context: int | None = None
    chunk_multiple: int = 1
    mixed_phases: bool = True
    token_buckets: tuple[int, ...] = ()

    def intersect(self, other: StepLimits) -> StepLimits:
        """Return the limits that satisfy both. Raises PlatformError for different buckets or incompatible chunk
        multiples.
        """

        def least(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        if self.token_buckets and other.token_buckets and self.token_buckets != other.token_buckets:
            raise PlatformError(f"two parties ask for unlike buckets: {self.token_buckets} and {other.token_buckets}")
        larger, smaller = sorted((self.chunk_multiple, other.chunk_multiple), reverse=True)
        if larger % smaller:
            raise PlatformError(f"two parties ask for unlike chunk multiples: {smaller} and {larger}")
        return StepLimits(
            max_tokens=least(self.max_tokens, other.max_tokens),
            max_requests=least(self.max_requests, other.max_requests),
            max_context=least(self.max_context, other.max_context),
            chunk_multiple=larger,
            mixed_phases=self.mixed_phases and other.mixed_phases,
            token_buckets=self.token_buckets or other.token_buckets,
        )


class CapturedGraph(Protocol):
    """A captured graph: a prepared step that can run many times."""

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        """Run once, with host parameters replaced from ``update``. Returns what the prepared function returned."""
        ...


class GraphEngine(ABC):
    """Turns a function over fixed buffers into a CapturedGraph: captures a graph, records operators, or compiles.

    ``max_graphs``: the most that may be kept (None: no limit). ``bytes_per_graph``: device memory to reserve
    for each before any is prepared; ``nbytes``: what they take now. ``collectives_allowed``: whether the
    function may call collectives while it is prepared. An engine that cannot capture a wait for the device refuses
    functions that wait.

    ``batch_sizes``: numbers of requests for which decode steps are prepared when the engine starts. Steps are padded to
    the next size; larger steps run eagerly. None: preparing is cheap, and a step is prepared for its exact number when
    it first occurs. ``token_sizes``: numbers of tokens for which steps with any mix of prompts and decodes are prepared
    as one graph, with up to ``requests_per_token_size`` requests. ``piece_sizes``: numbers of tokens for which all
    other steps are prepared as piecewise graphs, split at each ``interrupt``. Sizes that no step of the engine has are
    left out. ``asked_sizes``: for each of these attributes that the user set, the name of the setting, such as
    ``{"batch_sizes": "cuda.graph_batch_sizes"}``. A size that the user asked for is refused, not padded or left out.

    ``sees_all_kernels``: everything that a kernel launches on the device becomes part of the graph, whatever language
    it is written in. An engine that records only torch operators and its own plugin's kernels sets False: core then
    passes each call of another plugin's kernel to ``opaque``, unless that kernel declares ``traceable = True``.
    """

    max_graphs: int | None = None
    bytes_per_graph: int = 0
    collectives_allowed: bool = True
    batch_sizes: tuple[int, ...] | None = None
    token_sizes: tuple[int, ...] = ()
    requests_per_token_size: int = 16
    piece_sizes: tuple[int, ...] = ()
    asked_sizes: Mapping[str, str] = MappingProxyType({})
    sees_all_kernels: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that its graphs hold now: intermediate results, outputs, records.

        Default: 0. Memory reports then count the live tensors among them.
        """
        return 0

    @abstractmethod
    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> CapturedGraph:
        """Prepare ``fn(**inputs)``. The tensors among ``inputs`` are the fixed buffers that every later run reads.

        They hold valid inputs, and are unchanged afterwards. Other tensors that ``fn`` writes, such as a cache, may be
        written as in a run on these inputs. Raises PlatformError for a function that cannot be prepared; the caller
        then runs ``fn`` itself.
        """

    def interrupt(self, call: Callable[[], None]) -> None:
        """Within a function that is being prepared: make each run call ``call`` at this place, without capturing it.

        ``call`` may do what a capture forbids, may read and write tensors that the function has computed so far, and
        may act differently in each run. It may or may not be called during preparation. For engines with
        ``piece_sizes``. Default: raises PlatformError.
        """
        raise PlatformError(f"{type(self).__name__} captures no piecewise graphs")

    def opaque(self, call: Callable[..., None], *arguments: Any) -> None:
        """Within a function that is being prepared: make each run call ``call(*arguments)`` at this place.

        The call is outside the captured graph. Unlike ``interrupt``, all tensors that ``call`` uses must be in
        ``arguments`` (also within lists, tuples and dicts), so that an engine may move them.
        Default: ``interrupt``.
        """
        self.interrupt(lambda: call(*arguments))

    def transient(self, result: torch.Tensor) -> torch.Tensor:
        """Mark ``result`` as valid only until any graph of this engine runs; within a function that is being prepared.

        The function must return the tensor that this returns. The engine then need not keep memory for it. Default: no
        effect.
        """
        return result


class EagerGraphEngine(GraphEngine):
    """No graphs: every run calls the function again. Chosen by ``enforce_eager``, and the default of a platform."""

    max_graphs = 0

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> CapturedGraph:
        return _EagerGraph(fn, dict(inputs))


class _EagerGraph:
    def __init__(self, fn: Callable[..., Any], inputs: dict[str, object]) -> None:
        self._fn, self._inputs = fn, inputs

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        return self._fn(**(self._inputs | dict(update or {})))


MemoryTag = Literal["weights", "kv", "graphs", "resources", "adapters"]
"""Purposes of memory. ``adapters`` are the slots of LoRA adapters."""


class Memory(ABC):
    """The memory of a device. Nothing is assumed of torch's caching allocator."""

    @abstractmethod
    def snapshot(self) -> MemorySnapshot:
        """Return the free bytes, the total, and the peak in use since ``reset_peak``."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak measurement."""

    suspendable: frozenset[MemoryTag] = frozenset()
    """Tags whose memory ``suspend`` can give back while tensors in it stay, at their addresses. For other tags core
    frees the tensors themselves and allocates new ones on waking up."""

    def pool(self, tag: MemoryTag) -> AbstractContextManager[None]:
        """Allocate under ``tag`` within the block. Default: no pools, no effect."""
        return nullcontext()

    def suspend(self, tags: Sequence[MemoryTag]) -> None:
        """Free the memory of ``tags``. Raises PlatformError for a tag that is not ``suspendable``."""
        raise PlatformError(f"this platform cannot suspend memory ({', '.join(tags)})")

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate the memory of ``tags`` again, at the same addresses, with undefined content."""
        raise PlatformError(f"this platform cannot resume memory ({', '.join(tags)})")

    def trim(self) -> None:  # noqa: B027  # not every allocator keeps anything
        """Return unused memory that an allocator keeps in reserve to the system. Default: nothing."""


class Platform(ABC):
    """A kind of device: its detection, memory, synchronisation, graphs, limits and defaults.

    It is constructed with the DeviceInfo from ``detect`` and its plugin's settings, by which it may change ``info``:
    the engine selects kernels and certificates by that. ``name`` equals the contribution's name.
    """

    name: ClassVar[str]
    collectives: ClassVar[str] = "gloo"
    """The backend of torch.distributed for this platform's devices, such as ``nccl``."""

    def __init__(self, info: DeviceInfo, config: Mapping[str, ConfigValue] | None = None) -> None:
        self.info, self.config = info, dict(config or {})

    @classmethod
    @abstractmethod
    def detect(cls) -> DeviceInfo | Reason:
        """Describe this machine's devices, or return the reason why none can be used.

        Code NO_DEVICE: there is no such device. Any other code: there may be devices, and they are unusable. Must not
        create a device context, and should take milliseconds.
        """

    @classmethod  # noqa: B027  # most have nothing that takes long
    def begin(cls, info: DeviceInfo, index: int) -> None:
        """Start to initialise device ``index`` of those that ``info`` describes, such as its context, in a thread.

        A program whose engine will be in this process calls it before it imports torch, so that both go on at once.
        It must return at once, and need no torch. ``activate`` follows, unless the start fails before, and reports
        a device that cannot be used. Default: nothing.
        """

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """The memory of the device in use."""

    def share_host(self, rank: int, ranks: int) -> None:  # noqa: B027  # most have a device for each rank
        """Learn that this process is rank ``rank`` of ``ranks`` ranks of one engine on this host. Called before
        ``activate``.

        For a platform whose device is the host itself: all ranks activate the same index, and divide the host's cores
        by rank. Default: nothing.
        """

    def tuning_context(self) -> Mapping[str, str]:
        """Return settings that measured times depend on, besides device and versions, by name: such as a host's
        threads.

        Called before ``activate``, after ``share_host``. Entries of a tuning file from another context are ignored.
        Default: none.
        """
        return {}

    @abstractmethod
    def activate(self, index: int) -> torch.device:
        """Make device ``index`` current for this process, and return it. The first call that may create a device
        context.
        """

    def current(self) -> AbstractContextManager[None]:
        """Make the active device the calling thread's current device inside the block, and restore the previous one
        after it.

        Needed where a current device belongs to a thread: several engines may take turns in one thread, or several
        threads may call one engine. Called at each step. Default: nothing.
        """
        return nullcontext()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work submitted to the device is done."""

    def graph_engine(self) -> GraphEngine:
        """Return a new graph engine. Default: eager.

        Its graphs may share memory that it owns. To free that memory, core drops the graphs and the engine,
        and asks for another engine later.
        """
        return EagerGraphEngine()

    def compile_ahead(self, run: Callable[[], None]) -> int:
        """Compile the kernels that ``run`` would launch, several at a time, and return how many were compiled.

        Launches of kernels that are being compiled may be left out of ``run``; then its results are not used. It reads
        no value of a tensor. Kernels that need no compilation, such as those in a cache of an earlier start, do not
        count, and where none was compiled nothing is left out. Default: 0, and ``run`` is not called; kernels are then
        compiled one by one, when each is first launched.
        """
        return 0

    def step_limits(self) -> StepLimits:
        """Return the limits of a step on this platform."""
        return StepLimits()

    def default_dtype(self, checkpoint_dtype: str) -> str:
        """Return the data type that ``--dtype auto`` means for a checkpoint in ``checkpoint_dtype``."""
        return checkpoint_dtype if checkpoint_dtype in self.info.dtypes else "float32"

    def default_block_size(self) -> int:
        """Return the tokens per block of the cache where the user sets none."""
        return 16

    def kv_cache_budget(self) -> int:
        """Return the bytes for the KV cache where the user sets none. Called once weights and resources are loaded."""
        return int(self.memory.snapshot().free * 0.9)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host tensor ``tensor`` in pinned memory, from which the device can copy asynchronously.

        Default: ``tensor`` itself, for platforms without pinned memory.
        """
        return tensor

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying ``tensor`` to the host, after all work submitted so far. Returns a function that waits for the
        copy.

        That function returns the copy. Work submitted after this call may overwrite ``tensor``. Default: the function
        synchronises with all work submitted until it is called; override it for devices that run asynchronously.
        """
        return tensor.clone().cpu

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range in profiles."""
        return nullcontext()

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Profile this process inside the block, all threads included, and write the result into ``folder``.

        Ranges are recorded by name. Raises PlatformError for a platform without a profiler.
        """
        raise PlatformError(f"platform {self.name} has no profiler")
