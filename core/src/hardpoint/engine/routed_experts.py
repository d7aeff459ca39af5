"""The routed experts of requests that ended, gathered from the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hardpoint.engine.execution.executor import Executor
from hardpoint.engine.execution.rank_verbs import ReadRoutedExperts
from hardpoint.engine.execution.routed_experts import HeldTokens
from hardpoint.engine.scheduling.request import Request


def take_routed_experts(executor: Executor, first_ranks: Iterable[int], requests: Iterable[Request]) -> None:
    """Set ``routed_experts`` of the ``requests`` that came to their ends and asked for them.

    To be called between the commit of the step that ended them and the schedule of the next: until then their pages
    hold their content. ``first_ranks``: one rank of each pipeline stage, in order.
    """
    ended, held = [], []
    for request in requests:
        if request.asked.params.return_routed_experts and request.finish_reason in ("stop", "length"):
            assert request.last_held is not None, "a request that drew a token has held pages"
            ended.append(request)
            held.append(HeldTokens(tuple(map(tuple, request.last_held.pages)), len(request.token_ids) - 1))
    if not ended:
        return
    answers = executor.control(ReadRoutedExperts(tuple(held)))
    stages = [answers[rank] for rank in first_ranks]
    for request, parts in zip(ended, zip(*stages, strict=True), strict=True):
        request.routed_experts = np.concatenate([part for part in parts if part is not None], axis=1)
