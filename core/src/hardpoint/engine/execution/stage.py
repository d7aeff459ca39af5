"""The pipeline stage of a rank, as its runner sees it: where a step's inputs come from, and where its results go.

A step passes through the stages in order. Each hands on the *states* of the step's tokens (see CausalLM); the last one
draws. The first one reads drawn tokens as ids of later steps. It gets them when a step continues their requests; until
then it computes steps of other requests while the last one draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from hardpoint.engine.scheduling.step import StepInput
from hardpoint_plugin_api import RankGroup


class Stage:
    """The only stage: it takes ids, and draws.

    ``inputs`` names the step's array that the model starts from. ``draws`` is False for a stage whose results are
    states.
    """

    inputs: Literal["ids", "states"] = "ids"
    draws = True

    def buffers(self, tokens: int) -> dict[str, torch.Tensor]:
        """Fixed inputs of captured steps of up to ``tokens`` tokens, beside ids."""
        return {}

    def take_in(self, ids: torch.Tensor, num_tokens: int, fixed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what the model starts from, in the buffers ``fixed`` where the step has such.

        ids int64 [T] are padded beyond ``num_tokens``, as the result is.
        """
        return ids

    def hand_on(self, states: torch.Tensor, num_tokens: int) -> None:
        """Give the next stage the first ``num_tokens`` of ``states`` [2, T, hidden]."""
        raise NotImplementedError("there is no next stage")

    def take_drawn(self, step: StepInput, last_token: torch.Tensor) -> None:
        """Before ``step``: have the first stage know the tokens that it continues, in ``last_token``, int64 by slot."""

    def note_drawn(self, step: StepInput, staged: Mapping[str, torch.Tensor]) -> None:
        """After ``step``, whose arrays are ``staged`` (see Runner): remember which slots' tokens it draws."""


class PipelineStage(Stage):
    """One of several pipeline stages. ``group``: a rank of each stage, in order; each sends states to the next."""

    def __init__(self, group: RankGroup, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._last = group, group.size - 1
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self.inputs = "states" if group.rank else "ids"
        self.draws = group.rank == self._last
        self._undelivered: set[int] = set()
        """Slots whose newest token the last stage drew and the first has not got."""
        self._newest: tuple[set[int], torch.Tensor] | None = None
        """The slots of the last step that drew: on the host, and on the device as int64."""

    def buffers(self, tokens: int) -> dict[str, torch.Tensor]:
        """The fixed buffer ``states`` [2, ``tokens``, hidden] that captured steps read. The first stage has none."""
        return {"states": self._states(tokens)} if self._group.rank else {}

    def take_in(self, ids: torch.Tensor, num_tokens: int, fixed: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See Stage. Waits for the stage before."""
        if not self._group.rank:
            return ids
        states = fixed["states"] if fixed else self._states(ids.shape[0])
        for part in states:
            self._group.recv(part[:num_tokens], self._group.rank - 1)
        return states

    def hand_on(self, states: torch.Tensor, num_tokens: int) -> None:
        """See Stage."""
        for part in states:
            self._group.send(part[:num_tokens], self._group.rank + 1)

    def take_drawn(self, step: StepInput, last_token: torch.Tensor) -> None:
        """See Stage. The first stage waits until the last one has drawn."""
        self._undelivered.difference_update(step.freed)
        if not any(share.slot in self._undelivered for share in step.scheduled):
            return
        if self._newest is not None and self._newest[0] == self._undelivered:
            slots = self._newest[1]
        else:
            slots = torch.tensor(sorted(self._undelivered), device=self._device)
        self._undelivered.clear()
        if self.draws:
            self._group.send(last_token[slots], 0)
        else:
            drawn = last_token.new_empty(slots.shape)
            self._group.recv(drawn, self._last)
            last_token[slots] = drawn

    def note_drawn(self, step: StepInput, staged: Mapping[str, torch.Tensor]) -> None:
        """See Stage. Stages between the first and the last one have nothing to remember."""
        drawing = {share.slot for share in step.scheduled if share.samples}
        if not drawing or 0 < self._group.rank < self._last:
            return
        # A decode step, all of whose requests sample, has slots alone, behind which padding stands.
        slots = staged["sample_slots"] if "sample_slots" in staged else staged["slots"][: len(step.scheduled)]
        self._newest = drawing, slots.to(torch.int64, copy=True)  # a later step overwrites the step's arrays
        self._undelivered |= drawing

    def _states(self, tokens: int) -> torch.Tensor:
        return torch.zeros(2, tokens, self._hidden_size, dtype=self._dtype, device=self._device)


def stage_of(group: RankGroup, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Stage:
    """The stage of this rank of ``group``."""
    return PipelineStage(group, hidden_size, dtype, device) if group.size > 1 else Stage()
