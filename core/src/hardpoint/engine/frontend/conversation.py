"""One prompt as its user sees it: its requests, and the texts and log-probabilities that come of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar, Unpack

from hardpoint.engine.client import CoreClient, RequestOptions
from hardpoint.engine.frontend.prompts import TokenizedPrompt
from hardpoint.engine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput, RequestOutputKind
from hardpoint.engine.requests import RequestProgress
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint.engine.scheduling.step import TokenLogprobs
from hardpoint.startup_times import mark
from hardpoint.tokenizer import Detokenizer, Tokenizer

T = TypeVar("T")


@dataclass
class _Completion:
    """A request with what comes of it: ``num_tokens`` so far, of which ``output`` has those that ``take`` did not."""

    request: RequestProgress
    output: CompletionOutput
    detokenizer: Detokenizer
    num_tokens: int = 0
    has_ended: bool = False
    is_enough: bool = False


class Conversation:
    """A prompt with ``params.n`` completions, each a request of its own with a seed of its own."""

    def __init__(
        self,
        core: CoreClient,
        tokenizer: Tokenizer,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        request_id: str | None = None,
        seed: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue the requests of ``prompt``; its output carries ``request_id``, or the first request's number.

        Without ``seed`` that of ``params`` counts, or else one is drawn.

        Raises RequestError, CapacityError or EngineDeadError, with none of them queued.
        """
        self._core, self._tokenizer, self._began = core, tokenizer, time.perf_counter()
        self._admitted = time.monotonic()  # the clock that cores in other processes share
        self.kind = params.output_kind
        bad_words = bad_word_sequences(tokenizer, params.bad_words or ())
        if seed is None:
            seed = core.draw_seed() if params.seed is None else params.seed
        self._completions: dict[RequestProgress, _Completion] = {}
        for index in range(params.n):
            own = params.of_completion(index, seed)
            try:
                request = core.add_request(prompt.token_ids, own, eos_token_ids, bad_words=bad_words, **options)
            except BaseException:  # an interrupt, too
                for queued in self._completions:
                    core.abort(queued)
                raise
            output = CompletionOutput(index, "", [], logprobs=None if params.logprobs is None else [])
            detokenizer = Detokenizer(
                tokenizer,
                stop=params.stop_texts,
                prompt_ids=prompt.token_ids,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            self._completions[request] = _Completion(request, output, detokenizer)
        outputs = [completion.output for completion in self._completions.values()]
        request_id = str(self.requests[0].number) if request_id is None else request_id
        self.output = RequestOutput(request_id, prompt.text, list(prompt.token_ids), outputs, finished=False)

    @property
    def requests(self) -> list[RequestProgress]:
        """One for each completion, in order."""
        return list(self._completions)

    def take(self) -> RequestOutput:
        """An output of ``kind`` for the stream's reader, which later tokens leave alone.

        Parts that were taken are gone from ``output``; outputs that hold everything are copies.
        """
        taken = _copied(self.output)
        taken.metrics = _copied(taken.metrics)
        if self.kind is RequestOutputKind.DELTA:
            grown = [c for c in self._completions.values() if c.output.token_ids or c.output.finish_reason is not None]
            taken.outputs = [completion.output for completion in grown]
            for completion in grown:
                completion.output = self._next_part(completion)
            return taken
        taken.outputs = [_copied(output) for output in taken.outputs]
        for output in taken.outputs:
            output.token_ids, output.text_ends = list(output.token_ids), list(output.text_ends)
            output.logprobs = None if output.logprobs is None else list(output.logprobs)
        return taken

    def _next_part(self, completion: _Completion) -> CompletionOutput:
        last = completion.output
        return CompletionOutput(
            last.index,
            "",
            [],
            cumulative_logprob=last.cumulative_logprob,
            logprobs=None if last.logprobs is None else [],
            start=completion.detokenizer.num_chars,
        )

    def abort(self) -> None:
        """End what has not ended."""
        for request in self._completions:
            self._core.abort(request)

    def stop(self, index: int) -> None:
        """End a completion as one that has come to its own end. May be called in any thread."""
        completion = list(self._completions.values())[index]
        completion.is_enough = True
        self._core.abort(completion.request)

    def advance(self, request: RequestProgress) -> bool:
        """Take what ``request`` has got since the last time into ``output``; False where a reader need not know."""
        completion = self._completions[request]
        if completion.has_ended:
            return False
        metrics, elapsed = self.output.metrics, time.perf_counter() - self._began
        drew = len(request.token_ids) > request.num_prompt_tokens
        if drew and metrics.first_token is None:
            metrics.first_token = elapsed
            starts = [each.started for each in self._completions if each.started is not None]
            metrics.started = min(starts) - self._admitted if starts else None
            self.output.num_cached_tokens = request.num_cached_tokens
            mark("first token")
        if drew and request.prompt_logprobs and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [
                None if scores is None else self._logprobs(scores) for scores in request.prompt_logprobs
            ]
        self._take_tokens(completion)
        if all(each.has_ended for each in self._completions.values()):
            self.output.finished, metrics.finished = True, elapsed
            metrics.num_preemptions = sum(r.num_preemptions for r in self._completions)
        return self.output.finished or self.kind is not RequestOutputKind.FINAL_ONLY

    def _take_tokens(self, completion: _Completion) -> None:
        """Take the tokens up to the one that completes a stop text: others may have come after it."""
        request, output, detokenizer = completion.request, completion.output, completion.detokenizer
        known = completion.num_tokens
        fresh = request.token_ids[request.num_prompt_tokens + known :]
        ended = request.finish_reason
        pieces = []
        for index, token in enumerate(fresh):
            completion.num_tokens += 1
            output.token_ids.append(token)
            is_stop = ended == "stop" and request.stop_reason is not None and index == len(fresh) - 1
            if not is_stop:  # a stop token is no text; a structure that is complete ends with one that is
                pieces.append(detokenizer.add([token]))
            output.text_ends.append(detokenizer.num_chars)
            if detokenizer.stop_text is not None:
                break
        else:
            if ended is not None:
                pieces.append(detokenizer.flush())
        output.text += "".join(pieces)
        if output.logprobs is not None:
            scores = request.logprobs[known : completion.num_tokens]
            output.logprobs += map(self._logprobs, scores)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(s.logprobs[0] for s in scores)
        completion.has_ended = detokenizer.stop_text is not None or ended is not None
        if detokenizer.stop_text is not None:
            self._core.abort(request)
            output.finish_reason, output.stop_reason = "stop", detokenizer.stop_text
        elif ended is not None:
            output.finish_reason = "stop" if ended == "abort" and completion.is_enough else ended
            by_user = request.stop_reason in ("deadline", *(request.asked.params.stop_token_ids or ()))
            output.stop_reason = request.stop_reason if by_user else None
            output.routed_experts = request.routed_experts

    def _logprobs(self, scores: TokenLogprobs) -> PositionLogprobs:
        columns = zip(scores.token_ids, scores.logprobs, scores.ranks, strict=True)
        return {
            token: Logprob(logprob, rank, self._tokenizer.decode([token], skip_special_tokens=False))
            for token, logprob, rank in columns
        }


def _copied(value: T) -> T:
    """A shallow copy of a dataclass. ``copy.copy`` takes four times as long, and this runs for every token."""
    made = object.__new__(type(value))
    made.__dict__ |= value.__dict__
    return made


def bad_word_sequences(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token sequences of ``words``: each at the start of a text and behind a space, where tokens tell them apart.

    Raises RequestError for a word that is no valid Unicode.
    """
    sequences = []
    for word in words:
        first, inner = (tokenizer.encode(space + word.lstrip(" "), add_special_tokens=False) for space in ("", " "))
        sequences.append(first)
        if inner[-len(first) :] != first:
            sequences.append(inner)
    return [sequence for sequence in sequences if sequence]
