"""The news of requests on their way to a front end: its copies equal the core's own, whatever came of a step."""

from __future__ import annotations

import pickle
import random
import time

import pytest

from hardpoint import SamplingParams
from hardpoint.engine.remote.news import News, Reported, collect_news
from hardpoint.engine.requests import AdmittedRequest, RequestProgress
from hardpoint.engine.scheduling.step import TokenLogprobs


def new_request(number: int, logprobs: int | None = None) -> RequestProgress:
    params = SamplingParams(logprobs=logprobs)
    return RequestProgress(AdmittedRequest(number, (1, 2, 3), params, 0, frozenset(), 100))


def grow(request: RequestProgress, *tokens: int) -> None:
    """Do to ``request`` as a step does; the first one reads its prompt."""
    if request.started is None:
        request.started, request.num_cached_tokens = time.monotonic(), 2
    request.token_ids += tokens
    if request.asked.params.logprobs is not None:
        request.logprobs += [TokenLogprobs([token], [-0.5], [1]) for token in tokens]


def travel(known: list[Reported], copies: dict[int, RequestProgress]) -> News:
    """Report what is new to the front end's ``copies``, and check that nothing is missing there."""
    news: News = pickle.loads(pickle.dumps(collect_news(known)))
    held = dict(copies)
    changed = news.apply(copies)
    assert {request.number for request in changed} == {each.number for each in known}
    assert len(changed) == len(known)
    for each in known:
        assert vars(held[each.number]) == vars(each.request)
        assert (each.number in copies) == (each.request.finish_reason is None)
    return news


@pytest.mark.parametrize("seed", range(4))
def test_copies_keep_up(seed: int) -> None:
    chance = random.Random(seed)
    requests = [new_request(5), new_request(6, logprobs=0), new_request(7), new_request(8)]
    known = {request.number: Reported(request, request.number, 3) for request in requests}
    copies = {request.number: RequestProgress(request.asked) for request in requests}
    while copies:
        advanced = [known[number] for number in copies if chance.random() < 0.7]
        for each in advanced:
            request = each.request
            grow(request, *(chance.randrange(1000) for _ in range(chance.choice((1, 1, 1, 2)))))
            request.num_preemptions += chance.random() < 0.1
            if chance.random() < 0.05:
                request.finish_reason, request.stop_reason = "stop", request.token_ids[-1]
        travel(advanced, copies)


def test_most_tokens_travel_as_two_numbers() -> None:
    request = new_request(9)
    known, copies = [Reported(request, 9, 3)], {9: RequestProgress(request.asked)}
    grow(request, 10)
    assert [delta.token_ids for delta in travel(known, copies).deltas] == [(10,)]  # with when it was started
    grow(request, 11)
    news = travel(known, copies)
    assert (news.deltas, list(news.numbers), list(news.token_ids)) == ((), [9], [11])
