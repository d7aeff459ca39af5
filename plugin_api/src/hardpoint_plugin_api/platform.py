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
    """What one step may hold, as data. The scheduler obeys the intersection of the platform's and the backends'.

    ``None`` means no limit. ``token_buckets`` are the sizes that a step's token count is padded up to (empty: no
    padding); ``chunk_multiple`` is what a prefill chunk's length must be a multiple of, its last chunk excepted;
    ``mixed_phases`` says whether prefill and decode may share a step.
    """

    max_tokens: int | None = None
    max_requests: int | None = None
    max_context: int | None = None
    chunk_multiple: int = 1
    mixed_phases: bool = True
    token_buckets: tuple[int, ...] = ()

    def intersect(self, other: StepLimits) -> StepLimits:
        """Return the limits that satisfy both. Buckets must agree where both have some (else PlatformError)."""

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
    """A prepared step that can run again and again."""

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        """Run once with host parameters rebound from ``update``; returns what the prepared function returned."""
        ...


class GraphEngine(ABC):
    """Turns a function over fixed buffers into a CapturedGraph: recorded, captured or compiled ahead.

    ``max_graphs`` (None: no limit) and ``bytes_per_graph`` tell the engine how many it may keep;
    ``collectives_allowed`` and ``host_sync_allowed`` what the function may do while it is prepared.

    ``batch_sizes`` says for how many requests decode steps are prepared. None, where preparing is cheap: for exactly
    as many as a step has, when it is first met. Otherwise for these numbers, ahead, when the engine starts; steps are
    padded to the next of them, and steps of more requests run eagerly. ``token_sizes`` says for how many tokens other
    steps are prepared ahead, of up to ``requests_per_token_size`` requests, whatever prompts and decodes they hold.
    ``piece_sizes``: for how many tokens steps that are not prepared whole are prepared in pieces, by ``interrupt``.

    ``bytes_per_graph`` is what the cache leaves free for each before any is prepared, ``nbytes`` what they take.

    ``sees_all_kernels`` says that whatever a kernel launches on the device becomes part of what is prepared, in
    whatever language it is written. An engine that records torch's operators and its own plugin's kernels alone sets
    it to False: core then makes each call of another plugin's kernel an ``opaque`` call, unless that kernel declares
    ``traceable = True``.
    """

    max_graphs: int | None = None
    bytes_per_graph: int = 0
    collectives_allowed: bool = True
    host_sync_allowed: bool = True
    batch_sizes: tuple[int, ...] | None = None
    token_sizes: tuple[int, ...] = ()
    requests_per_token_size: int = 16
    piece_sizes: tuple[int, ...] = ()
    sees_all_kernels: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the device that its graphs hold now: memory between a step's operators, results, records.

        Default: 0. Reports then count those of their tensors that live.
        """
        return 0

    @abstractmethod
    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> CapturedGraph:
        """Prepare ``fn(**inputs)``. The tensors among ``inputs`` are the fixed buffers every later run reads.

        They hold valid inputs, and are afterwards as they were. Whatever else ``fn`` writes, such as a cache, may have
        been written: what a run on these inputs writes there. Raises PlatformError for what cannot be prepared; the
        caller then runs ``fn`` itself.
        """

    def interrupt(self, call: Callable[[], None]) -> None:
        """Within a function that is being prepared: have each run call ``call`` here, and record nothing of it.

        It may do what a recording may not, reads and writes tensors that the function has by then, and may do other
        things in each run. While the function is prepared it may be called, or not. For engines with ``piece_sizes``;
        default: PlatformError.
        """
        raise PlatformError(f"{type(self).__name__} does not prepare functions in pieces")

    def opaque(self, call: Callable[..., None], *arguments: Any) -> None:
        """Within a function that is being prepared: have each run call ``call(*arguments)`` here.

        The same as ``interrupt``, but for where tensors come from: those that the function made stand in
        ``arguments`` (which may be lists, tuples and dicts), and ``call`` holds none of them. So an engine may move
        them. Whatever ``call`` does is its own affair: nothing of it is recorded. Default: ``interrupt``.
        """
        self.interrupt(lambda: call(*arguments))

    def transient(self, result: torch.Tensor) -> torch.Tensor:
        """Within a function that is being prepared: mark ``result``, which the function is to return in what this
        returns, as valid only until any graph of this engine runs again. No memory needs to be kept for it.

        Default: nothing is done, and it is a result like any other.
        """
        return result


class EagerGraphEngine(GraphEngine):
    """No graphs: every run calls the function again. What ``enforce_eager`` selects, and the default of a platform."""

    max_graphs = 0

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> CapturedGraph:
        return _EagerGraph(fn, dict(inputs))


class _EagerGraph:
    def __init__(self, fn: Callable[..., Any], inputs: dict[str, object]) -> None:
        self._fn, self._inputs = fn, inputs

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        return self._fn(**(self._inputs | dict(update or {})))


MemoryTag = Literal["weights", "kv", "graphs", "resources", "adapters"]
"""What memory is used for. ``adapters`` are the slots of LoRA adapters."""


class Memory(ABC):
    """A device's memory. It assumes nothing of the framework's caching allocator."""

    @abstractmethod
    def snapshot(self) -> MemorySnapshot:
        """Bytes free, in all, and at the peak since ``reset_peak``."""

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
        """Give the memory of ``tags`` back. Raises PlatformError for a tag that is not ``suspendable``."""
        raise PlatformError(f"this platform cannot suspend memory ({', '.join(tags)})")

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of ``tags`` again, at the same addresses; its contents are undefined."""
        raise PlatformError(f"this platform cannot resume memory ({', '.join(tags)})")

    def trim(self) -> None:  # noqa: B027  # not every allocator keeps anything
        """Return memory that nothing holds, and that an allocator keeps for later, to the system. Default: nothing."""


