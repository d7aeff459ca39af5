"""The news of requests, as a core reports them after each step: most are one token each, and travel as two numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from hardpoint.engine.requests import Delta, RequestProgress


@dataclass(frozen=True)
class News:
    """The news of several requests, of each once: ``deltas``; and ``numbers`` of the requests that got one token and
    nothing else, with these tokens in the same order."""

    deltas: tuple[Delta, ...] = ()
    numbers: array[int] = field(default_factory=lambda: array("q"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))

    def apply(self, requests: dict[int, RequestProgress]) -> list[RequestProgress]:
        """Bring ``requests``, by number, up to this; drop those that have ended. Returns the ones that changed."""
        changed = []
        for delta in self.deltas:
            request = requests[delta.number]
            request.take(delta)
            if request.finish_reason is not None:
                del requests[delta.number]
            changed.append(request)
        for number, token_id in zip(self.numbers, self.token_ids, strict=True):
            request = requests[number]
            request.token_ids.append(token_id)
            changed.append(request)
        return changed


@dataclass(eq=False)
class Reported:
    """A request, its ``number`` at the front end, and the part of its progress that the front end knows.

    ``num_preemptions`` is -1 until anything was reported.
    """

    request: RequestProgress
    number: int
    num_tokens: int
    num_preemptions: int = -1


def collect_news(requests: Iterable[Reported]) -> News:
    """The news of ``requests``, which count as reported then."""
    deltas: list[Delta] = []
    news = News()
    for known in requests:
        request = known.request
        num_tokens = len(request.token_ids)
        if (
            num_tokens == known.num_tokens + 1
            and known.num_preemptions == request.num_preemptions
            and request.finish_reason is None
            and not request.logprobs
        ):
            news.numbers.append(known.number)
            news.token_ids.append(request.token_ids[-1])
        else:
            deltas.append(request.since(known.num_tokens, known.number))
            known.num_preemptions = request.num_preemptions
        known.num_tokens = num_tokens
    return News(tuple(deltas), news.numbers, news.token_ids)
