"""Draws the next token of each slot from its logits, by per-slot parameters and counter-based random numbers.

A draw depends on the slot's own request, its seed and the token's position, never on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch

from hardpoint.context import Context
from hardpoint.engine.execution.sampling.logits_state import (
    AllowedTokens,
    LogitsPart,
    LogitsState,
    Penalties,
    TokenBias,
    needed_parts,
    on_device,
    unpack_bits,
)
from hardpoint.engine.execution.sampling.logprobs import DeviceLogprobs, RankTokens
from hardpoint.engine.execution.staging import StagedArray
from hardpoint.engine.scheduling.step import NewRequest, ScheduledRequest
from hardpoint.ops.apply_logit_bias import apply_logit_bias
from hardpoint.ops.apply_penalties import apply_penalties
from hardpoint.ops.keep_tokens import keep_tokens
from hardpoint.ops.mask_tokens import mask_tokens
from hardpoint.ops.sampling import argmax_tokens, philox_uniform, sample_tokens
from hardpoint.ops.token_logprobs import token_logprobs
from hardpoint.ops.verify_drafts import verify_drafts

Op = Callable[..., torch.Tensor]

_PARAMETERS = np.dtype([("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4"), ("seed", "i8")])
"""A slot's, as they lie on the device."""

PlainDraw = Literal["greedy", "random"]
"""How all of a step's tokens may be drawn where nothing but temperature and truncation has a say."""

_ROWS_AT_ONCE = 256
"""Rows of drafts that are drawn together: drawing takes several float32 copies of their logits."""


@dataclass(frozen=True)
class SamplingOps:
    """The sampler's ops, bound with the model's so that the selection table holds them."""

    argmax: Op
    sample: Op
    uniform: Op
    keep: Callable[..., None]
    mask: Op
    bias: Op
    penalize: Op
    rank: RankTokens
    verify: Op | None = None
    """Bound where steps verify drafts."""

    @classmethod
    def bind(cls, ctx: Context) -> SamplingOps:
        """Select the implementations."""
        return cls(
            argmax=argmax_tokens.bind(ctx),
            sample=sample_tokens.bind(ctx),
            uniform=philox_uniform.bind(ctx),
            keep=keep_tokens.bind(ctx),
            mask=mask_tokens.bind(ctx),
            bias=apply_logit_bias.bind(ctx),
            penalize=apply_penalties.bind(ctx),
            rank=token_logprobs.bind(ctx),
            verify=verify_drafts.bind(ctx) if ctx.config.num_drafts else None,
        )


@dataclass(frozen=True)
class Sampled:
    """Tokens int64 [R] on the device, and their log-probabilities where any slot asks for them.

    Of a step with drafts each request has several rows: ``num_rows``, which begin at ``row_start``, int32 [N+1]. The
    first of them are the tokens that it gets; ``counts``, int64 [N], says how many. Without drafts all three are None.
    """

    tokens: torch.Tensor
    logprobs: DeviceLogprobs | None
    counts: torch.Tensor | None = None
    row_start: torch.Tensor | None = None
    num_rows: tuple[int, ...] | None = None


