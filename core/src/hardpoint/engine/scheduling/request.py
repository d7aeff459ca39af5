"""One request on its way through the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from hardpoint.engine.lora import NO_ADAPTER, Adapter
from hardpoint.engine.requests import Delta, RequestProgress
from hardpoint.engine.scheduling.block_pool import BlockHash, hash_block, hash_salt
from hardpoint.engine.scheduling.paged_cache import HeldPages
from hardpoint.engine.scheduling.step import PromptLogprobs, SlotSampling
from hardpoint.structured import StructureState


@dataclass(eq=False)
class Request(RequestProgress):
    """A core's own record of a request: beside what came of it, how many of its tokens are in the cache, and where.

    ``num_computed`` counts tokens whose keys and values are stored once the submitted steps are done; ``num_sampled``
    counts tokens drawn, their values included as soon as they are committed to ``token_ids``. ``num_in_flight`` counts
    submitted steps that use its pages. A request has a ``slot`` and ``held`` pages exactly while it runs. While a step
    verifies drafts, both counts stand as if all of them were right; committing the step settles them. ``num_unsettled``
    counts such drafts. ``drafts`` may follow its newest known token; ``num_proposed`` counts those that the newest
    committed step proposed for it.

    ``last_held`` are the pages that it gave up when it stopped running. Where a step in flight ends it, they keep its
    content until the next step is scheduled.

    ``structure`` follows its output where its parameters constrain that; ``adapter`` is the loaded LoRA adapter that it
    asks for. The core sets both.
    """

    num_sampled: int = 0
    num_computed: int = 0
    drafts: tuple[int, ...] = ()
    num_proposed: int = 0
    num_unsettled: int = 0
    num_in_flight: int = 0
    held: HeldPages | None = None
    slot: int | None = None
    last_held: HeldPages | None = None
    structure: StructureState | None = None
    adapter: Adapter = NO_ADAPTER
    _hashes: list[BlockHash] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        """Go on from what another core made of the request."""
        super().take(delta)
        self.num_sampled += len(delta.token_ids)

    @property
    def precedence(self) -> tuple[int, int]:
        """Its place among requests: lower comes first, and is preempted last."""
        return self.asked.priority, self.asked.number

    @property
    def num_tokens(self) -> int:
        """Prompt and drawn tokens, whether their values are known yet or not."""
        return self.num_prompt_tokens + self.num_sampled

    @property
    def num_to_compute(self) -> int:
        """Tokens yet to run: one while decoding, more while the prompt is read, none once all are drawn."""
        num_tokens = self.num_prompt_tokens + self.num_sampled  # num_tokens without a call, for every decode
        return 0 if num_tokens >= self.asked.max_total_tokens else num_tokens - self.num_computed

    @property
    def known_ids(self) -> array[int]:
        """All its known tokens as int32; not to be changed."""
        prompt = self.asked.prompt_array
        if prompt is not None and len(self.token_ids) == len(prompt):
            return prompt
        return array("i", self.token_ids)

    def next_allowed(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        """Which tokens may be drawn next, and behind each of ``drafts`` up to the first that may not be drawn itself:
        see ScheduledRequest. Empty where all may."""
        if self.structure is None:
            return ()
        assert self.num_tokens == len(self.token_ids), "what may follow a token depends on its value"
        return self.structure.allowed_ahead(drafts)

    @property
    def slot_sampling(self) -> SlotSampling:
        """Its parameters as the runner takes them: numbers of other libraries become plain ones."""
        asked, p = self.asked, self.asked.params
        return SlotSampling(
            temperature=0.0 if p.is_greedy else float(p.temperature),
            top_k=max(0, int(p.top_k)),
            top_p=float(p.top_p),
            min_p=float(p.min_p),
            seed=int(asked.seed),
            repetition_penalty=float(p.repetition_penalty),
            presence_penalty=float(p.presence_penalty),
            frequency_penalty=float(p.frequency_penalty),
            logit_bias=tuple((int(token), float(bias)) for token, bias in (p.logit_bias or {}).items()),
            bad_words=asked.bad_words,
            allowed_token_ids=None if p.allowed_token_ids is None else tuple(map(int, p.allowed_token_ids)),
            min_tokens=int(p.min_tokens),
            stop_token_ids=tuple(map(int, asked.stop_token_ids)) if p.min_tokens else (),
            logprobs=p.logprobs,
            prompt_logprobs=p.prompt_logprobs,
        )

    def take_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Take what a step read of the prompt; what is read again after a preemption replaces what was there."""
        self.prompt_logprobs[chunk.start : chunk.start + len(chunk.tokens)] = chunk.tokens

    def block_hashes(self, block_size: int, num_blocks: int) -> Iterator[BlockHash]:
        """The hashes of its first ``num_blocks`` blocks, all of whose tokens must be known; made as they are asked for,
        and then kept."""
        for block in range(num_blocks):
            if block == len(self._hashes):
                parent = self._hashes[-1] if self._hashes else hash_salt(self.asked.cache_salt, self.adapter.number)
                start = block * block_size
                self._hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
            yield self._hashes[block]
