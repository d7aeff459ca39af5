"""The runner: one step on one device. It keeps requests in persistent slots and knows no policy.

``submit`` puts a step on the device and returns at once where the device is asynchronous; ``collect`` waits for the
sampled tokens, the one exchange between host and device that anybody waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.context import Context
from hardpoint.engine.logprobs import DeviceLogprobs, DevicePromptLogprobs, PromptScorer
from hardpoint.engine.sampler import Sampler, SamplingOps
from hardpoint.engine.staging import Staging
from hardpoint.engine.step import StepInput, StepOutput
from hardpoint_plugin_api import NULL_PAGE, AttentionBatch, AttentionMetadata, ForwardStep, Platform

Ints = npt.NDArray[np.int32]


class Model(Protocol):
    """What the runner runs: see CausalLM."""

    def __call__(self, ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T] -> hidden states [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        ...


@dataclass(frozen=True)
class Ticket:
    """A submitted step: its number and, on the device, the tokens it draws (int64 [N]) and what is asked about them."""

    number: int
    tokens: torch.Tensor
    logprobs: DeviceLogprobs | None
    prompt_logprobs: DevicePromptLogprobs | None


@dataclass(frozen=True)
class RunnerArgs:
    """What a runner is constructed with. ``caches`` holds each attention layer's cache views, in order.

    ``token_buckets`` are the sizes that a step's tokens are padded to; none means no padding.
    """

    ctx: Context
    platform: Platform
    model: Model
    sampling_ops: SamplingOps
    caches: list[dict[str, torch.Tensor]]
    num_slots: int
    max_step_tokens: int
    vocab_size: int
    token_buckets: tuple[int, ...] = ()


class Runner:
    """Runs the model over a step's tokens, then samples."""

    def __init__(self, args: RunnerArgs) -> None:
        ctx = args.ctx
        self._ctx, self._model, self._caches = ctx, args.model, args.caches
        self._device, self._block_size = ctx.torch_device, ctx.block_size
        self._layers = ctx.attention_layers.layers
        self._groups = ctx.attention_layers.groups()
        self._buckets = sorted(args.token_buckets)
        self._max_pages = -(-ctx.max_model_len // ctx.block_size)
        self._tokens: Ints = np.zeros((args.num_slots, ctx.max_model_len), np.int32)
        self._num_known: Ints = np.zeros(args.num_slots, np.int32)
        self._pages: Ints = np.full((args.num_slots, self._max_pages), NULL_PAGE, np.int32)
        self._num_pages: Ints = np.zeros(args.num_slots, np.int32)
        self._last_token = torch.zeros(args.num_slots, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(args.sampling_ops, args.num_slots, args.vocab_size, self._device)
        self._prompts = PromptScorer(args.sampling_ops.rank, args.model.logits, args.vocab_size)
        per_request = 4 + self._max_pages
        capacity = 7 * args.max_step_tokens + per_request * args.num_slots + 1
        self._staging = Staging(capacity, self._device, args.platform.pin)

    @torch.inference_mode()
    def submit(self, step: StepInput) -> Ticket:
        """Take the delta, run the model over the step's tokens, draw a token for each slot that samples."""
        hidden, rows = self.forward(step)
        prompts = self._prompts.score(step.scheduled, hidden, rows)
        shares = [s for s in step.scheduled if s.samples]
        if not shares:
            return Ticket(step.number, torch.empty(0, dtype=torch.int64, device=self._device), None, prompts)
        last, slots = rows["sample_rows"].long(), rows["sample_slots"].long()
        logits = self._model.logits(hidden[last])
        drawn = self._sampler.sample(logits, shares, slots, rows["positions"].long()[last] + 1)
        self._last_token[slots] = drawn.tokens
        return Ticket(step.number, drawn.tokens, drawn.logprobs, prompts)

    def forward(self, step: StepInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Take the delta and run the model; returns hidden states [T, hidden] and the step's arrays on the device."""
        self._take(step)
        batch, rows = self._batch(step)
        metadata: list[AttentionMetadata] = [AttentionMetadata(batch)] * len(self._layers)
        for group in self._groups:
            planned = self._layers[group[0]].backend.plan(batch)
            for index in group:
                metadata[index] = planned
        ids = rows["ids"].long()
        if "gather_rows" in rows:
            ids[rows["gather_rows"].long()] = self._last_token[rows["gather_slots"].long()]
        return self._model(ids, ForwardStep(rows["positions"].long(), self._caches, metadata)), rows

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the tokens of ``ticket``, and for what was asked about them."""
        logprobs = ticket.logprobs.to_host() if ticket.logprobs else ()
        prompts = ticket.prompt_logprobs.to_host() if ticket.prompt_logprobs else ()
        return StepOutput(ticket.number, tuple(ticket.tokens.tolist()), logprobs, prompts)

    def _take(self, step: StepInput) -> None:
        """Apply the delta: give slots up, fill new ones, append pages."""
        for slot in step.freed:
            self._pages[slot] = NULL_PAGE
        for new in step.new:
            count = len(new.token_ids)
            self._tokens[new.slot, :count] = new.token_ids
            self._num_known[new.slot], self._num_pages[new.slot] = count, 0
            self._sampler.set_slot(new)
            self._prompts.set_slot(new)
        for share in step.scheduled:
            held = self._num_pages[share.slot]
            self._pages[share.slot, held : held + len(share.new_pages)] = share.new_pages
            self._num_pages[share.slot] += len(share.new_pages)

    def _padded(self, rows: Ints) -> Ints:
        """Pad one value per token up to the platform's next bucket; zeros store to the null page and are never read."""
        size = next((bucket for bucket in self._buckets if bucket >= rows.size), rows.size)
        return rows if size == rows.size else np.pad(rows, (0, size - rows.size))

    def _batch(self, step: StepInput) -> tuple[AttentionBatch, dict[str, torch.Tensor]]:
        """The step's arrays, on the device: the batch as attention sees it, and ids, positions and rows by name."""
        slots = np.array([s.slot for s in step.scheduled], np.int32)
        starts = np.array([s.start for s in step.scheduled], np.int32)
        counts = np.array([s.count for s in step.scheduled], np.int32)
        query_start = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
        seq_lens = starts + counts
        token_slots = np.repeat(slots, counts)
        positions = np.arange(query_start[-1], dtype=np.int32) - np.repeat(query_start[:-1] - starts, counts)
        pages = self._pages[token_slots, positions // self._block_size]
        width = int(-(-seq_lens.max() // self._block_size))
        arrays: dict[str, Ints] = {
            "query_start": query_start,
            "seq_lens": seq_lens,
            "block_table": self._pages[slots, :width],
            "slot_mapping": self._padded(pages * np.int32(self._block_size) + positions % np.int32(self._block_size)),
            "ids": self._padded(self._tokens[token_slots, positions]),
            "positions": self._padded(positions),
        }
        arrays |= self._prompts.arrays(step.scheduled, query_start, self._tokens)
        samples = np.array([s.samples for s in step.scheduled])
        if samples.any():
            arrays |= {"sample_rows": query_start[1:][samples] - 1, "sample_slots": slots[samples]}
        drawn = np.nonzero(positions >= self._num_known[token_slots])[0].astype(np.int32)
        if drawn.size:
            arrays |= {"gather_rows": drawn, "gather_slots": token_slots[drawn]}
        staged = self._staging.stage(arrays)
        batch = AttentionBatch(
            query_start=staged["query_start"],
            seq_lens=staged["seq_lens"],
            block_table=staged["block_table"],
            slot_mapping=staged["slot_mapping"],
            query_start_host=tuple(query_start.tolist()),
            seq_lens_host=tuple(seq_lens.tolist()),
            num_decodes=int((counts == 1).sum()),
        )
        return batch, staged
