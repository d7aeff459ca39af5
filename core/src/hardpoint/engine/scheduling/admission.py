"""Letting requests in: what is checked of them, and what is filled in, before a core queues them."""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Unpack

import numpy as np

from hardpoint.engine.client import RequestOptions
from hardpoint.engine.lora import Adapter, check_loaded
from hardpoint.engine.requests import AdmittedRequest
from hardpoint.engine.sampling_params import SamplingParams
from hardpoint_plugin_api import EngineError, MemoryTag, RequestError


class ContextLengthError(RequestError):
    """A prompt leaves no room for an output within ``max_model_len`` tokens. In OpenAI's words, which clients look for.

    ``num_tokens`` None: nobody counted all tokens of the prompt.
    """

    def __init__(self, num_tokens: int | None, max_model_len: int) -> None:
        size = f"{max_model_len} or more" if num_tokens is None else num_tokens
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {size} "
            "tokens, and one more is needed for the output. Please reduce the length of the prompt."
        )
        self.num_tokens, self.max_model_len = num_tokens, max_model_len

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_tokens, self.max_model_len)


class Admission:
    """Makes requests that a core takes as they are. Several threads may call it.

    A core in this process and the mirror of one elsewhere both let requests in through this, so that what is wrong with
    a request is said where it was made.
    """

    def __init__(self, max_model_len: int, vocab_size: int, seed: int) -> None:
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.adapters: tuple[Adapter, ...] = ()
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()

    def renumbered(self, asked: AdmittedRequest) -> AdmittedRequest:
        """``asked``, which was admitted elsewhere, with a number of this sequence: the newest request."""
        return replace(asked, number=next(self._numbers))

    def draw_seed(self) -> int:
        """A seed for a request that gives none; the engine's own seed makes the sequence of them repeatable."""
        return self._seeds.getrandbits(62)

    def check_awake(self) -> None:
        """Raise EngineError while memory that requests need is given back."""
        if self.asleep:
            raise EngineError(f"the engine sleeps, without its {', '.join(sorted(self.asleep))}; wake it up first")

    def admit(
        self,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        bad_words: Sequence[Sequence[int]] = (),
        **options: Unpack[RequestOptions],
    ) -> AdmittedRequest:
        """Make a request for one completion; see CoreClient.add_request.

        Raises RequestError for an empty or too long prompt, an id outside the vocabulary, parameters that exclude every
        token, or an adapter that is not loaded; EngineError while the engine sleeps.
        """
        self.check_awake()
        assert params.n == 1, "several completions are several requests: see Conversation"
        prompt = tuple(prompt_token_ids)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(len(prompt), self.max_model_len)
        prompt_array = self._in_vocabulary(prompt)
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_token_ids)
        most = self.max_model_len
        if params.max_tokens is not None:
            most = min(most, len(prompt) + params.max_tokens)
        words = tuple(tuple(word) for word in bad_words)
        params.check_vocabulary(self.vocab_size, words)
        _check_choice(params, stops, words)
        timeout, priority = options.get("timeout"), options.get("priority", 0)
        _check_options(timeout, priority)
        adapter = options.get("adapter", "")
        check_loaded(adapter, [loaded.name for loaded in self.adapters])
        return AdmittedRequest(
            next(self._numbers),
            prompt,
            params,
            self.draw_seed() if params.seed is None else params.seed,
            stops,
            most,
            priority=priority,
            deadline=None if timeout is None else time.monotonic() + timeout,
            cache_salt=_checked_salt(options.get("cache_salt", "")),
            bad_words=words,
            prompt_array=prompt_array,
            adapter_name=adapter,
            data_parallel_rank=options.get("data_parallel_rank"),
        )

    def _in_vocabulary(self, prompt: tuple[int, ...]) -> array[int]:
        """The ids of ``prompt``, which is not empty, as int32. Raises RequestError for one outside the vocabulary."""
        try:
            ids = array("i", prompt)
            values = np.frombuffer(ids, np.int32)  # a fifth of the time that Python's min and max take
            lowest, highest = int(values.min()), int(values.max())
        except OverflowError:
            lowest, highest = min(prompt), max(prompt)
        if 0 <= lowest <= highest < self.vocab_size:
            return ids
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"token id {wrong} is outside the model's vocabulary of {self.vocab_size}; "
            "where text was sent, the tokenizer is another model's"
        )


def _check_choice(params: SamplingParams, stops: frozenset[int], bad_words: Sequence[Sequence[int]]) -> None:
    """Raise RequestError where no token is left to be drawn first."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids)
    if params.min_tokens:
        left -= stops
    left -= {word[0] for word in bad_words if len(word) == 1}
    if not left:
        raise RequestError(
            "every one of allowed_token_ids is excluded, by bad_words or because min_tokens allows no end so soon; "
            "allow another token"
        )


def _check_options(timeout: object, priority: object) -> None:
    if timeout is not None and not (isinstance(timeout, Real) and float(timeout) >= 0):
        raise RequestError(f"timeout must be seconds, 0 or more, or None, got {timeout!r:.80}")
    if not isinstance(priority, Integral):
        raise RequestError(f"priority must be a whole number, got {priority!r:.80}")


def _checked_salt(salt: object) -> str:
    """The salt of a request's cached prefix. Raises RequestError for what cannot be hashed."""
    try:
        if isinstance(salt, str) and salt.encode() is not None:
            return salt
    except UnicodeEncodeError:
        pass
    raise RequestError(f"cache_salt must be a text that UTF-8 can hold, got {salt!a:.80}")
