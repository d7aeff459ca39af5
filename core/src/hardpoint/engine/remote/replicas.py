"""Data parallelism: several cores, each with the whole model and its own cache, as one core to the front end."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from queue import SimpleQueue
from typing import ClassVar, Unpack, cast

from hardpoint.config import EngineConfig
from hardpoint.engine.client import CoreFacts, EngineStats, RequestOptions
from hardpoint.engine.control import R, ReadMetrics, ResetPrefixCache, Verb
from hardpoint.engine.lora import Adapter
from hardpoint.engine.remote.core_process import CLOSED
from hardpoint.engine.remote.recovery import RecoveryState
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint.engine.remote.replica_counts import ReplicaCounts
from hardpoint.engine.remote.routing import Place, Router
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.metrics import MetricsSnapshot
from hardpoint_plugin_api import EngineDeadError, EngineError, MemoryTag

logger = logging.getLogger(__name__)

Asked = Callable[[RemoteCore], RequestProgress]


@dataclass
class _Served:
    """A request under way: its place, and whether it has its first token."""

    place: Place
    has_begun: bool = False


@dataclass(frozen=True)
class _News:
    """A replica's report on its requests; ``ended`` where nothing follows."""

    replica: int
    advanced: Sequence[RequestProgress] = ()
    ended: EngineDeadError | None = None


