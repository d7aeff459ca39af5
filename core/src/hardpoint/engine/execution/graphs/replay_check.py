"""Compare replays with eager calls: a prepared step runs once on the inputs that the same step ran on eagerly.
It is compared on further steps, too, where there are any that it serves: sequences of other lengths.

Equal bits end the matter. Where bits differ, the step is prepared once more with copies taken around each plugin
kernel's calls; the first call that is given the same and makes something else, beyond the op's error model, is at
fault. The step is prepared on other token ids than it is compared on, so that a value which a kernel kept from then
shows, and memory that an eager call used has been written over.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from hardpoint.conformance.memory import equal_bits
from hardpoint.engine.execution.forward import Forward, Places
from hardpoint.kernel_calls import KernelCalls, WatchedCall, can_repeat
from hardpoint.ops.error_model import compare
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.culprits import Culprit
from hardpoint_plugin_api import CapturedGraph, EngineError, GraphEngine, PlatformError

logger = logging.getLogger(__name__)

T = TypeVar("T")
StepFunction = Callable[..., object]
Put = Callable[[], StepFunction | None]
"""Puts a step's inputs where graphs read them, and has it planned; None where another graph serves it."""

_CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
_CLOSE_IN_FEW_BITS = 2.0**-4
"""Of a row's largest magnitude: by how much a whole step's results may differ where no kernel is at fault, because
sums are taken in another order in each run. One kernel's own results are held to the error model, which is far
narrower."""


class ReplayError(EngineError):
    """Kernels of plugins do something else in a replay than when they are called. Others can take their place."""

    def __init__(self, culprits: Sequence[Culprit]) -> None:
        self.culprits = tuple(culprits)
        names = "; ".join(map(str, culprits))
        super().__init__(f"replays differ from eager steps: {names}; fix: --deny, or --enforce-eager")


class Likeness(IntEnum):
    """How a replay's results compare with an eager run's."""

    SAME = 0
    CLOSE = 1
    UNLIKE = 2


@dataclass(frozen=True)
class Outcome:
    """The results of a step: copies of its results, and of what it stored in the cache."""

    results: list[torch.Tensor]
    stored: list[torch.Tensor]

    def compare(self, other: Outcome) -> Likeness:
        """Numbers drawn from logits may differ only where the logits do."""
        mine, others = [*self.results, *self.stored], [*other.results, *other.stored]
        if _all_equal(mine, others):
            return Likeness.SAME
        found = [_likeness(a, b) for a, b in zip(mine, others, strict=True)]
        floats = max((f for f, x in zip(found, mine, strict=True) if x.is_floating_point()), default=Likeness.SAME)
        return max(found) if floats is Likeness.SAME else floats


@dataclass(frozen=True)
class Wanted:
    """A graph to prepare by ``engine`` as ``key``, and the steps that it must serve.

    The first one's inputs are there already. All are called as ``step(**tensors)``, and store at ``slots``, which are
    among ``tensors``, by group. ``is_trial``: in pages that nobody uses.
    """

    engine: GraphEngine
    key: Hashable
    steps: Sequence[Put]
    tensors: Mapping[str, torch.Tensor]
    slots: Sequence[torch.Tensor]
    is_trial: bool = False

    def first(self) -> StepFunction:
        """Put the step that is prepared."""
        step = self.steps[0]()
        assert step is not None
        return step


