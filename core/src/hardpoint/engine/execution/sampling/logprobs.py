"""Log-probabilities that requests ask for: of what they drew, and of their prompts.

They are the model's own: log-softmax of its logits, before anything changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.engine.execution.staging import StagedArray
from hardpoint.engine.scheduling.step import NewRequest, PromptLogprobs, ScheduledRequest, StepInput, TokenLogprobs

Ints = npt.NDArray[np.int32]
ToHost = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Begins a copy and returns what waits for it: ``Platform.to_host``."""
RankTokens = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""The op token_logprobs, as bound."""
_ROWS_AT_ONCE = 128
"""Rows of a prompt whose logits exist together: all 8,192 of one step would be 5 GB for a vocabulary of 150,000."""


@dataclass(frozen=True)
class DeviceLogprobs:
    """Token ids, log-probabilities and ranks of N positions, on the device, [N, 1 + n] each: see token_logprobs.

    ``top_n`` says how many of the n likeliest each position asks for, None for one that asks for nothing.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_n: tuple[int | None, ...]

    def to_host(self, copy: ToHost) -> Callable[[], tuple[TokenLogprobs | None, ...]]:
        """Begin to copy the values; the result waits for them, and cuts each position's to what it asks for."""
        copies = [copy(values) for values in (self.ids, self.logprobs, self.ranks)]

        def wait() -> tuple[TokenLogprobs | None, ...]:
            columns = (*(copied().tolist() for copied in copies), self.top_n)
            return tuple(
                None if n is None else TokenLogprobs(ids[: n + 1], logprobs[: n + 1], ranks[: n + 1])
                for ids, logprobs, ranks, n in zip(*columns, strict=True)
            )

        return wait


@dataclass(frozen=True)
class _Chunk:
    """The part of a prompt that a step reads and whose next tokens are prompt too: ``count`` tokens from ``start``."""

    index: int
    slot: int
    start: int
    count: int
    top_n: int


@dataclass(frozen=True)
class DevicePromptLogprobs:
    """Log-probabilities of prompts that one step computed."""

    chunks: tuple[_Chunk, ...]
    scores: DeviceLogprobs

    def to_host(self, copy: ToHost) -> Callable[[], tuple[PromptLogprobs, ...]]:
        """See DeviceLogprobs. A chunk's first entry is that of the token after its first."""
        scores = self.scores.to_host(copy)

        def wait() -> tuple[PromptLogprobs, ...]:
            rows = iter(scores())
            return tuple(
                PromptLogprobs(c.index, c.start + 1, tuple(row for row in islice(rows, c.count) if row is not None))
                for c in self.chunks
            )

        return wait


class PromptScorer:
    """Scores prompts, chunk by chunk, for the slots whose requests ask for it."""

    def __init__(
        self, rank_tokens: RankTokens, logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
    ) -> None:
        """``logits`` turns hidden states [N, hidden] to logits [N, V]."""
        self._rank_tokens, self._logits, self._vocab_size = rank_tokens, logits, vocab_size
        self._wanted: dict[int, tuple[int, int]] = {}

    def set_slot(self, new: NewRequest) -> None:
        """Note whether the request that takes a slot asks for its prompt; one that has drawn already knows it."""
        top_n = new.sampling.prompt_logprobs
        self._wanted.pop(new.slot, None)
        if top_n is not None and len(new.token_ids) == new.num_prompt_tokens > 1:
            self._wanted[new.slot] = new.num_prompt_tokens, self._vocab_size if top_n == -1 else top_n

    def wants(self, step: StepInput) -> bool:
        """Whether a request of ``step`` asks for what the step reads of its prompt."""
        return bool(self._wanted and self._chunks(step.scheduled))

    def arrays(self, scheduled: Sequence[ScheduledRequest], query_start: Ints, tokens: Ints) -> dict[str, StagedArray]:
        """The arrays that ``score`` reads on the device, by name, int64 each; empty where no slot asks.

        ``query_start`` holds the row at which each scheduled request starts, ``tokens`` those known, [slots, length].
        """
        chunks = self._chunks(scheduled)
        if not chunks:
            return {}
        rows = [np.arange(c.count) + query_start[c.index] for c in chunks]
        targets = [tokens[c.slot, c.start + 1 : c.start + 1 + c.count] for c in chunks]
        return {"prompt_rows": np.concatenate(rows), "prompt_targets": np.concatenate(targets).astype(np.int64)}

    def score(
        self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor, staged: Mapping[str, torch.Tensor]
    ) -> DevicePromptLogprobs | None:
        """Score what the step reads of prompts. hidden [T, hidden]; ``staged`` holds ``arrays`` on the device."""
        chunks = self._chunks(scheduled)
        if not chunks:
            return None
        for chunk in chunks:
            if chunk.start + chunk.count == self._wanted[chunk.slot][0] - 1:
                del self._wanted[chunk.slot]  # so that no later step looks for it
        widest = max(c.top_n for c in chunks)
        rows, targets = staged["prompt_rows"], staged["prompt_targets"]
        parts = [
            self._rank_tokens(self._logits(hidden[some]), those, top_n=widest)
            for some, those in zip(rows.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True)
        ]
        ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
        top_n = tuple(c.top_n for c in chunks for _ in range(c.count))
        return DevicePromptLogprobs(tuple(chunks), DeviceLogprobs(ids, logprobs, ranks, top_n))

    def _chunks(self, scheduled: Sequence[ScheduledRequest]) -> list[_Chunk]:
        chunks = []
        for index, share in enumerate(scheduled) if self._wanted else ():
            num_prompt, top_n = self._wanted.get(share.slot, (0, 0))
            count = min(share.count, num_prompt - 1 - share.start)
            if count > 0:
                chunks.append(_Chunk(index, share.slot, share.start, count, top_n))
        return chunks