class Replicas:
    """An OwnedCore over replicas, the cores of this server. A Router places each request on one of them.

    Each replica has a thread that steps it. The thread waits until ``step`` is called again before it changes another
    request: between two calls of ``step`` requests stay as they were reported.

    A replica that is built again after a failure gets no new requests meanwhile, unless all are built again. A replica
    that ends for good ends the others: fewer replicas would carry the load of all. Control verbs go to every replica.
    """

    _serve_together: ClassVar[bool] = False
    """Whether none serves while another is built again."""

    def __init__(self, start: Callable[[EngineConfig], RemoteCore], config: EngineConfig) -> None:
        """``start`` starts one core. Raises what it raises, with none left behind."""
        self._numbers = config.local_replicas
        self._cores: list[RemoteCore] = []
        self._turns: list[threading.Semaphore] = []
        try:
            for number in self._numbers:
                self._cores.append(start(config.of_replica(number)))
        except BaseException:
            self.close()
            raise
        self._news: SimpleQueue[_News] = SimpleQueue()
        self._turns += [threading.Semaphore() for _ in self._cores]
        self._counts = ReplicaCounts(len(self._cores))
        self._reported: list[int] = []
        self._alive: set[int] = set()
        self._placing = threading.Lock()  # of the router and the requests; held for moments
        self._served: dict[RequestProgress, _Served] = {}
        self._ended: EngineDeadError | None = None
        self._facts: tuple[tuple[CoreFacts, ...], CoreFacts] | None = None

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every replica is loaded; see OwnedCore. Raises EngineError where replicas chose other kernels."""
        with ThreadPoolExecutor(len(self._cores), "hardpoint-replica-starts") as pool:
            waiting = [pool.submit(core.wait_until_ready, timeout) for core in self._cores]
            try:
                for ready in as_completed(waiting):
                    ready.result()
                _check_equal(self._numbers, [core.facts for core in self._cores])
            except BaseException:
                self.close()
                raise
        caches = [core.facts.config.enable_prefix_caching * core.stats.num_pages for core in self._cores]
        block_sizes = [core.facts.config.block_size or _BLOCK_SIZE for core in self._cores]
        self._router = Router([pages * size for pages, size in zip(caches, block_sizes, strict=True)])
        self._restarts = [0] * len(self._cores)
        for index, core in enumerate(self._cores):
            name = f"hardpoint-replica-{self._numbers[index]}"
            own = (index, core, self._turns[index], self._news)
            threading.Thread(target=_step_replica, args=own, name=name, daemon=True).start()
        self._alive.update(range(len(self._cores)))
        weakref.finalize(self, _end_all, tuple(self._cores), tuple(self._turns)).atexit = False  # links see to that

    @property
    def facts(self) -> CoreFacts:
        """The facts of the first replica, with the shortest longest sequence of all, and all denied kernels."""
        own = tuple(core.facts for core in self._cores)
        if self._facts is None or any(a is not b for a, b in zip(own, self._facts[0], strict=True)):
            denied = tuple(dict.fromkeys(culprit for facts in own for culprit in facts.denied))
            merged = replace(own[0], max_model_len=min(facts.max_model_len for facts in own), denied=denied)
            self._facts = own, merged
        return self._facts[1]

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that every replica has."""
        others = [{adapter.name for adapter in core.adapters} for core in self._cores[1:]]
        return tuple(a for a in self._cores[0].adapters if all(a.name in names for names in others))

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """The memory that any replica has given back."""
        return frozenset[MemoryTag]().union(*(core.asleep for core in self._cores))

    @property
    def is_sleeping(self) -> bool:
        """True while memory that requests need is given back."""
        return bool(self.asleep)

    @property
    def stats(self) -> EngineStats:
        """The counters of all replicas together; ``load_seconds`` of the slowest."""
        all_stats = [core.stats for core in self._cores]
        total = EngineStats(**{f.name: sum(getattr(one, f.name) for one in all_stats) for f in fields(EngineStats)})
        return replace(total, load_seconds=max(one.load_seconds for one in all_stats))

    @property
    def recovery(self) -> RecoveryState:
        """The failures of all replicas together, and why all are built again at this moment, where no other serves."""
        states = [core.recovery for core in self._cores]
        numbered = zip(self._numbers, states, strict=True)
        restarting = [f"replica {number}: {state.restarting}" for number, state in numbered if state.restarting]
        causes = [state.last_cause for state in states if state.last_cause is not None]
        others_serve = not self._serve_together and len(restarting) < len(states)
        return RecoveryState(
            sum(state.num_restarts for state in states),
            None if others_serve else "; ".join(restarting) or None,
            causes[-1] if causes else None,
            tuple(dict.fromkeys(culprit for state in states for culprit in state.denied)),
            any(state.blames_ops for state in states),
        )

    def add_request(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> RequestProgress:
        """Queue a request for one completion; see CoreClient."""
        prompt = tuple(prompt_token_ids)
        if params.seed is None:  # of one sequence, whichever replica serves it
            params = replace(params, seed=self.draw_seed())
        key = options.get("cache_salt", ""), options.get("adapter", "")
        return self._place(
            prompt,
            key,
            options.get("data_parallel_rank"),
            lambda core: core.add_request(prompt, params, eos_token_ids, bad_words=bad_words, **options),
        )

    def adopt(self, asked: AdmittedRequest) -> RequestProgress:
        """Queue a request that another front end admitted; see OwnedCore."""
        key = asked.cache_salt, asked.adapter_name
        return self._place(asked.prompt_token_ids, key, asked.data_parallel_rank, lambda core: core.adopt(asked))

    def _place(self, prompt: Sequence[int], key: object, rank: int | None, ask: Asked) -> RequestProgress:
        """Have ``ask`` queue a request on the replica ``rank``, or on the one that the router chooses."""
        if self._ended is not None:
            raise EngineDeadError(str(self._ended))
        states = [core.recovery for core in self._cores]
        with self._placing:
            for index, state in enumerate(states):
                if state.num_restarts != self._restarts[index]:
                    self._restarts[index] = state.num_restarts
                    self._router.forget(index)
            among = range(len(self._cores)) if rank is None else (self._numbers.index(rank),)
            running = [index for index in among if states[index].restarting is None]
            place = self._router.place(prompt, key, running or among)
            try:
                request = ask(self._cores[place.replica])
            except BaseException as error:
                self._router.begun(place)
                self._router.ended(place)
                if isinstance(error, EngineDeadError):
                    raise self._verdict(place.replica, error) from None
                raise
            self._served[request] = _Served(place)
            return request

    def draw_seed(self) -> int:
        """A seed for a request that gives none; see CoreClient."""
        return self._cores[0].draw_seed()

    def abort(self, request: RequestProgress) -> None:
        """End ``request``, which may have ended already."""
        with self._placing:
            served = self._served.get(request)
        if served is not None:
            self._cores[served.place.replica].abort(request)

    def step(self) -> list[RequestProgress]:
        """Wait for a replica's step and return the requests that got a token or ended; see CoreClient."""
        if self._ended is not None and not self._alive:
            raise EngineDeadError(str(self._ended))
        for index in self._reported:
            self._turns[index].release()
        self._reported.clear()
        advanced: list[RequestProgress] = []
        news = self._news.get()
        while True:
            if news.ended is not None:
                self._note_end(news.replica, news.ended)
            else:
                self._reported.append(news.replica)
                advanced += news.advanced
            if self._news.empty():
                break
            news = self._news.get()
        self._count(advanced)
        if self._ended is not None and not self._alive and not advanced:
            raise EngineDeadError(str(self._ended))
        return advanced

    def _count(self, advanced: Iterable[RequestProgress]) -> None:
        """Tell the router what has begun and ended, and requests why the replicas ended."""
        with self._placing:
            for request in advanced:
                if (served := self._served.get(request)) is None:
                    continue
                if not served.has_begun:
                    served.has_begun = True
                    self._router.begun(served.place)
                if request.finish_reason is not None:
                    self._router.ended(served.place)
                    del self._served[request]
                if isinstance(request.error, EngineDeadError):
                    own = self._ended or self._verdict(served.place.replica, request.error)
                    request.error = EngineDeadError(str(own))

    def _note_end(self, index: int, error: EngineDeadError) -> None:
        """End the other replicas, as one has ended for good; their open requests end with the reports that follow."""
        self._alive.discard(index)
        if self._ended is None:
            self._ended = self._verdict(index, error)
            _close(self._cores)

    def _verdict(self, index: int, error: EngineDeadError) -> EngineDeadError:
        """The reason that all are given, as a replica has ended with ``error``."""
        return error if str(error) == CLOSED else EngineDeadError(f"replica {self._numbers[index]}: {error}")

    def control(self, verb: Verb[R]) -> R:
        """Have every replica do ``verb`` and return their answers as one; see CoreControl and Verb.merged.

        Raises the error of the first replica that failed; the other replicas undo the verb, where it can be undone.
        """
        if isinstance(verb, ReadMetrics):
            return cast(R, self._read_metrics(verb))
        with ThreadPoolExecutor(len(self._cores), "hardpoint-replica-verbs") as pool:
            asked = [
                pool.submit(core.control, verb.of_replica(number))
                for number, core in zip(self._numbers, self._cores, strict=True)
            ]
            errors = [future.exception() for future in asked]
            failed = next((error for error in errors if error is not None), None)
            undo = verb.undo()
            if failed is not None:
                for core, error in zip(self._cores, errors, strict=True):
                    if error is None and undo is not None:
                        pool.submit(core.control, undo)
                raise failed
        if isinstance(verb, ResetPrefixCache):
            with self._placing:
                for index in range(len(self._cores)):
                    self._router.forget(index)
        return verb.merged([future.result() for future in asked])

    def _read_metrics(self, verb: ReadMetrics) -> MetricsSnapshot:
        """The sums over replicas. One that is built again says nothing; raises the first's error where none answers."""
        before = [core.recovery for core in self._cores]
        running = [index for index, state in enumerate(before) if state.restarting is None] or range(len(before))
        with ThreadPoolExecutor(len(self._cores), "hardpoint-replica-metrics") as pool:
            asked = {index: pool.submit(self._cores[index].control, verb) for index in running}
        errors = [future.exception() for future in asked.values()]
        if (first := errors[0]) is not None and all(errors):
            raise first
        restarts = [core.recovery.num_restarts for core in self._cores]
        answers = {
            index: future.result()
            for index, future in asked.items()
            if future.exception() is None and restarts[index] == before[index].num_restarts
        }
        return self._counts.total(answers, restarts)

    def check(self) -> None:
        """Raise EngineDeadError if a replica is gone for good."""
        if self._ended is not None:
            raise EngineDeadError(str(self._ended))
        for index, core in enumerate(self._cores):
            try:
                core.check()
            except EngineDeadError as error:
                raise self._verdict(index, error) from None

    def close(self) -> None:
        """End every replica and free what they hold. Closing twice is once."""
        _end_all(self._cores, self._turns)


def _step_replica(index: int, core: RemoteCore, turn: threading.Semaphore, news: SimpleQueue[_News]) -> None:
    """Step a replica and report what came of it, in turns with the reader of the reports."""
    try:
        while True:
            turn.acquire()
            news.put(_News(index, core.step()))
    except EngineDeadError as error:
        ended = error
    except Exception as error:
        logger.exception("replica %d can no longer be stepped", index)
        ended = EngineDeadError(f"it can no longer be stepped: {type(error).__name__}: {error}")
    news.put(_News(index, ended=ended))


def _close(cores: Sequence[RemoteCore]) -> None:
    """Close all cores at once."""
    closing = [threading.Thread(target=core.close) for core in cores]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def _end_all(cores: Sequence[RemoteCore], turns: Sequence[threading.Semaphore]) -> None:
    """Close all cores, and let the threads that step them see it."""
    _close(cores)
    for turn in turns:
        turn.release(3)  # reports that are there, then the end


_BLOCK_SIZE = 16
"""Tokens of a page where the user does not say: an estimate for the router."""


def _check_equal(numbers: Sequence[int], all_facts: Sequence[CoreFacts]) -> None:
    """Raise EngineError where replicas chose other kernels than the first: outputs would depend on the replica."""
    first = all_facts[0].table.digest
    for number, facts in zip(numbers, all_facts, strict=True):
        if facts.table.digest != first:
            raise EngineError(
                f"replica {number} selected other kernels ({facts.table.digest}) than replica {numbers[0]} ({first}); "
                "compare `hardpoint explain` on their devices, or name the kernels with --use"
            )
