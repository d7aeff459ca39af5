"""A share of the calls that an engine really makes, held to the reference under the op's error model.

Tests and certificates try a kernel on inputs made for them; this looks at what it returns in service: the outputs that
the engine goes on with, and the inputs that it changed. The reference runs on copies taken before the call, on the
host, so that a checked call waits for the device and is slow. Of a paged cache only the pages of the call's slots are
copied and compared. A difference is counted, and logged once for each op and implementation with the first mismatch;
the engine goes on with the kernel's own result.
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from hardpoint.logs import log_once
from hardpoint.metrics import EngineMetrics
from hardpoint.ops.base import Case, CustomOp
from hardpoint.ops.judge import Call, Input, judge_call, op_expected, op_inputs, op_read, op_state
from hardpoint.plugin_host.record import CORE
from hardpoint_plugin_api import NULL_PAGE, OpWorkload

if TYPE_CHECKING:
    from hardpoint.plugin_host import Offer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

MOST_BYTES = 2**28
"""Inputs beyond this are not copied: the reference in float64 on the host would need many times as much."""

_PLAIN = "plain"
_SLOTS = "slot_mapping"
"""The parameter that says where an op writes to a paged cache."""


class ShadowCheck:
    """Chooses calls by chance, ``rate`` of them, with a seed: two runs of one engine check the same calls."""

    def __init__(self, rate: float, seed: int, metrics: EngineMetrics, most_bytes: int = MOST_BYTES) -> None:
        core, labels = metrics.for_plugin(CORE), ["op", "implementation"]
        self._rate, self._seed, self._most_bytes = rate, seed, most_bytes
        self._num_watched = 0
        self._checked = core.counter("shadow_checked_calls", "Calls of ops that were compared.", labels)
        self._faulty = core.counter("shadow_faulty_calls", "Of those, calls beyond the op's error model.", labels)
        self._skipped = core.counter("shadow_skipped_calls", "Chosen calls that could not be compared.", labels)

    def watch(self, op: CustomOp[P, R], offer: Offer, workload: OpWorkload, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, bound for one use of ``op``, with some of its calls checked; never the reference's own.

        A function that cannot be checked is returned as it is, with one warning.
        """
        if function is op.reference:
            return function
        if op.sums is not None:
            self._warn(offer, f"it sums {op.sums!r} over ranks, and the reference would need what the others hold")
            return function
        if workload.layout not in (None, _PLAIN):
            self._warn(offer, f"the reference knows the cache layout {_PLAIN!r} alone, and this is {workload.layout!r}")
            return function
        chance = random.Random(f"{self._seed} {self._num_watched}")
        self._num_watched += 1

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            if chance.random() >= self._rate:
                return function(*args, **kwargs)
            return self._checked_call(op, offer, lambda: function(*args, **kwargs), args, kwargs)

        return watched

    def _checked_call(
        self,
        op: CustomOp[P, R],
        offer: Offer,
        function: Callable[[], R],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> R:
        labels = (op.name, offer.contribution.name)
        given = _Given.of(op, args, kwargs)
        if given.nbytes > self._most_bytes:
            self._warn(
                offer, f"inputs of {given.nbytes:,} bytes are more than the {self._most_bytes:,} that are copied"
            )
            self._skipped.labels(*labels).inc()
            return function()
        before = given.copy()
        results: list[R] = []

        def run() -> R:
            results.append(function())
            return results[0]

        call = Call(
            inputs=tuple(given.unpaged),
            run=run,
            state=given.state,
            expect=lambda: op_expected(op, before),
            errors=op.errors,
            read=op_read(op, before),
            mutates=frozenset(op.mutates),
            aliases=frozenset(op.aliases),
        )
        try:
            faults = judge_call(call, whole_storages=False).faults
        except Exception as error:
            if not results:
                raise  # the kernel's own failure, as without a check
            self._warn(offer, f"the comparison failed with {type(error).__name__}: {error}")
            self._skipped.labels(*labels).inc()
            return results[0]
        self._checked.labels(*labels).inc()
        if faults:
            self._faulty.labels(*labels).inc()
            message = (
                f"shadow check: {offer.contribution} of plugin {offer.plugin} is beyond the op's error model "
                f"({op.errors}): {faults[0]}; inputs: {given}; further ones are only counted"
            )
            log_once(logger, logging.ERROR, ("faulty", *labels), message, scope=self)
        return results[0]

    def _warn(self, offer: Offer, fact: str) -> None:
        what = f"{offer.contribution} of plugin {offer.plugin}"
        key = ("skipped", offer.contribution.of, offer.contribution.name)
        log_once(logger, logging.WARNING, key, f"shadow check: calls of {what} are left out: {fact}", scope=self)


@dataclass(frozen=True)
class _Given:
    """A call's arguments by name. Of ``paged`` parameters, ``pages`` are those that the call may write to, the null
    page first; None where there are no such parameters."""

    op: CustomOp[..., Any]
    arguments: Mapping[str, Any]
    paged: tuple[str, ...]
    pages: torch.Tensor | None
    slots: torch.Tensor | None

    @classmethod
    def of(cls, op: CustomOp[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Given:
        arguments = inspect.signature(op.reference).bind(*args, **kwargs).arguments
        paged = op.errors.ignore_null_page if _SLOTS in arguments else ()
        if not paged:
            return cls(op, arguments, (), None, None)
        (block_size,) = {i.tensor.shape[1] for i in _inputs(op, arguments) if i.parameter in paged}
        slots = arguments[_SLOTS].long()
        with_null = torch.cat([slots.new_full((1,), NULL_PAGE), slots // block_size])
        pages, places = torch.unique(with_null, return_inverse=True)
        renumbered = places[1:] * block_size + slots % block_size
        return cls(op, arguments, paged, pages, renumbered.to(arguments[_SLOTS].dtype))

    @property
    def unpaged(self) -> list[Input]:
        """The tensors that are looked at as a whole."""
        return [i for i in _inputs(self.op, self.arguments) if i.parameter not in self.paged]

    @property
    def nbytes(self) -> int:
        """The bytes that copying takes."""
        whole = sum(i.tensor.nbytes for i in self.unpaged)
        count = 0 if self.pages is None else len(self.pages)
        parts = [i.tensor for i in _inputs(self.op, self.arguments) if i.parameter in self.paged]
        return whole + sum(part[:1].nbytes * count for part in parts)

    def copy(self) -> Case:
        """The arguments as they are now, as a smaller case that has the same result: only the pages in play."""
        kwargs = {name: self._copied(value, name in self.paged) for name, value in self.arguments.items()}
        if self.slots is not None:
            kwargs[_SLOTS] = self.slots
        return Case("shadow", (), kwargs)

    def state(self) -> list[torch.Tensor]:
        """The inputs that the op has mutated, as the copy's reference sees them."""
        pages = {name: self._copied(self.arguments[name], paged=True) for name in self.paged}
        return op_state(self.op, _inputs(self.op, {**self.arguments, **pages}))

    def _copied(self, value: Any, paged: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return value[self.pages] if paged else value.clone()
        if isinstance(value, Mapping):
            return {key: self._copied(item, paged) for key, item in value.items()}
        return value

    def __str__(self) -> str:
        tensors = _inputs(self.op, self.arguments)
        return ", ".join(
            f"{i.label} {str(i.tensor.dtype).removeprefix('torch.')}{list(i.tensor.shape)}" for i in tensors
        )


def _inputs(op: CustomOp[..., Any], arguments: Mapping[str, Any]) -> list[Input]:
    return op_inputs(op, Case("", (), arguments))