class Sampler:
    """Parameters live in a device array by slot; a row is written when a request takes the slot.

    ``last_token``, int64, holds what was last drawn for each slot, which the next step reads on the device.

    Logits pass through in this order, as in vLLM: structured output, allowed tokens, bias and bans, penalties,
    temperature, truncations.
    """

    num_columns = 1 + _PARAMETERS.itemsize // 4
    """Numbers that ``take_new`` returns for a request."""

    def __init__(self, ops: SamplingOps, state: LogitsState, device: torch.device) -> None:
        # The last slot is that of padding.
        self._parameters = torch.zeros(state.num_slots + 1, _PARAMETERS.itemsize // 4, dtype=torch.int32, device=device)
        self._temperature, self._top_p, self._min_p, self._top_k, self._seed = (
            self._column(name) for name in _PARAMETERS.names or ()
        )
        self.last_token = torch.zeros(state.num_slots + 1, dtype=torch.int64, device=device)
        self._random_slots: set[int] = set()
        self._top_n: dict[int, int] = {}
        self._parts: tuple[LogitsPart, ...] = (
            AllowedTokens(ops.mask, state.forbidden),
            TokenBias(ops.bias, state.num_slots, state.vocab_size, device),
            Penalties(ops.penalize, state, device),
        )
        self._ops, self._vocab_size = ops, state.vocab_size

    def take_new(self, requests: Sequence[NewRequest]) -> dict[str, StagedArray]:
        """Take the parameters of requests that take slots.

        Returns, by name, what is to travel to the device with the step's arrays: int64 [N], int32 [N, parameters].
        """
        for new in requests:
            slot, sampling = new.slot, new.sampling
            for part in self._parts:
                part.set_slot(new)
            self._top_n.pop(slot, None)
            if sampling.logprobs is not None:
                self._top_n[slot] = self._vocab_size if sampling.logprobs == -1 else sampling.logprobs
            (self._random_slots.discard if sampling.temperature == 0 else self._random_slots.add)(slot)
        if not requests:
            return {}
        each = (new.sampling for new in requests)
        rows = np.array([(s.temperature, s.top_p, s.min_p, s.top_k, s.seed) for s in each], _PARAMETERS)
        slots = np.array([new.slot for new in requests], np.int64)
        return {"new_slots": slots, "new_parameters": rows.view(np.int32).reshape(len(requests), -1)}

    def place_new(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Write what ``take_new`` returned, which is on the device now."""
        if "new_slots" in staged:
            self._parameters[staged["new_slots"]] = staged["new_parameters"]

    def _column(self, name: str) -> torch.Tensor:
        """A parameter of all slots, as a view."""
        fields = _PARAMETERS.fields
        assert fields is not None
        kind, offset = fields[name][:2]
        dtype = torch.from_numpy(np.zeros(0, kind)).dtype
        columns = self._parameters[:, offset // 4 : (offset + kind.itemsize) // 4]
        return columns.view(dtype)[:, 0]

    def sample(
        self, logits: torch.Tensor, shares: Sequence[ScheduledRequest], slots: torch.Tensor, positions: torch.Tensor
    ) -> Sampled:
        """Draw a token for each of ``shares`` and note it in its slot's state.

        logits [N, V]; ``slots`` and ``positions``, int64 [N], are the shares' slots and the drawn tokens' positions.
        """
        parts, changed = needed_parts(self._parts, shares), self._structured(logits, shares)
        for part in parts:
            changed = part.apply(changed, slots, positions)
        tokens = self.draw(self._how(shares), changed, slots, positions)
        for part in parts:
            part.record(slots, tokens)
        return Sampled(tokens, self._logprobs(logits, tokens, shares) if self._top_n else None)

    def verify(
        self,
        logits: torch.Tensor,
        shares: Sequence[ScheduledRequest],
        slots: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor,
        row_start: torch.Tensor,
    ) -> Sampled:
        """Draw a token in each row of ``shares`` that have drafts, and note those that count in their slots' state.

        logits [R, V]; the rows of a share, one more than it has drafts, begin at ``row_start`` (int32 [N+1]). ``slots``
        and ``positions``, int64 [R], are the rows' slots and the drawn tokens' positions; ``drafts``, int64 [R], as in
        the op verify_drafts.
        """
        assert self._ops.verify is not None
        parts, changed = needed_parts(self._parts, shares), self._structured(logits, shares)
        num_rows = tuple(1 + len(share.drafts) for share in shares)
        if parts:
            tokens = self._draw_in_turn(parts, changed, shares, slots, positions, drafts)
        else:
            pieces = zip(*(x.split(_ROWS_AT_ONCE) for x in (changed, slots, positions)), strict=True)
            tokens = torch.cat([self._choose(self._how(shares), *piece) for piece in pieces])
        counts, first = self._ops.verify(tokens, drafts, row_start), row_start[:-1].long()
        self._ops.keep(self.last_token, slots[first], tokens[first + counts - 1])
        logprobs = self._logprobs(logits, tokens, shares) if self._top_n else None
        return Sampled(tokens, logprobs, counts, row_start, num_rows)

    def _draw_in_turn(
        self,
        parts: Sequence[LogitsPart],
        logits: torch.Tensor,
        shares: Sequence[ScheduledRequest],
        slots: torch.Tensor,
        positions: torch.Tensor,
        drafts: torch.Tensor,
    ) -> torch.Tensor:
        """Draw the first row of every share, then the second, and so on: the state that ``parts`` keep follows those
        tokens that count, as it would without drafts. Once a draft was wrong, the share's later rows leave no trace."""
        tokens, how = torch.empty_like(slots), self._how(shares)
        ends = list(accumulate(1 + len(share.drafts) for share in shares))
        counts = torch.ones(len(shares), dtype=torch.bool, device=slots.device)
        for turn in range(max(len(share.drafts) for share in shares) + 1):
            those = [index for index, share in enumerate(shares) if turn <= len(share.drafts)]
            requests = on_device(those, torch.int64, slots.device)
            rows = on_device([ends[i] - 1 - len(shares[i].drafts) + turn for i in those], torch.int64, slots.device)
            changed, its_slots, its_positions = logits[rows], slots[rows], positions[rows]
            for part in parts:
                changed = part.apply(changed, its_slots, its_positions)
            drawn = self._choose(how, changed, its_slots, its_positions)
            for part in parts:
                part.record(its_slots, drawn, counts[requests])
            tokens[rows] = drawn
            counts[requests] &= drawn == drafts[rows]
        return tokens

    def plain_draw(self, shares: Sequence[ScheduledRequest]) -> PlainDraw | None:
        """How ``draw`` draws all of ``shares``' tokens; None where some take more than that: see ``sample``."""
        if self._top_n and any(share.slot in self._top_n for share in shares):
            return None
        if any(share.allowed for share in shares) or needed_parts(self._parts, shares):
            return None
        return self._how(shares)

    def draw(self, how: PlainDraw, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw tokens int64 [N] from logits [N, V], by what the device knows of ``slots`` alone, and keep them.

        ``slots`` and ``positions`` as in ``sample``; a greedy draw looks at no position. The slot behind all others is
        that of padding, and greedy. Mutates ``last_token``.
        """
        tokens = self._choose(how, logits, slots, positions)
        self._ops.keep(self.last_token, slots, tokens)
        return tokens

    def _choose(
        self, how: PlainDraw, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """As ``draw``, without keeping the tokens."""
        if how == "greedy":
            return self._ops.argmax(logits)
        uniform = self._ops.uniform(self._seed[slots], positions)
        columns = (self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots])
        return self._ops.sample(logits, *columns, uniform)

    def _how(self, shares: Sequence[ScheduledRequest]) -> PlainDraw:
        return "greedy" if self._random_slots.isdisjoint(share.slot for share in shares) else "random"

    def _structured(self, logits: torch.Tensor, shares: Sequence[ScheduledRequest]) -> torch.Tensor:
        """logits with what the shares' structures forbid masked out, in a new tensor where there is any."""
        if not any(share.allowed for share in shares):
            return logits
        rows: list[int] = []
        first = 0
        for share in shares:
            rows += range(first, first + len(share.allowed))
            first += 1 + len(share.drafts)
        packed = np.frombuffer(b"".join(packed for share in shares for packed in share.allowed), np.uint8)
        allowed = unpack_bits(on_device(packed.reshape(len(rows), -1), torch.uint8, logits.device), self._vocab_size)
        if len(rows) == len(logits):
            return self._ops.mask(logits, ~allowed)
        index = on_device(rows, torch.int64, logits.device)
        return logits.index_copy(0, index, self._ops.mask(logits[index], ~allowed))

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, shares: Sequence[ScheduledRequest]
    ) -> DeviceLogprobs | None:
        top_n = tuple(self._top_n.get(share.slot) for share in shares for _ in range(1 + len(share.drafts)))
        widest = max((n for n in top_n if n is not None), default=None)
        if widest is None:
            return None
        return DeviceLogprobs(*self._ops.rank(logits, tokens, top_n=widest), top_n)
