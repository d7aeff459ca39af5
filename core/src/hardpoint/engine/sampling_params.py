"""How the tokens of one request are chosen, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint_plugin_api import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """Names and defaults are those that users of vLLM know.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1), ``top_p`` 1 and ``min_p`` 0 switch a truncation off. ``seed``
    makes a request repeatable whatever else is in the batch; without one the engine draws it. ``stop`` texts end the
    output and are not part of it unless ``include_stop_str_in_output``; ``stop_token_ids`` end it too.
    ``max_tokens`` None means as far as the context reaches. Raises RequestError for values out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check(self.temperature >= 0, "temperature", "0 or more (0 is greedy)")
        self._check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._check(self.top_k >= -1, "top_k", "a positive number, or 0 or -1 for all")
        self._check(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        self._check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1, or None")
        self._check(self.seed is None or 0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1, or None")
        self._check(all(self.stop_texts), "stop", "texts that are not empty")

    def _check(self, good: bool, name: str, valid: str) -> None:
        if not good:
            raise RequestError(f"{name} must be {valid}, got {getattr(self, name)!r}")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature == 0
