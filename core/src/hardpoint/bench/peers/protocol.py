"""The protocol of workers: one JSON object a line on stdin, one on stdout. Only the standard library, as workers run in
other engines' environments, by path.

Requests: ``{"do": "load", "model": ..., "threads": ..., "options": {...}}``, ``{"do": "run", "prompts": [[...]],
"max_tokens": N}`` (greedy, no end of sequence), ``{"do": "logprobs", "prompt": [...], "top": N}``. Answers: seconds, or
the likeliest next tokens with their log-probabilities; ``{"error": ...}`` where something failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Worker(ABC):
    """One engine in this process."""

    @abstractmethod
    def load(self, model: str, threads: int, options: dict[str, Any]) -> None:
        """Load the checkpoint in ``model``, a folder; use so many threads."""

    @abstractmethod
    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Complete all prompts at once by exactly ``max_tokens`` greedy tokens each."""

    @abstractmethod
    def logprobs(self, prompt: Sequence[int], top: int) -> dict[int, float]:
        """The ``top`` likeliest next tokens with their natural log-probabilities."""

    def version(self) -> str:
        """The measured values."""
        return ""


def serve(worker: Worker) -> None:
    """Answer requests until stdin ends. Output of the engine goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _answer(worker, json.loads(line))
        except Exception as error:  # whatever an engine raises is its result
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    if request["do"] == "load":
        worker.load(request["model"], request["threads"], request["options"])
        return {"seconds": time.perf_counter() - began, "version": worker.version()}
    if request["do"] == "run":
        worker.run(request["prompts"], request["max_tokens"])
        return {"seconds": time.perf_counter() - began}
    return {"logprobs": list(worker.logprobs(request["prompt"], request["top"]).items())}
