"""The interface of an engine core to a front end, wherever the core runs: in this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

from hardpoint.config import EngineConfig
from hardpoint.engine.control import CoreControl
from hardpoint.engine.lora import Adapter
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.plugin_host.culprits import Culprit
from hardpoint.selection import SelectionTable
from hardpoint_plugin_api import MemoryTag


@dataclass
class EngineStats:
    """Statistics of an engine: its work so far, and its present load; seconds of wall time.

    ``decode_tokens`` were drawn by steps without prompts. ``cached_tokens`` of prompts were found in the prefix cache
    and not computed. Steps verified ``drafted_tokens``, of which ``accepted_tokens`` were right. Of ``num_pages`` pages
    of the cache, ``num_free_pages`` belong to no request.
    """

    load_seconds: float = 0.0
    num_steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0


@dataclass(frozen=True)
class CoreFacts:
    """Facts that do not change while a core lives. ``config`` is the user's with the changes that plugins wished for.

    ``pid`` is the process that it runs in. ``denied`` are kernels that its start put on the deny list. ``adapters`` are
    the LoRA adapters that its start loaded.
    """

    config: EngineConfig
    table: SelectionTable
    max_model_len: int
    vocab_size: int
    pid: int
    denied: tuple[Culprit, ...] = ()
    adapters: tuple[Adapter, ...] = ()


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its sampling parameters.

    ``priority``: lower runs first. ``timeout``: seconds after which it ends, finished or not. ``cache_salt``: it shares
    cached prefixes with requests of the same salt only. ``adapter``: the name of the LoRA adapter it runs with.
    ``data_parallel_rank``: the replica that serves it; None: any.
    """

    priority: int
    timeout: float | None
    cache_salt: str
    adapter: str
    data_parallel_rank: int | None


class CoreClient(CoreControl, Protocol):
    """The calls of a front end (LLM, AsyncEngine, the server) on an engine core. One thread at a time steps it."""

    @property
    def facts(self) -> CoreFacts:
        """Facts about the core that do not change while it lives."""
        ...

    @property
    def adapters(self) -> Iterable[Adapter]:
        """The LoRA adapters that are loaded."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The core's statistics up to the last step that this front end saw."""
        ...

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> RequestProgress:
        """Queue a request for one completion. ``step`` updates the object returned.

        ``bad_words`` are the token sequences of the parameter of that name: a core knows no text.
        Raises RequestError if it is invalid, CapacityError if the cache can never hold it, EngineDeadError.
        """
        ...

    def draw_seed(self) -> int:
        """A seed for a request that gives none; the engine's own seed makes the sequence of them repeatable."""
        ...

    def abort(self, request: RequestProgress) -> None:
        """End ``request``, which may have ended already."""
        ...

    def step(self) -> Sequence[RequestProgress]:
        """Wait for a step and return the requests that got a token or ended.

        A request whose ``error`` is set was ended by a failure that the core survives. Raises EngineDeadError once the
        core is gone; every request that was open has ended then.
        """
        ...

    def check(self) -> None:
        """Raise EngineDeadError if the core is gone."""
        ...

    def close(self) -> None:
        """End the core and free its memory. A second call does nothing."""
        ...


class ServedCore(CoreClient, Protocol):
    """A core that runs elsewhere, and that may be built again there."""

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that are loaded."""
        ...

    @property
    def is_sleeping(self) -> bool:
        """True while the core sleeps: memory that requests need is freed."""
        ...

    @property
    def recovery(self) -> RecoveryState:
        """The failures so far, how they ended, and whether one is being recovered from."""
        ...


class OwnedCore(ServedCore, Protocol):
    """A ServedCore with the methods for the process that started it: wait for its start, and take over requests."""

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The kinds of memory that ``sleep`` has freed and ``wake_up`` has not yet allocated again."""
        ...

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the core is loaded. Raises what its start raised; EngineDeadError, after ``timeout`` seconds too.

        Must be called once, before everything but ``close``.
        """
        ...

    def adopt(self, asked: AdmittedRequest) -> RequestProgress:
        """Queue a request that another front end admitted, under a number of this one. Raises EngineDeadError."""
        ...


class StartCore(Protocol):
    """The signature of ``start_core``: starts a core and returns while it is loading."""

    def __call__(self, config: EngineConfig, *, own_process: bool) -> OwnedCore:
        """Start it in a process of its own, or in a thread of this one."""
        ...
