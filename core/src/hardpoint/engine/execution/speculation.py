"""Speculation on one rank: the sequences that a drafter reads, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.engine.execution.sampling.logits_state import SlotArray, on_device
from hardpoint.engine.execution.sampling.sampler import Sampled
from hardpoint.engine.execution.staging import StagedArray
from hardpoint.engine.scheduling.step import DRAFTED_AHEAD, NewRequest, ScheduledRequest, TokenLogprobs
from hardpoint_plugin_api import NO_DRAFT, DraftCall, Drafter, Resources

Ints = npt.NDArray[np.int32]
Tokens = tuple[tuple[int, ...], ...]
"""Of each request that samples."""


class Speculation:
    """Every slot's sequence on the device, prompt and drawn tokens, its length, and the drafts that may follow.

    The host learns of them when a step is committed; the next step may run before that.
    """

    def __init__(
        self, drafter: Drafter, resources: Resources, num_slots: int, max_model_len: int, device: torch.device
    ) -> None:
        self._drafter, self._device = drafter, device
        self._sequences = SlotArray(resources, "sequences", num_slots, max_model_len, torch.int32)
        # The last slot is that of padding.
        self._lengths = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._drafts = torch.full((num_slots + 1, drafter.args.num_drafts), NO_DRAFT, device=device)

    def take_new(self, requests: Sequence[NewRequest]) -> None:
        """Take the tokens of requests that take slots."""
        for new in requests:
            known = np.asarray(new.token_ids, np.int32)
            self._sequences.rows[new.slot, : known.size] = on_device(known, torch.int32, self._device)

    def draft(
        self, drawn: Sampled, shares: Sequence[ScheduledRequest], slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Append what was drawn for ``shares`` and return the drafts that may follow, int64 [N, k].

        ``slots`` and ``positions``, int64 [R], are those of the drawn tokens.
        """
        sequences = self._sequences.rows
        sequences[slots, positions] = drawn.tokens.int()  # behind right drafts nothing counts
        lengths = positions + 1
        if drawn.row_start is not None and drawn.counts is not None:
            first = drawn.row_start[:-1].long()
            slots, lengths = slots[first], positions[first] + drawn.counts
        longest = max(share.start + share.count + 1 for share in shares)
        drafts = self._drafter.propose(DraftCall(sequences, slots, lengths, longest))
        self._lengths[slots], self._drafts[slots] = lengths, drafts
        return drafts

    def settle(self, staged: dict[str, torch.Tensor]) -> None:
        """Correct the lengths and positions of a step whose requests begin with ``slack``, which stands there for each
        request: their sequences go on where those of this device end."""
        query_start, lengths = staged["query_start"], staged["seq_lens"]
        starts = lengths - query_start.diff()
        excess = (starts + 1 - self._lengths[staged["table_rows"]]) * (staged["slack"] > 0)
        staged["seq_lens"] = (lengths - excess).to(torch.int32)
        tokens = torch.arange(staged["positions"].shape[0], device=self._device)
        request = torch.bucketize(tokens, query_start[1:].long(), right=True)
        staged["positions"] -= torch.cat([excess, excess.new_zeros(1)])[request]  # padding behind all is left alone

    def place_drafts(self, ids: torch.Tensor, staged: dict[str, torch.Tensor]) -> None:
        """Put drafts that this device has proposed into a step's ids, int64 [T], and where they are compared."""
        rows = staged["ahead_rows"]
        drafts = self._drafts[staged["sample_slots"][rows], staged["ahead_numbers"]]
        staged["drafts"] = staged["drafts"].index_copy(0, rows, drafts)
        ids[staged["sample_rows"][rows] + 1] = drafts.clamp(min=0)


def to_host(
    drawn: Sampled, drafts: torch.Tensor | None, copy: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
) -> Callable[[], tuple[Tokens, Tokens]]:
    """Begin to copy what requests got and their drafts, at once. The result waits for both, and cuts them to what
    counts."""
    num_rows = drawn.tokens.shape[0]
    if drawn.counts is None and drafts is None:
        only_tokens = copy(drawn.tokens)
        return lambda: (tuple(zip(only_tokens().tolist(), strict=True)), ())
    parts = [drawn.tokens, drawn.counts, None if drafts is None else drafts.reshape(-1)]
    waiting = copy(torch.cat([part for part in parts if part is not None]))
    width = 0 if drafts is None else drafts.shape[1]

    def wait() -> tuple[Tokens, Tokens]:
        values = waiting().tolist()
        rows = drawn.num_rows or (1,) * num_rows
        counts = values[num_rows : num_rows + len(rows)] if drawn.counts is not None else rows
        starts = accumulate(rows, initial=0)
        tokens = tuple(tuple(values[start : start + count]) for start, count in zip(starts, counts, strict=False))
        rest = values[len(values) - width * len(rows) :]
        proposed = (rest[row : row + width] for row in range(0, len(rest), width)) if width else ()
        return tokens, tuple(tuple(token for token in row if token != NO_DRAFT) for row in proposed)

    return wait


def grouped(
    scores: Sequence[TokenLogprobs | None], tokens: Tokens, num_rows: Sequence[int] | None
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """The scores of rows as those of the ``tokens`` that each request got; None for one that asks for none."""
    if not scores:
        return ()
    starts = accumulate(num_rows, initial=0) if num_rows else range(len(scores))
    each = (scores[start : start + len(drawn)] for start, drawn in zip(starts, tokens, strict=False))
    return tuple(None if of[0] is None else tuple(score for score in of if score is not None) for of in each)


def draft_arrays(
    scheduled: Sequence[ScheduledRequest], query_start: Ints, slots: npt.NDArray[np.int64]
) -> dict[str, StagedArray]:
    """The R rows of a step that give draws, as arrays by name.

    ``sample_rows``, ``sample_slots`` and ``drafts``, int64 [R]: each row, its request's slot, and the draft that its
    draw is compared with. ``row_start``, int32 [N + 1]: the first of each request's rows among the R.
    ``ahead_rows`` and ``ahead_numbers``, int64, only where the device alone knows drafts: places of those rows among
    the R, and numbers of the drafts within their request.

    ``query_start`` and ``slots`` are those of the scheduled requests.
    """
    rows: list[int] = []
    drafts: list[int] = []
    row_start = [0]
    whose: list[int] = []
    ahead: list[tuple[int, int]] = []
    for index, share in enumerate(scheduled):
        if share.samples:
            end = int(query_start[index + 1])
            if DRAFTED_AHEAD in share.drafts:
                ahead += ((len(rows) + number, number) for number in range(len(share.drafts)))
            rows += range(end - 1 - len(share.drafts), end)
            drafts += (*share.drafts, NO_DRAFT)
            whose += [index] * (1 + len(share.drafts))
            row_start.append(len(rows))
    named = {"sample_rows": rows, "drafts": drafts}
    if ahead:
        named |= dict(zip(("ahead_rows", "ahead_numbers"), map(list, zip(*ahead, strict=True)), strict=True))
    arrays: dict[str, StagedArray] = {name: np.array(values, np.int64) for name, values in named.items()}
    return arrays | {"sample_slots": slots[whose], "row_start": np.array(row_start, np.int32)}