class Platform(ABC):
    """A kind of device: detection, memory, synchronisation, graphs, limits and defaults.

    A platform is constructed with the DeviceInfo that ``detect`` returned and its plugin's config section.
    ``name`` equals the contribution's name.
    """

    name: ClassVar[str]
    collectives: ClassVar[str] = "gloo"
    """Which of torch.distributed's backends serves this platform's devices."""

    def __init__(self, info: DeviceInfo, config: Mapping[str, ConfigValue] | None = None) -> None:
        self.info, self.config = info, dict(config or {})

    @classmethod
    @abstractmethod
    def detect(cls) -> DeviceInfo | Reason:
        """Describe the devices here, or say why there is none (code NO_DEVICE) or why they are unusable (any other).

        Creates no device context and takes milliseconds.
        """

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """The memory of the device in use."""

    def share_host(self, rank: int, ranks: int) -> None:  # noqa: B027  # most have a device for each rank
        """Tell that this process is number ``rank`` of ``ranks`` of one engine on this host; before ``activate``.

        For a platform whose device is the host itself: all ranks activate the same index, and this says which part of
        the host is whose. Default: nothing.
        """

    def tuning_context(self) -> Mapping[str, str]:
        """What measured times depend on beside the device and the versions installed, by name: a host's threads.

        Asked before ``activate``, and after ``share_host``. What a tuning file holds of another context is left aside.
        Default: nothing.
        """
        return {}

    @abstractmethod
    def activate(self, index: int) -> torch.device:
        """Make device ``index`` current for this process and return it. The first call that may create a context."""

    def current(self) -> AbstractContextManager[None]:
        """Make the active device the calling thread's current one inside, and what was current before it afterwards.

        For devices that are current for a thread, since several engines may take turns in one, or one engine be called
        from several. Asked for at each step. Default: nothing.
        """
        return nullcontext()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything submitted to the device is done."""

    def graph_engine(self) -> GraphEngine:
        """How steps are recorded and replayed. Default: eager.

        Each call returns an engine of its own, which may keep memory that its graphs share: where all of them are
        dropped to give memory back, the engine is dropped too, and another is asked for.
        """
        return EagerGraphEngine()

    def step_limits(self) -> StepLimits:
        """What a step may hold on this platform."""
        return StepLimits()

    def default_dtype(self, checkpoint_dtype: str) -> str:
        """The dtype that ``--dtype auto`` means for a checkpoint stored in ``checkpoint_dtype``."""
        return checkpoint_dtype if checkpoint_dtype in self.info.dtypes else "float32"

    def default_block_size(self) -> int:
        """Tokens per cache page where the user asks for no size."""
        return 16

    def kv_cache_budget(self) -> int:
        """Bytes for the block pool where the user gives none, asked after the weights and resources are in place."""
        return int(self.memory.snapshot().free * 0.9)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` (host memory) in memory that the device copies from asynchronously, where there is such."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying ``tensor`` to the host, behind all that is submitted so far.

        The returned function waits for the copy and returns it. ``tensor`` may be written to by whatever is submitted
        after this call. Default: nothing starts, and the function waits for all that was submitted until it is called;
        to be overridden where devices work on while the host goes on.
        """
        return tensor.clone().cpu

    def range(self, name: str) -> AbstractContextManager[None]:
        """Mark a profiling range."""
        return nullcontext()

    def profile(self, folder: Path) -> AbstractContextManager[None]:
        """Profile what the process does inside, in all its threads, and write what was found into ``folder``.

        Ranges are recorded by name. Raises PlatformError where there is no profiler.
        """
        raise PlatformError(f"platform {self.name} has no profiler")
