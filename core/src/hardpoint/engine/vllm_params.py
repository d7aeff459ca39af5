"""Sampling parameters of vLLM that ours do not have: another name, no effect, or refused."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from hardpoint_plugin_api import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NO_CODE = "no code of a request runs in the engine; a plugin can replace an op on logits (docs/write_a_plugin.md)"
_BEAMS = "use LLM.beam_search"


@dataclass(frozen=True)
class VllmParam:
    """One parameter. ``default`` is vLLM's, which is accepted silently. Another value is refused with ``answer``; where
    the parameter ``is_harmless``, the value is ignored, and the answer logged once."""

    default: object
    answer: str
    is_harmless: bool = False


RENAMED: Mapping[str, str] = {"guided_decoding": "structured_outputs"}
"""Names of older versions of vLLM, and ours."""

NONE_BY_DEFAULT = frozenset({"truncation_side"})
"""Names that are ours, too, whose default is None in vLLM."""

VLLM_PARAMS: Mapping[str, VllmParam] = {
    "best_of": VllmParam(1, "ask for n completions, and choose by their log-probabilities"),
    "detokenize": VllmParam(True, "texts are made all the same", is_harmless=True),
    "early_stopping": VllmParam(False, _BEAMS),
    "extra_args": VllmParam(None, _NO_CODE),
    "flat_logprobs": VllmParam(False, "log-probabilities have one form", is_harmless=True),
    "length_penalty": VllmParam(1.0, _BEAMS),
    "logits_processors": VllmParam(None, _NO_CODE),
    "logprob_token_ids": VllmParam(None, "ask for logprobs=-1, or allow some tokens alone (allowed_token_ids)"),
    "prompt_logprob_start": VllmParam(None, "prompt_logprobs are those of the whole prompt"),
    "prompt_logprob_token_ids": VllmParam(None, "ask for prompt_logprobs=-1"),
    "repetition_detection": VllmParam(None, "use repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": VllmParam(0, "routed experts are those of all tokens, the prompt's included"),
    "skip_clone": VllmParam(False, "parameters never change", is_harmless=True),
    "skip_reading_prefix_cache": VllmParam(None, "give the prompt a cache_salt of its own"),
    "spaces_between_special_tokens": VllmParam(True, "the tokenizer decides about spaces", is_harmless=True),
    "stream_interval": VllmParam(None, "a stream yields tokens as they come", is_harmless=True),
    "thinking_token_budget": VllmParam(None, "max_tokens limits reasoning and answer together"),
    "trace_decode_token_ids": VllmParam(None, "score a given text by prompt_logprobs"),
    "use_beam_search": VllmParam(False, _BEAMS),
    "watermarking": VllmParam(None, "outputs carry no watermark"),
}
"""By name, as of vLLM 0.33 and before."""


def takes_vllm_names(params: type[T]) -> type[T]:
    """Have the class ``params`` answer the keywords of VLLM_PARAMS, and take those of RENAMED and NONE_BY_DEFAULT."""
    init: Callable[..., None] = params.__init__

    @functools.wraps(init)
    def answering(self: T, *args: Any, **given: Any) -> None:
        if not given.keys().isdisjoint(_ALL):
            given = _by_our_names(given)
        init(self, *args, **given)

    params.__init__ = answering  # type: ignore[assignment]  # a wrapper with the same signature
    return params


_ALL = RENAMED.keys() | VLLM_PARAMS.keys() | NONE_BY_DEFAULT


def _by_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` by our names. Raises RequestError for a parameter that is refused, or given by two names."""
    ours = {name: value for name, value in given.items() if name not in _ALL}
    for name, value in given.items():
        if name in RENAMED:
            if value is None:
                continue
            if given.get(RENAMED[name]) is not None:
                raise RequestError(f"{name} and {RENAMED[name]} are the same; give one")
            ours[RENAMED[name]] = value
        elif name in NONE_BY_DEFAULT:
            ours |= {} if value is None else {name: value}
        elif name in VLLM_PARAMS and _asks_for_something(value, VLLM_PARAMS[name].default):
            known = VLLM_PARAMS[name]
            if not known.is_harmless:
                raise RequestError(f"{name} has no counterpart: {known.answer}")
            _log_once(name)
    return ours


def _asks_for_something(value: object, default: object) -> bool:
    if isinstance(value, Sized):
        return len(value) > 0
    return value is not None and value != default and not (value is False and default is None)


@functools.cache
def _log_once(name: str) -> None:
    logger.warning("%s has no effect: %s", name, VLLM_PARAMS[name].answer)
