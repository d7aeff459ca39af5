"""Changes of a slot's logits before sampling: allowed tokens, bias and bans, penalties.

Each part keeps its state by slot on the device: what is as wide as the vocabulary in declared memory (``LogitsState``),
small things of its own. Slots that need nothing hold neutral values, so a step applies a part to all its rows, or
leaves it out. No token's value is needed on the host:
what was drawn is recorded on the device, and where a ban ends is a matter of positions. Elements are written
with ``fill_``: on some devices ``x[slot] = number`` waits for all that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.engine.scheduling.step import NewRequest, ScheduledRequest
from hardpoint_plugin_api import Resources

ALWAYS = 2**62
"""A position that no sequence reaches."""
_ANY, _NONE = -1, -2
"""In place of a token: matches every token; matches none, as there is none."""
Op = Callable[..., torch.Tensor]


class LogitsPart(Protocol):
    """``until`` maps slots to the first position whose token the part has no say in; others are not in there."""

    until: dict[int, int]

    def set_slot(self, new: NewRequest) -> None:
        """Take the state of the request that takes a slot, from its tokens so far; forget the last one's."""
        ...

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """logits [N, V] of ``slots``, for tokens at ``positions`` (int64 [N]) -> a new tensor [N, V]."""
        ...

    def record(self, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Note the ``tokens`` drawn for ``slots``, int64 [N] each, no slot twice; ``counts``, bool [N], says of which
        (None: of all)."""
        ...


def needed_parts(parts: Sequence[LogitsPart], shares: Sequence[ScheduledRequest]) -> list[LogitsPart]:
    """The parts that have a say in the tokens which ``shares`` draw; in a plain step none."""

    def is_needed(until: dict[int, int]) -> bool:
        return any(s.first_drawn < until.get(s.slot, 0) for s in shares)

    return [part for part in parts if part.until and is_needed(part.until)]


class SlotArray:
    """An array with a row for each slot, in the engine's resources; zeros at first, and again when the engine slept."""

    def __init__(self, resources: Resources, key: str, num_slots: int, columns: int, dtype: torch.dtype) -> None:
        self._resources, self._key, self._shape, self._dtype = resources, f"sampler.{key}", (num_slots, columns), dtype
        resources.declare(self._key, num_slots * columns * dtype.itemsize)

    @property
    def rows(self) -> torch.Tensor:
        """The array, [num_slots, columns]."""
        return self._resources.get(self._key).view(self._dtype).view(self._shape)


class SlotSets:
    """A set of tokens for each slot, one bit a token."""

    def __init__(self, resources: Resources, key: str, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._array = SlotArray(resources, key, num_slots, -(-vocab_size // 8), torch.uint8)

    def put(self, slot: int, tokens: Sequence[int], *, all_but: bool = False) -> None:
        """Let the slot's set be ``tokens``, or ``all_but`` those."""
        members = np.full(self._vocab_size, all_but)
        members[list(tokens)] = not all_but
        row = torch.from_numpy(np.packbits(members, bitorder="little"))
        self._array.rows[slot].copy_(row, non_blocking=True)

    def masks(self, slots: torch.Tensor) -> torch.Tensor:
        """The sets of ``slots`` (int64 [N]) as bool [N, vocabulary]."""
        return unpack_bits(self._array.rows[slots], self._vocab_size)


def unpack_bits(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Sets of tokens, uint8 [N, ceil(size / 8)], a bit a token from the lowest -> bool [N, size]."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    unpacked = (packed[:, :, None] >> bits) & 1
    return unpacked.view(len(packed), -1)[:, :size].bool()


class LogitsState:
    """State as wide as the vocabulary for each slot: declared with the model, counted before the cache is sized.

    ``forbidden`` are the tokens that allowed_token_ids leaves out, ``in_prompt`` those that the prompt holds, ``drawn``
    counts the others: in 16 bits where no sequence can be longer than they count, else in 32.
    """

    def __init__(self, resources: Resources, num_slots: int, vocab_size: int, max_model_len: int) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self.forbidden = SlotSets(resources, "forbidden", num_slots, vocab_size)
        self.in_prompt = SlotSets(resources, "in_prompt", num_slots, vocab_size)
        enough = max_model_len <= torch.iinfo(torch.int16).max
        self.drawn = SlotArray(resources, "drawn", num_slots, vocab_size, torch.int16 if enough else torch.int32)


class AllowedTokens:
    """Forbids all but given tokens."""

    def __init__(self, op: Op, forbidden: SlotSets) -> None:
        self.until: dict[int, int] = {}
        self._op, self._forbidden = op, forbidden

    def set_slot(self, new: NewRequest) -> None:
        allowed = new.sampling.allowed_token_ids
        if self.until.pop(new.slot, None):
            self._forbidden.put(new.slot, ())
        if allowed is not None:
            self.until[new.slot] = ALWAYS
            self._forbidden.put(new.slot, allowed, all_but=True)

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._op(logits, self._forbidden.masks(slots))

    def record(self, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        pass


class _Rule(NamedTuple):
    """Adds ``value`` to the logit of ``token`` at positions before ``until``, where the output ends with ``behind``."""

    token: int
    value: float
    until: int = ALWAYS
    behind: tuple[int, ...] = ()


class TokenBias:
    """Bias, ends that come too early, and bad words: K rules for each slot, padded with rules that add nothing.

    The first P of them may wait for tokens before theirs, at most L. Such tokens and the newest ones of each output are
    held newest first, so that all arrays grow at their ends.
    """

    def __init__(self, op: Op, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.until: dict[int, int] = {}
        self._op, self._vocab_size, self._device = op, vocab_size, device
        self._tokens, self._until = (torch.zeros(num_slots, 0, dtype=torch.int64, device=device) for _ in range(2))
        self._values = torch.zeros(num_slots, 0, device=device)
        self._behind = torch.zeros(num_slots, 0, 0, dtype=torch.int64, device=device)
        self._recent = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)

    def set_slot(self, new: NewRequest) -> None:
        rules = sorted(self._rules(new), key=lambda rule: not rule.behind)
        if self.until.pop(new.slot, None):
            self._values[new.slot].zero_()
        if not rules:
            return
        self.until[new.slot] = max(rule.until for rule in rules)
        waiting = [rule.behind for rule in rules if rule.behind]
        self._make_room(len(rules), len(waiting), max(map(len, waiting), default=0))
        num_waiting, longest = self._behind.shape[1:]
        rules += [_Rule(0, 0.0)] * (self._tokens.shape[1] - len(rules))
        waiting += [()] * (num_waiting - len(waiting))
        behind = [(*tokens[::-1], *[_ANY] * (longest - len(tokens))) for tokens in waiting]
        output = new.token_ids[new.num_prompt_tokens :][::-1][:longest]
        recent = (*output, *[_NONE] * (longest - len(output)))
        self._tokens[new.slot] = on_device([rule.token for rule in rules], torch.int64, self._device)
        self._values[new.slot] = on_device([rule.value for rule in rules], torch.float32, self._device)
        self._until[new.slot] = on_device([rule.until for rule in rules], torch.int64, self._device)
        self._behind[new.slot] = on_device(behind, torch.int64, self._device).view(num_waiting, longest)
        self._recent[new.slot] = on_device(recent, torch.int64, self._device)

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        behind = self._behind[slots]
        active = positions[:, None] < self._until[slots]
        active[:, : behind.shape[1]] &= ((behind == _ANY) | (behind == self._recent[slots][:, None])).all(-1)
        return self._op(logits, self._tokens[slots], torch.where(active, self._values[slots], 0.0))

    def record(self, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        if longest := self._recent.shape[1]:
            recent = self._recent[slots]
            newer = torch.cat([tokens[:, None], recent], -1)[:, :longest]
            self._recent[slots] = newer if counts is None else torch.where(counts[:, None], newer, recent)

    def _rules(self, new: NewRequest) -> list[_Rule]:
        sampling, forbid = new.sampling, float("-inf")
        rules = [_Rule(token, bias) for token, bias in sampling.logit_bias]
        rules += [_Rule(word[-1], forbid, behind=word[:-1]) for word in sampling.bad_words]
        if sampling.min_tokens:
            until = new.num_prompt_tokens + sampling.min_tokens
            rules += [_Rule(token, forbid, until) for token in sampling.stop_token_ids if token < self._vocab_size]
        return rules

    def _make_room(self, num_rules: int, num_waiting: int, longest: int) -> None:
        """Widen the arrays where they are too narrow; rules by doubling, since few requests have many."""
        (slots, old_rules), (_, old_waiting, old_longest) = self._tokens.shape, self._behind.shape
        if num_rules > old_rules:
            shape = slots, _power_of_two(num_rules)
            self._tokens, self._until, self._values = (
                _widened(x, shape, 0) for x in (self._tokens, self._until, self._values)
            )
        if num_waiting > old_waiting or longest > old_longest:
            waiting = _power_of_two(num_waiting) if num_waiting > old_waiting else old_waiting
            longest = max(longest, old_longest)
            self._behind = _widened(self._behind, (slots, waiting, longest), _ANY)
            self._recent = _widened(self._recent, (slots, longest), _NONE)


def _power_of_two(count: int) -> int:
    """The next one from ``count``, 1 or more, on."""
    return 1 << (count - 1).bit_length()


class Penalties:
    """Which tokens each slot's prompt holds, and how often each was drawn since."""

    def __init__(self, op: Op, state: LogitsState, device: torch.device) -> None:
        self.until: dict[int, int] = {}
        self._op, self._in_prompt, self._drawn, self._device = op, state.in_prompt, state.drawn, device
        self._repetition = torch.ones(state.num_slots, device=device)
        self._presence, self._frequency = (torch.zeros(state.num_slots, device=device) for _ in range(2))

    def set_slot(self, new: NewRequest) -> None:
        s, slot = new.sampling, new.slot
        penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        if self.until.pop(slot, None) or penalties != (1.0, 0.0, 0.0):
            for column, penalty in zip((self._repetition, self._presence, self._frequency), penalties, strict=True):
                column[slot].fill_(penalty)
        if penalties == (1.0, 0.0, 0.0):
            return
        self.until[slot] = ALWAYS
        self._in_prompt.put(slot, new.token_ids[: new.num_prompt_tokens])
        output = on_device(new.token_ids[new.num_prompt_tokens :], torch.int64, self._device)
        row = self._drawn.rows[slot].zero_()
        row.scatter_add_(0, output, torch.ones_like(output, dtype=row.dtype))

    def apply(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        columns = (self._repetition[slots], self._presence[slots], self._frequency[slots])
        return self._op(logits, self._in_prompt.masks(slots), self._drawn.rows[slots].int(), *columns)

    def record(self, slots: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        drawn = self._drawn.rows
        drawn[slots, tokens] += 1 if counts is None else counts.to(drawn.dtype)


def on_device(values: Sequence[object] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy that does not wait for the device; pageable memory may be dropped as soon as this returns."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _widened(x: torch.Tensor, shape: tuple[int, ...], fill: int) -> torch.Tensor:
    """``x`` in the first corner of a larger tensor."""
    wide = x.new_full(shape, fill)
    wide[tuple(slice(size) for size in x.shape)] = x
    return wide
