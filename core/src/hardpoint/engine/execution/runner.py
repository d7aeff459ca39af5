"""The runner: one step on one device. It keeps requests in persistent slots and knows no policy.

``submit`` puts a step on the device and returns at once where the device is asynchronous; ``collect`` waits for the
sampled tokens, the one exchange between host and device that anybody waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.context import Context
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.execution.graphs.graphs import Graphs
from hardpoint.engine.execution.graphs.shapes import End, StepShape
from hardpoint.engine.execution.sampling.logprobs import DevicePromptLogprobs, PromptScorer
from hardpoint.engine.execution.sampling.sampler import Sampled, Sampler, SamplingOps
from hardpoint.engine.execution.speculation import Speculation, Tokens, draft_arrays, grouped, to_host
from hardpoint.engine.execution.stage import Stage
from hardpoint.engine.execution.staging import StagedArray, Staging
from hardpoint.engine.lora import NO_ADAPTER
from hardpoint.engine.scheduling.step import (
    PageCopy,
    PromptLogprobs,
    ScheduledRequest,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from hardpoint.ops.decode_inputs import LAST_DRAWN, NUM_FIXED_ROWS, decode_inputs
from hardpoint.ops.slot_mapping import slot_mapping
from hardpoint_plugin_api import NO_DRAFT, NULL_PAGE, AttentionBatch, AttentionMetadata, Platform

Ints = npt.NDArray[np.int32]
Number = TypeVar("Number", bound=np.integer[Any])


@dataclass(frozen=True)
class StepOps:
    """The ops around the model, bound with it so that the selection table holds them."""

    slot_mapping: Callable[..., torch.Tensor]
    decode_inputs: Callable[..., None]
    sampling: SamplingOps

    @classmethod
    def bind(cls, ctx: Context) -> StepOps:
        """Select the implementations."""
        return cls(slot_mapping.bind(ctx), decode_inputs.bind(ctx), SamplingOps.bind(ctx))


@dataclass(frozen=True)
class Ticket:
    """A submitted step: its number, the tokens it draws and the drafts that may follow them, and what is asked about
    tokens and prompts.

    Each of these is on its way to the host: a call waits for it, and for nothing that was submitted later. Where the
    step verifies drafts, ``num_rows`` of the log-probabilities belong to each request.
    """

    number: int
    drawn: Callable[[], tuple[Tokens, Tokens]]
    logprobs: Callable[[], tuple[TokenLogprobs | None, ...]]
    prompt_logprobs: Callable[[], tuple[PromptLogprobs, ...]]
    num_rows: tuple[int, ...] | None = None


class StepArrays(NamedTuple):
    """A step on the device: ids and positions int64 [T], its plan for each layer, other arrays by name, and its tokens'
    adapters where some have one."""

    ids: torch.Tensor
    positions: torch.Tensor
    metadata: Sequence[AttentionMetadata]
    staged: Mapping[str, torch.Tensor]
    adapters: torch.Tensor | None


@dataclass(frozen=True)
class RunnerArgs:
    """The parts that a runner is constructed with.

    ``token_buckets`` are the sizes that a step's tokens are padded to; none means no padding.
    """

    ctx: Context
    platform: Platform
    forward: Forward
    graphs: Graphs
    stage: Stage
    sampler: Sampler
    ops: StepOps
    num_slots: int
    vocab_size: int
    max_step_tokens: int
    token_buckets: tuple[int, ...] = ()
    speculation: Speculation | None = None


class Runner:
    """Runs the model over a step's tokens, then samples."""

    def __init__(self, args: RunnerArgs) -> None:
        ctx, num_slots = args.ctx, args.num_slots
        self._ctx, self._forward, self._graphs, self._stage = ctx, args.forward, args.graphs, args.stage
        self._device, self._block_size = ctx.torch_device, ctx.block_size
        self._platform, self._ops = args.platform, args.ops
        self._max_pages = -(-ctx.max_model_len // ctx.block_size)
        # The slot behind all others is that of requests which are mere padding: one token, all pages the null page.
        self._padding_slot, rows = num_slots, num_slots + 1
        self._tokens: Ints = np.zeros((rows, ctx.max_model_len), np.int32)
        self._num_known: Ints = np.ones(rows, np.int32)
        num_groups = len(ctx.cache_users.cache_groups())
        self._block_tables = torch.full(
            (num_groups, rows, self._max_pages), NULL_PAGE, dtype=torch.int32, device=self._device
        )
        self._num_blocks: Ints = np.zeros(rows, np.int32)
        self._adapters: Ints = np.full(rows, NO_ADAPTER.slot, np.int32)
        self._has_adapters = ctx.config.num_adapters > 0
        self._sampler, self._speculation = args.sampler, args.speculation
        self._prompts = PromptScorer(args.ops.sampling.rank, args.forward.model.logits, args.vocab_size)
        self._padding_tokens = ctx.metrics.counter("padding_tokens", "Tokens that ran as mere padding of steps.")
        new_pages = num_groups * num_slots * self._max_pages
        most_requests = max(num_slots, args.graphs.most_requests)
        # A step of fewer tokens may be padded beyond them.
        most_tokens = max(args.max_step_tokens, args.graphs.most_tokens, *args.token_buckets)
        per_token = 6 if args.speculation is None else 11  # a row, its slot and its draft; which it is, and of what row
        per_token += self._has_adapters
        capacity = per_token * most_tokens + (8 + Sampler.num_columns) * most_requests + 1
        capacity += 2 * new_pages + 2 * num_groups * num_slots  # the latter for page copies
        self._staging = Staging(2 * capacity, self._device, args.platform.pin)  # as if all were int64

    @torch.inference_mode()
    def submit(self, step: StepInput) -> Ticket:
        """Take the delta, run the model over the step's tokens, draw a token for each slot that samples.

        A pipeline stage that does not draw hands on the tokens' states instead; its ticket has no tokens.
        """
        new = self._take_new(step)
        self._stage.take_drawn(step, self._sampler.last_token)
        shape = self._graphs.find(step, self._prompts.wants(step), self._has_adapters and self._adapts(step))
        arrays, count = self._plan(step, shape, new), step.num_tokens
        fixed = self._graphs.buffers(shape).step if shape.mode != "eager" else {}
        inputs = self._stage.take_in(arrays.ids, count, fixed)
        with self._ctx.range("model"):
            end, result = self._graphs.run(step, shape, inputs, arrays.positions, arrays.metadata, arrays.adapters)
        if end == "states":
            self._stage.hand_on(result, count)
            ticket = self._none_drawn(step)
        elif end == "greedy" or end == "random":
            shares, requests = step.scheduled, len(step.scheduled)
            drawn = Sampled(result[:requests], None)
            ticket = self._drawn(
                step, shares, drawn, lambda: (arrays.staged["slots"][:requests], arrays.positions[:requests] + 1)
            )
        else:
            ticket = self._sample(step, end, result, arrays)
        self._stage.note_drawn(step, arrays.staged)
        return ticket

    def _sample(self, step: StepInput, end: End, result: torch.Tensor, arrays: StepArrays) -> Ticket:
        """Draw from what the step ended with: hidden states or logits of its tokens, or logits of its requests."""
        staged, shares = arrays.staged, [share for share in step.scheduled if share.samples]
        prompts = self._prompts.score(step.scheduled, result, staged) if end == "hidden" else None
        if not shares:
            return self._none_drawn(step, prompts)
        if "sample_rows" in staged:
            rows, slots = staged["sample_rows"], staged["sample_slots"]
            positions = arrays.positions[rows]
        else:  # a decode step, all of whose requests sample
            slots, positions = staged["slots"][: len(shares)], arrays.positions[: len(shares)]
        positions = positions + 1
        if end == "hidden":
            logits = self._forward.model.logits(result[rows])
        elif end == "token_logits":
            logits = result[rows]
        elif len(shares) < len(step.scheduled):
            logits = result[staged["sample_requests"]]
        else:
            logits = result[: len(shares)]
        with self._ctx.range("sample"):
            if "drafts" in staged:
                drafts, row_start = staged["drafts"], staged["row_start"]
                drawn = self._sampler.verify(logits, shares, slots, positions, drafts, row_start)
            else:
                drawn = self._sampler.sample(logits, shares, slots, positions)
        return self._drawn(step, shares, drawn, lambda: (slots, positions), prompts)

    def _none_drawn(self, step: StepInput, prompts: DevicePromptLogprobs | None = None) -> Ticket:
        none = self._sampler.last_token[:0]
        return self._drawn(step, (), Sampled(none, None), lambda: (none, none), prompts)

    def _drawn(
        self,
        step: StepInput,
        shares: Sequence[ScheduledRequest],
        drawn: Sampled,
        where: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        prompts: DevicePromptLogprobs | None = None,
    ) -> Ticket:
        """Propose what may follow the tokens, and send all that was drawn and asked to the host.

        ``where`` returns the slots and positions, int64 [R], of the tokens drawn for ``shares``; only drafts need them.
        A step that drew none is waited for, too: its arrays travel from memory that a later step overwrites.
        """
        drafts = None
        if self._speculation is not None and shares:
            with self._ctx.range("draft"):
                drafts = self._speculation.draft(drawn, shares, *where())
        copy = self._platform.to_host
        logprobs = drawn.logprobs.to_host(copy) if drawn.logprobs else tuple
        scores = prompts.to_host(copy) if prompts else tuple
        return Ticket(step.number, to_host(drawn, drafts, copy), logprobs, scores, drawn.num_rows)

    def forward(self, step: StepInput) -> tuple[torch.Tensor, StepArrays]:
        """Take the delta and run the model eagerly; returns hidden states [T, hidden] beside the step's arrays."""
        new = self._take_new(step)
        arrays = self._plan(step, self._graphs.eager(step, self._adapts(step)), new)
        with self._ctx.range("model"):
            return self._forward.hidden(arrays.ids, arrays.positions, arrays.metadata, arrays.adapters), arrays

    def _adapts(self, step: StepInput) -> bool:
        """Whether any token of ``step`` has an adapter."""
        return any(self._adapters[share.slot] >= 0 for share in step.scheduled)

    def _plan(self, step: StepInput, shape: StepShape, new: dict[str, StagedArray]) -> StepArrays:
        """Bring the step's arrays to the device, with those of ``new`` requests' parameters, into the buffers of
        ``shape``, and have attention plan it."""
        with self._ctx.range("plan"):
            if shape.queries == 1:
                return self._plan_decodes(step, shape, new)
            batches, staged = self._batches(step, shape, new)
            ids, positions = self._with_last_tokens(staged), staged["positions"]
            adapters = staged.get("adapters")
            if shape.mode != "eager":
                batches = self._graphs.buffers(shape).load(ids, positions, batches, adapters)
            return StepArrays(ids, positions, self._forward.plan(batches), staged, adapters)

    def _with_last_tokens(self, staged: dict[str, torch.Tensor]) -> torch.Tensor:
        """The step's ids, int64 [T], with the tokens that the device alone knows so far."""
        ids = staged["ids"]
        if "gather_rows" in staged:
            ids[staged["gather_rows"]] = self._sampler.last_token[staged["gather_slots"]]
        if self._speculation is not None and "ahead_rows" in staged:
            self._speculation.place_drafts(ids, staged)
        return ids

    def _plan_decodes(self, step: StepInput, shape: StepShape, new: dict[str, StagedArray]) -> StepArrays:
        """The same for a step of one token for each request, by one op."""
        buffers, size = self._graphs.buffers(shape), shape.tokens
        shares, block_size = step.scheduled, self._block_size
        count = len(shares)
        rows = np.empty((NUM_FIXED_ROWS + len(self._block_tables), size), np.int32)
        slots, lengths, tokens = rows[:NUM_FIXED_ROWS]
        slots[:count], lengths[:count] = [s.slot for s in shares], [s.start + 1 for s in shares]
        tokens[:], rows[NUM_FIXED_ROWS:] = LAST_DRAWN, NULL_PAGE
        if size > count:
            slots[count:], lengths[count:], tokens[count:] = self._padding_slot, 1, 0
            self._padding_tokens.inc(size - count)
        known = np.flatnonzero(lengths[:count] <= self._num_known[slots[:count]])
        if known.size:
            tokens[known] = self._tokens[slots[known], lengths[known] - 1]
        arrays: dict[str, StagedArray] = {"rows": rows, **new, **_copied(step.page_copies)}
        paged = [(row, share) for row, share in enumerate(shares) if share.new_pages[0]]
        if any(len(s.new_pages[0]) > (s.start % block_size == 0) for _, s in paged):
            arrays |= self._take_pages(step)  # a prefix that was found in the cache
        else:
            for row, share in paged:
                rows[NUM_FIXED_ROWS:, row] = [pages[0] for pages in share.new_pages]
                self._num_blocks[share.slot] += 1
        if shape.adapted:
            arrays["adapters"] = self._adapters[slots]
        staged = self._staging.stage(arrays)
        self._place_changes(step, staged)
        self._ops.decode_inputs(
            staged["rows"], self._sampler.last_token, self._block_tables, buffers.step, block_size=block_size
        )
        if shape.adapted:
            buffers.step["adapters"].copy_(staged["adapters"])
        metadata = self._forward.plan(buffers.planned(tuple(lengths.tolist())))
        fixed = buffers.step
        return StepArrays(fixed["ids"], fixed["positions"], metadata, fixed, staged.get("adapters"))

    @torch.inference_mode()  # as the copies began: a platform may finish them on the tensors of then
    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the tokens of ``ticket``, and for what was asked about them."""
        tokens, drafts = ticket.drawn()
        scores = grouped(ticket.logprobs(), tokens, ticket.num_rows)
        return StepOutput(ticket.number, tokens, scores, ticket.prompt_logprobs(), drafts)

    def _take_new(self, step: StepInput) -> dict[str, StagedArray]:
        """Fill new slots, before anything asks how the step may be drawn; returns what ``Sampler.take_new`` does."""
        for new in step.new:
            count = len(new.token_ids)
            self._tokens[new.slot, :count] = new.token_ids
            self._num_known[new.slot], self._num_blocks[new.slot] = count, 0
            self._adapters[new.slot] = new.adapter
            self._prompts.set_slot(new)
        if self._speculation is not None:
            self._speculation.take_new(step.new)
        return self._sampler.take_new(step.new)

    def _take_pages(self, step: StepInput) -> dict[str, StagedArray]:
        """The step's new pages, and their places in the flattened block tables."""
        places: list[int] = []
        pages: list[int] = []
        num_slots = len(self._num_blocks)
        for share in step.scheduled:
            first, count = int(self._num_blocks[share.slot]), len(share.new_pages[0])
            if count:
                for group, new_pages in enumerate(share.new_pages):
                    place = (group * num_slots + share.slot) * self._max_pages + first
                    places += range(place, place + count)
                    pages += new_pages
                self._num_blocks[share.slot] += count
        if not pages:
            return {}
        return {"new_page_places": np.array(places, np.int64), "new_pages": np.array(pages, np.int32)}

    def _place_changes(self, step: StepInput, staged: dict[str, torch.Tensor]) -> None:
        """Write new pages to the block tables, and new requests' parameters to their slots; do the page copies."""
        self._sampler.place_new(staged)
        if step.page_copies:
            counts = Counter(copy.group for copy in step.page_copies)
            self._forward.copy_pages(counts, staged["copied_pages"])
        if "new_pages" in staged:
            self._block_tables.view(-1)[staged["new_page_places"]] = staged["new_pages"]

    def _batches(
        self, step: StepInput, shape: StepShape, new: dict[str, StagedArray]
    ) -> tuple[list[AttentionBatch], dict[str, torch.Tensor]]:
        """The step's arrays, on the device: what attention sees, and ids, positions, rows by name.

        There is a batch for each cache group. Block tables stay on the device; a step brings its new pages alone.
        Padding to ``shape``: tokens are zeros, stored to the null page and never read; requests have as many tokens as
        all have, or none.
        """
        num_requests, new_pages = len(step.scheduled), self._take_pages(step)
        num_padding, queries = (shape.requests or num_requests) - num_requests, shape.queries or 0
        slots = np.array([s.slot for s in step.scheduled] + [self._padding_slot] * num_padding, np.int64)
        starts = np.array([s.start for s in step.scheduled] + [0 if queries else 1] * num_padding, np.int32)
        counts = np.array([s.count for s in step.scheduled] + [queries] * num_padding, np.int32)
        query_start = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        seq_lens = starts + counts
        token_slots = np.repeat(slots, counts)
        positions = np.arange(query_start[-1], dtype=np.int64) - np.repeat(query_start[:-1] - starts, counts)
        places = token_slots * self._tokens.shape[1] + positions  # a third of the time that two indices take
        behind = shape.tokens - positions.size
        arrays: dict[str, StagedArray] = new_pages | new | _copied(step.page_copies)
        arrays |= {
            "query_start": query_start,
            "seq_lens": seq_lens,
            "slots": slots.astype(np.int32),
            "table_rows": slots,
            "ids": _padded(self._tokens.reshape(-1).take(places).astype(np.int64), behind),
            "positions": _padded(positions, behind),
        }
        if shape.adapted:
            arrays["adapters"] = _padded(self._adapters[token_slots], behind, NO_ADAPTER.slot)
        arrays |= self._prompts.arrays(step.scheduled, query_start, self._tokens)
        samples = np.nonzero([s.samples for s in step.scheduled])[0]
        if samples.size:
            arrays |= {"sample_rows": (query_start[1:][samples] - 1).astype(np.int64), "sample_slots": slots[samples]}
            arrays |= {"sample_requests": samples}
        is_drawn = positions >= self._num_known[token_slots]
        if any(s.drafts for s in step.scheduled):
            drafts = draft_arrays(step.scheduled, query_start, slots)
            arrays |= drafts
            behind_draft = (
                drafts["sample_rows"][drafts["drafts"] != NO_DRAFT] + 1
            )  # one drafted ahead is put there later
            arrays["ids"][behind_draft] = drafts["drafts"][drafts["drafts"] != NO_DRAFT]
            is_drawn[behind_draft] = False
        slack = np.array([s.slack for s in step.scheduled] + [0] * num_padding, np.int32)
        if not (is_exact := not slack.any()):
            arrays["slack"] = slack
        if is_drawn.any():
            drawn = np.nonzero(is_drawn)[0]
            arrays |= {"gather_rows": drawn, "gather_slots": token_slots[drawn]}
        if padding := shape.tokens - int(query_start[num_requests]):
            self._padding_tokens.inc(padding)
        staged = self._staging.stage(arrays)
        if not is_exact:
            assert self._speculation is not None
            self._speculation.settle(staged)
        self._place_changes(step, staged)
        width = int(-(-seq_lens.max() // self._block_size))
        table_rows = staged["table_rows"]
        batches = [
            AttentionBatch(
                query_start=staged["query_start"],
                seq_lens=staged["seq_lens"],
                block_table=tables[table_rows, :width],
                slot_mapping=self._ops.slot_mapping(
                    staged["positions"],
                    staged["slots"],
                    staged["query_start"],
                    tables,
                    block_size=self._block_size,
                ),
                query_start_host=tuple(query_start.tolist()),
                seq_lens_host=tuple(seq_lens.tolist()),
                num_decodes=int((counts == 1).sum()),
                exact_lengths=is_exact,
            )
            for tables in self._block_tables
        ]
        return batches, staged


def _copied(copies: Sequence[PageCopy]) -> dict[str, StagedArray]:
    """The pages that are copied, and where to: [2, C], in order of their groups."""
    return {"copied_pages": np.array(copies, np.int64)[:, 1:].T} if copies else {}


def _padded(rows: npt.NDArray[Number], behind: int, value: int = 0) -> npt.NDArray[Number]:
    return np.pad(rows, (0, behind), constant_values=value) if behind else rows
