"""The times at which experts are balanced: every so many steps, one layer between two steps, so that requests go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hardpoint.config import EngineConfig
from hardpoint.engine.execution.executor import Executor
from hardpoint.engine.execution.expert_verbs import BalanceLayer, ForgetLoads
from hardpoint.experts.balance import Balanced

logger = logging.getLogger(__name__)


class ExpertBalancing:
    """Has the ranks balance their experts. Steps count, and no clock, so that the same requests run the same steps.

    Where replicas share experts, each of them counts the steps of all, and so comes to the same.
    """

    def __init__(self, executor: Executor, config: EngineConfig) -> None:
        self._executor, self._first_ranks = executor, config.topology.first_ranks
        self._tells = not (config.topology.shares_experts and config.topology.replica)
        self._is_on, self._interval = config.enable_eplb, config.eplb_step_interval
        self._count_from = config.eplb_step_interval - config.eplb_window_size
        self._num_steps, self._counts = 0, False
        self._round: Iterator[None] | None = None

    def between_steps(self) -> None:
        """Do what is due before the next step.

        A layer forgets its loads when it is balanced, and all do so where the window begins. A round that takes longer
        than that, or than the interval, ends first.
        """
        if not self._is_on:
            return
        if self._round is None and self._num_steps >= self._interval:
            self._num_steps, self._round, self._counts = 0, self._balance(), not self._count_from
        if self._round is not None and next(self._round, self) is self:
            self._round = None
        if self._round is None and not self._counts and self._num_steps >= self._count_from:
            self._executor.control(ForgetLoads())
            self._counts = True
        self._num_steps += 1

    def _balance(self) -> Iterator[None]:
        """Balance a layer of each stage each time; then log it."""
        done: list[Balanced] = []
        number = 0
        while True:
            answers = self._executor.control(BalanceLayer(number))
            found = [answers[rank] for rank in self._first_ranks]
            layers = [layer for layer in found if layer is not None]
            if not layers:
                break
            done += layers
            number += 1
            yield
        if self._tells:
            _log(done)


def _log(layers: Sequence[Balanced]) -> None:
    if not layers:
        return
    before, after = (max(getattr(layer, name) for layer in layers) for name in ("before", "after"))
    largest = max(layer.nbytes for layer in layers)
    logger.info(
        "experts balanced: in the worst layer the busiest rank had %.2f times the mean load, and now %.2f; %d experts "
        "moved in %d of %d layers, %.1f MB, at most %.1f MB between two steps",
        before,
        after,
        sum(layer.num_moved for layer in layers),
        sum(layer.num_moved > 0 for layer in layers),
        len(layers),
        sum(layer.nbytes for layer in layers) / 1e6,
        largest / 1e6,
    )
