"""Beam search over an LLM: the likeliest continuations, found a token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hardpoint.engine.frontend.prompts import Prompt, TokenizedPrompt
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint_plugin_api import RequestError

_MOST = 100.0
"""The largest length penalty: powers of long sequences stay numbers."""

if TYPE_CHECKING:
    from hardpoint.engine.llm import LLM


@dataclass(frozen=True)
class BeamSearchParams:
    """``beam_width`` sequences are kept, each of up to ``max_tokens`` tokens. Names are vLLM's.

    A finished sequence's score is its log-probability over ``length ** length_penalty``, with the prompt's tokens in
    the length and without the end token. ``ignore_eos``: the end token does not end a sequence.

    Raises RequestError for numbers below 1.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} must be at least 1, got {value!r}")
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not -_MOST <= penalty <= _MOST:
            raise RequestError(f"length_penalty must be a number from {-_MOST:g} to {_MOST:g}, got {penalty!r:.80}")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r:.80}")

    def score(self, beam: BeamSearchSequence) -> float:
        """The score of a sequence, by which the best are returned."""
        length = max(1, len(beam.tokens) - beam.has_ended)
        return beam.cum_logprob / math.pow(length, self.length_penalty)


@dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence: ``tokens`` begin with the prompt's, ``text`` is that of the others. ``cum_logprob`` is theirs."""

    tokens: tuple[int, ...]
    cum_logprob: float = 0.0
    text: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(llm: LLM, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Search for each of ``prompts``. Each step asks for ``2 * beam_width`` log-probabilities of every beam.

    The prefix cache has what beams share, so that a step computes one token of each.
    """
    tokenizer = llm.tokenizer
    ends = llm.eos_token_ids
    most = llm.client.facts.vocab_size // 2
    if params.beam_width > most:
        raise RequestError(f"beam_width must be at most {most}, half of the vocabulary, got {params.beam_width}")
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True)
    prompt_ids = [TokenizedPrompt.read(prompt, tokenizer).token_ids for prompt in prompts]
    beams = [[BeamSearchSequence(ids)] for ids in prompt_ids]
    ended: list[list[BeamSearchSequence]] = [[] for _ in prompts]
    full: list[list[BeamSearchSequence]] = [[] for _ in prompts]  # as long as any sequence may be
    for _ in range(params.max_tokens):
        for number, each in enumerate(beams):
            if (
                each
                and len(each[0].tokens) > len(prompt_ids[number])
                and len(each[0].tokens) >= llm.client.facts.max_model_len
            ):
                full[number], beams[number] = each, []
        flat = [beam for each in beams for beam in each]
        if not flat:
            break
        outputs = iter(llm.generate([{"prompt_token_ids": list(beam.tokens)} for beam in flat], one, use_tqdm=False))
        for number, each in enumerate(beams):
            grown = []
            for beam in each:
                (scores,) = next(outputs).outputs[0].logprobs or ({},)
                for token, score in scores.items():
                    has_ended = token in ends and not params.ignore_eos
                    tokens = (*beam.tokens, token)
                    grown.append(BeamSearchSequence(tokens, beam.cum_logprob + score.logprob, has_ended=has_ended))
            ended[number] += [beam for beam in grown if beam.has_ended]
            going_on = sorted((beam for beam in grown if not beam.has_ended), key=lambda beam: -beam.cum_logprob)
            beams[number] = going_on[: params.beam_width]

    found = []
    for ids, going_on, long, over in zip(prompt_ids, beams, full, ended, strict=True):
        best = sorted([*over, *long, *going_on], key=params.score, reverse=True)[: params.beam_width]
        found.append(BeamSearchOutput([_with_text(beam, tokenizer.decode(beam.tokens[len(ids) :])) for beam in best]))
    return found


def _with_text(beam: BeamSearchSequence, text: str) -> BeamSearchSequence:
    return BeamSearchSequence(beam.tokens, beam.cum_logprob, text, beam.has_ended)
