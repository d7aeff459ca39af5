"""One request on its way through the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from hardpoint.engine.outputs import FinishReason
from hardpoint.engine.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """Tokens so far, how many of them are in the cache, and where.

    ``num_computed`` counts tokens whose keys and values are stored once the submitted steps are done; ``num_sampled``
    counts tokens drawn, their values included as soon as they are committed to ``token_ids``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    token_ids: list[int] = field(init=False)
    num_sampled: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and drawn tokens, whether their values are known yet or not."""
        return len(self.prompt_token_ids) + self.num_sampled

    @property
    def num_to_compute(self) -> int:
        """Tokens that are not in the cache: one while decoding, more while the prompt is read."""
        return self.num_tokens - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens drawn so far."""
        return self.token_ids[len(self.prompt_token_ids) :]
