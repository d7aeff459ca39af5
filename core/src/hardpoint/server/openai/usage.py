"""Usage as OpenAI's completion endpoints write it."""

from __future__ import annotations

from typing import Any

from hardpoint.server.fields import StreamOptions
from hardpoint.server.generation import Usage


def usage_wishes(options: StreamOptions | None) -> tuple[bool, bool]:
    """Whether a stream's last event has the usage, and whether each event has the usage so far."""
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)


def usage_body(usage: Usage) -> dict[str, Any]:
    """The tokens of one request."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