class ReplayCheck:
    """Prepares steps, within ``pool()``, and vouches for them. ``exchange`` gives every rank's value: all decide alike.

    ``inputs`` names the tensor that a step's model starts from.

    ``culprits`` are the kernels that were found at fault. Their calls are repeated by each run from then on.
    """

    def __init__(
        self,
        calls: KernelCalls,
        forward: Forward,
        block_size: int,
        pool: Callable[[], AbstractContextManager[None]],
        exchange: Callable[[Any], list[Any]],
        inputs: str = "ids",
    ) -> None:
        self._calls, self._forward, self._block_size = calls, forward, block_size
        self._pool, self._exchange, self._inputs = pool, exchange, inputs
        self.culprits: list[Culprit] = []

    def prepare(self, wanted: Wanted) -> CapturedGraph:
        """Prepare the first of ``wanted.steps``, whose inputs are there already, and compare it on all of them.

        Raises PlatformError for what cannot be prepared, or replays something else for no reason that can be named.
        """
        step = wanted.first()
        places = self._places(wanted)
        restore = self._keep_states(wanted)
        try:
            eager = self._outcome(step(**wanted.tensors), places)
            while True:
                graph = self._on_every_rank(partial(self._prepared, wanted, step))
                restore()
                fault = self._first_fault(wanted, graph, places, eager)
                if fault is None:
                    return graph
                del graph  # an engine may keep few
                offer, what = fault
                if not self._blame(offer, wanted.key, what):
                    raise PlatformError(
                        f"step {wanted.key!r} cannot be replayed: {offer.choice} of plugin {offer.plugin} keeps "
                        "something from one call to the next"
                    )
                step = wanted.first()
        finally:
            restore()

    def prepare_unchecked(self, wanted: Wanted) -> CapturedGraph:
        """Prepare the first of ``wanted.steps`` and compare nothing: graphs of the same kernels were compared.

        Raises PlatformError for what cannot be prepared.
        """
        restore = self._keep_states(wanted)
        try:
            return self._on_every_rank(partial(self._prepared, wanted, wanted.first()))
        finally:
            restore()

    def _first_fault(
        self, wanted: Wanted, graph: CapturedGraph, places: Sequence[Places], eager: Outcome
    ) -> tuple[Offer, str] | None:
        """The kernel at fault for the first step on which a run differs from an eager run, if any, and what it did.

        ``eager`` is the first step's, which stores at ``places``. Raises PlatformError where results are far apart, and
        nobody can be named.
        """
        for number, put in enumerate(wanted.steps):
            if number == 0:
                likeness = eager.compare(self._outcome(graph.run(), places))
            else:
                likeness = self._likeness_of(wanted, graph, put)
            likeness = max(self._exchange(likeness))
            if likeness is Likeness.SAME:
                continue
            if fault := self._agreed(self._find(wanted, put) or self._only_suspect(likeness)):
                offer, what = fault
                return offer, what + (", where sequences are longer than those it was prepared with" if number else "")
            if likeness is Likeness.UNLIKE:
                raise PlatformError(
                    f"step {wanted.key!r} gives other results when it is replayed than when it is called, and no "
                    "plugin's kernel can be named as the cause; report this to the platform's author"
                )
            logger.debug("step %s: the bits of a replay differ from an eager run's, within bounds", wanted.key)
        return None

    def _likeness_of(self, wanted: Wanted, graph: CapturedGraph, put: Put) -> Likeness:
        """How a further step compares. It is replayed first: nothing of an eager run is there to be found."""
        step = put()
        if not all(self._exchange(step is not None)):
            return Likeness.SAME
        assert step is not None
        places = self._places(wanted)
        restore = self._keep_states(wanted)
        replayed = self._outcome(graph.run(), places)
        restore()
        likeness = self._outcome(step(**wanted.tensors), places).compare(replayed)
        restore()
        return likeness

    def _on_every_rank(self, prepare: Callable[[], CapturedGraph]) -> CapturedGraph:
        """The prepared step of ``prepare``. Raises PlatformError on every rank where it does on any, and on the others
        where one fails in another way."""
        graph: CapturedGraph | None = None
        failure: Exception | None = None
        try:
            graph = prepare()
        except Exception as error:
            failure = error
        told = self._exchange(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        if others := [each for each in told if each is not None]:
            raise PlatformError(f"another rank: {others[0]}")
        assert graph is not None
        return graph

    def _prepared(self, wanted: Wanted, step: StepFunction, watched: list[WatchedCall] | None = None) -> CapturedGraph:
        """Prepare ``step``, the first, on other inputs than the caller's, which are there again afterwards."""
        key, tensors = wanted.key if watched is None else (wanted.key, "watched"), wanted.tensors
        inputs = tensors[self._inputs]
        held = inputs.clone()
        inputs.zero_()
        try:
            with self._pool():
                prepared = self._calls.prepare(wanted.engine, key, step, tensors, watched)
            if self._calls.offers:
                step(**tensors)  # writes over what kernels have kept of the run that is compared
            return prepared
        finally:
            inputs.copy_(held)

    def _find(self, wanted: Wanted, put: Put) -> tuple[Offer, str] | None:
        """The kernel whose call in the step of ``put`` is the first to go wrong on this rank, and what it did."""
        if not self._calls.offers or not can_repeat(wanted.engine):
            return None
        found: list[WatchedCall] = []
        first = wanted.first()
        restore = self._keep_states(wanted)
        try:
            graph = self._on_every_rank(lambda: self._prepared(wanted, first, found))
            restore()
            step = first if put is wanted.steps[0] else put()
            assert step is not None
            restore = self._keep_states(wanted)
            found.clear()  # engines may have run it
            graph.run()
            restore()
        except PlatformError as error:
            traceback.clear_frames(error.__traceback__)
            logger.debug("step %s cannot be watched: %s", wanted.key, error)
            return None
        expected = self._calls.watch(wanted.engine, step, wanted.tensors)
        restore()
        for eager, replayed in zip(expected, found, strict=False):
            if eager.kernel is not replayed.kernel:
                return None
            if what := _fault(eager, replayed):
                return eager.kernel.offer, f"{eager.kernel.name}: {what}"
        return None

    def _only_suspect(self, likeness: Likeness) -> tuple[Offer, str] | None:
        """The one kernel that neither core nor the platform's plugin brought, where results are far apart."""
        offers = self._calls.offers
        if likeness is not Likeness.UNLIKE or len(offers) != 1:
            return None
        return offers[0], "the step's results differ, and no other kernel in it is a third party's"

    def _agreed(self, fault: tuple[Offer, str] | None) -> tuple[Offer, str] | None:
        """The fault that the first rank found which found one."""
        told = self._exchange(None if fault is None else (fault[0].choice, fault[1]))
        choice, what = next((each for each in told if each is not None), (None, ""))
        offer = next((offer for offer in self._calls.offers if offer.choice == choice), None)
        return None if offer is None else (offer, what)

    def _blame(self, offer: Offer, key: Hashable, what: str) -> bool:
        """Note a culprit; False where its calls were repeated by each run already."""
        known = any(culprit.choice == offer.choice for culprit in self.culprits)
        if not known:
            slot, _, name = offer.choice.partition("=")
            self.culprits.append(Culprit(offer.plugin, slot, name, f"replay of step {key!r}: {what}"))
            logger.warning(
                "%s of plugin %s does something else in a replay of step %s than when it is called (%s): steps run in "
                "pieces around it; report this to its author",
                offer.choice,
                offer.plugin,
                key,
                what,
            )
        return self._calls.repeat(offer) and not known

    def _keep_states(self, wanted: Wanted) -> Callable[[], None]:
        return self._forward.keep_states(wanted.slots, self._block_size, is_trial=wanted.is_trial)

    def _places(self, wanted: Wanted) -> list[Places]:
        """Where the step that was put stores, found before it runs: then nobody waits between its runs."""
        return self._forward.places(wanted.slots, self._block_size)

    def _outcome(self, result: object, places: Sequence[Places]) -> Outcome:
        results = [x.clone() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return Outcome(results, self._forward.stored(places))


def _fault(eager: WatchedCall, replayed: WatchedCall) -> str | None:
    """The fault of a replayed call that had the inputs of the eager call; None where there is none to tell."""
    if all(map(equal_bits, eager.made, replayed.made)):
        return None
    if not all(map(equal_bits, eager.given, replayed.given)):
        return None
    for number, (wanted, got) in enumerate(zip(eager.made, replayed.made, strict=True)):
        own = wanted.cpu()
        truth = own.double() if own.is_floating_point() else own
        where = f"output {number}"
        if faults := compare(where, got, own, truth, eager.kernel.errors, got.device).faults:
            return str(faults[0])
    return None


def _all_equal(mine: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all have equal bits, found out with one wait for the device: it is asked for each prepared step."""
    flags = []
    for a, b in zip(mine, others, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        first, second = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
        flags.append((first == second).all())
    return bool(torch.stack(flags).all()) if flags else True


def _likeness(a: torch.Tensor, b: torch.Tensor) -> Likeness:
    if equal_bits(a, b):
        return Likeness.SAME
    if not a.is_floating_point() or a.shape != b.shape:
        return Likeness.UNLIKE
    share = _CLOSE.get(a.dtype, _CLOSE_IN_FEW_BITS)
    a, b = a.double(), b.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return Likeness.UNLIKE
    a, b = a.masked_fill(~finite, 0), b.masked_fill(~finite, 0)
    bound = share * a.abs().amax(-1, keepdim=True)
    return Likeness.CLOSE if bool(((a - b).abs() <= bound).all()) else Likeness.UNLIKE
