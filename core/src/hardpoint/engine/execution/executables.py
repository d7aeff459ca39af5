"""Prepared steps: what every kind of them needs of a platform's graph engine.

Every rank of an engine decides by the step alone, so all of them replay, prepare or run eagerly together. What cannot
be prepared on one rank cannot on any: all have the same choices, and compare them before the first step.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hardpoint.context import Context
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.execution.replay_check import ReplayCheck
from hardpoint.kernel_calls import REPEATED, can_repeat
from hardpoint.layers.moe import Experts
from hardpoint_plugin_api import CaptureGrade, Executable, GraphEngine, PlatformError, StepLimits

logger = logging.getLogger(__name__)

MOST_EXECUTABLES = 32
"""How many are kept for an engine that sets no limit; the one that was least recently used goes first."""


class Executables:
    """One rank's executables by key, kept as long as there is room. Memory is allocated within ``pool()``.

    ``off`` says why there are none at all, ``off_whole`` why there are none of whole steps, as the metric's reason;
    ``at_once`` how many are prepared ahead. Meanwhile ``free_pages`` of the cache, from 1 on, belong to nobody.
    """

    def __init__(
        self,
        ctx: Context,
        new_engine: Callable[[], GraphEngine],
        forward: Forward,
        pool: Callable[[], AbstractContextManager[None]],
        exchange: Callable[[Any], list[Any]],
        vocab_size: int,
    ) -> None:
        self._vocab_size, self._block_size, self.free_pages = vocab_size, ctx.block_size, 0
        self._new_engine = new_engine
        self.engine = new_engine()
        self.check = ReplayCheck(ctx.kernel_calls, forward, ctx.block_size, pool, exchange)
        self.off = self._why_off(ctx, forward)
        self.off_whole = self.off or self._why_off_whole(ctx)
        self.at_once = 0
        self._kept: OrderedDict[Hashable, Executable] = OrderedDict()
        metrics = ctx.metrics
        self._replays = metrics.counter("graph_replays", "Steps that were replayed by a prepared executable.")
        self._eager = metrics.counter("eager_steps", "Steps that ran without one, by reason.", ["reason"])
        self._seconds = metrics.counter("graph_preparation_seconds", "Time that preparing executables took.")
        self._number = metrics.gauge("graph_executables", "Executables that are kept.")

    @property
    def nbytes(self) -> int:
        """Bytes of the device that they take, as the graph engine has it."""
        return self.engine.nbytes

    @property
    def tell_nbytes(self) -> bool:
        """Whether the graph engine says how many they are; otherwise ``nbytes`` is 0."""
        return type(self.engine).nbytes is not GraphEngine.nbytes

    @property
    def kept(self) -> list[Executable]:
        """All of them, the least recently used first."""
        return list(self._kept.values())

    def trial_ids(self, ids: torch.Tensor, *, alike: bool) -> None:
        """Fill ``ids`` [T] with tokens on which a step that is prepared ahead is compared, all the same if ``alike``.

        None is 0, and the first ones, which checkpoints put aside for padding and the like, come last.
        """
        rows = torch.arange(ids.shape[0], device=ids.device) * (not alike)
        ids.copy_((rows + self._vocab_size // 3) % max(1, self._vocab_size - 1) + 1)

    def trial_pages(self, pages: int, groups: int) -> list[int] | None:
        """The first of ``pages`` pages that nobody uses, for each of ``groups``; None where there are too few."""
        if pages * groups > self.free_pages:
            return None
        return [1 + group * pages for group in range(groups)]

    def count_eager(self, reason: str) -> None:
        """Count a step that runs without an executable."""
        self._eager.labels(reason).inc()

    def count_replay(self) -> None:
        """Count a step that is replayed."""
        self._replays.inc()

    def __contains__(self, key: Hashable) -> bool:
        """Whether the one of ``key`` is prepared."""
        return key in self._kept

    def get(
        self,
        key: Hashable,
        step: Callable[..., object],
        tensors: Mapping[str, torch.Tensor],
        slots: Sequence[torch.Tensor],
    ) -> Executable:
        """The one of ``key``; where it is new, ``step(**tensors)`` is prepared, and compared with an eager run.

        ``slots`` are those that the step stores to, for each cache group. Raises PlatformError if that fails.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        limit = self.engine.max_executables
        while len(self._kept) >= (max(MOST_EXECUTABLES, self.at_once + self.at_once // 2) if limit is None else limit):
            self._kept.popitem(last=False)
        began = time.perf_counter()
        try:
            prepared = self._kept[key] = self.check.prepare(self.engine, key, step, tensors, slots)
        except PlatformError as error:
            traceback.clear_frames(error.__traceback__)  # they hold what the step had allocated
            raise
        finally:
            self._seconds.inc(time.perf_counter() - began)
            self._number.set(len(self._kept))
        logger.debug("step %s was prepared", key)
        return prepared

    def drop(self) -> None:
        """Forget every executable, since what they read is about to move, and the engine with the memory they share."""
        self._kept.clear()
        self.engine = self._new_engine()
        gc.collect()  # a step that was refused may stand in a cycle with what it had allocated
        self._number.set(0)

    def _why_off(self, ctx: Context, forward: Forward) -> str | None:
        if ctx.config.enforce_eager:
            return "enforce_eager"
        if self.engine.max_executables == 0:
            return "no_graph_engine"
        if blockers := list(dict.fromkeys(uncapturable(ctx, self.engine, forward))):
            logger.info("steps run eagerly: %s", "; ".join(blockers))
            return "not_capturable"
        return None

    def _why_off_whole(self, ctx: Context) -> str | None:
        backends = [layer.backend for layer in ctx.attention_layers.layers]
        names = {type(backend).__name__ for backend in backends if backend.capture < CaptureGrade.SINGLE_TOKEN}
        if not names:
            return None
        how = "in pieces, or else eagerly" if self.engine.piece_sizes else "eagerly"
        logger.info("steps run %s: attention backend %s cannot be captured", how, ", ".join(sorted(names)))
        return "not_capturable"


def listed_sizes(sizes: tuple[int, ...], name: str, limits: StepLimits) -> tuple[int, ...]:
    """Those of a graph engine's ``sizes`` that steps of these limits are padded to, ascending.

    Raises PlatformError for what are no numbers of tokens.
    """
    if sizes and min(sizes) < 1:
        raise PlatformError(f"a graph engine's {name} must be positive numbers, got {sizes}")
    most = limits.max_tokens or 0
    return tuple(size for size in sorted(sizes) if size <= most and not limits.token_buckets)


def uncapturable(ctx: Context, engine: GraphEngine, forward: Forward) -> Iterator[str]:
    """What of a model's steps cannot be prepared by ``engine``, not even in pieces, a line each."""
    repeats = can_repeat(engine)
    if ctx.parallel.tp.size > 1 and not engine.collectives_allowed:
        yield "the platform's graph engine allows no collectives between ranks"
    for module in getattr(forward.model, "modules", list)():
        if isinstance(module, Experts) and not repeats:
            for kernel in module.kernels:
                if not kernel.capturable:
                    yield f"experts kernel {type(kernel).__name__} cannot be captured"
    if not repeats:
        for offer in dict.fromkeys(k.offer for k in ctx.kernel_calls.opaque(engine) if k.capturable):
            yield f"{offer.contribution} of plugin {offer.plugin} is no sequence of the operators that are recorded"
    for plan in ctx.selector.plans:
        family = plan.workload.family
        for entry in plan.entries if family != "experts" and not (repeats and family in REPEATED) else ():
            if not getattr(ctx.load(entry.offer), "capturable", True):
                yield f"{plan.workload.family} {entry.offer.contribution.name} cannot be captured"
