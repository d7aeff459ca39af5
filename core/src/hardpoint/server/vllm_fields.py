"""Fields of vLLM's requests without a counterpart: they are ignored, and the log says why, or what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_NO_MEDIA = "images and audio are not read"
_ONE_ENGINE = "prefill and decode run in one engine"
_CACHED = "prefixes are cached by themselves"
_EARLIER = "send earlier turns as input, or previous_response_id"
_BEAMS = "LLM.beam_search searches by beams"

ANSWERS: Mapping[str, str] = {
    "chat_template": "the server has one template; use --chat-template FILE",
    "early_stopping": _BEAMS,
    "ec_transfer_params": _ONE_ENGINE,
    "echo": "the text of the last message is the client's own; continue_final_message continues it",
    "enable_response_messages": _EARLIER,
    "include_reasoning": "reasoning is an output item of its own",
    "kv_transfer_params": _ONE_ENGINE,
    "length_penalty": _BEAMS,
    "logprob_token_ids": "ask for the likeliest tokens, or allow some tokens alone (allowed_token_ids)",
    "media_io_kwargs": _NO_MEDIA,
    "mm_payload": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "previous_input_messages": _EARLIER,
    "prompt_cache_options": _CACHED,
    "prompt_cache_retention": _CACHED,
    "prompt_embeds": "prompts are texts or token ids",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "request_id": "send the header x-request-id",
    "return_mm_kwargs": _NO_MEDIA,
    "return_token_offsets": "/tokenize gives the tokens of a text",
    "return_weight_versions": "weights have no versions",
    "routed_experts_prompt_start": "routed experts are those of all tokens, the prompt's included",
    "session_id": "requests with a common prefix find it in the cache without a session",
    "spaces_between_special_tokens": "the tokenizer decides about spaces",
    "stream_interval": "tokens are sent as they come, and waiting tokens together",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "use_beam_search": _BEAMS,
    "vllm_xargs": "plugins have flags of their own",
    "watermarking": "outputs carry no watermark",
}
"""By the field's name, for every endpoint of OpenAI's protocol that does not have the field itself. As of vLLM 0.33."""
