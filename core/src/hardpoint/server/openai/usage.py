"""Usage as OpenAI's completion endpoints write it."""

from __future__ import annotations

from typing import Any

from hardpoint.server.generation import Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    """The tokens of one request."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
