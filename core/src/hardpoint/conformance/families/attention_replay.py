"""The check ``replay`` of attention: one captured step, run again on batches of other lengths, as an engine does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hardpoint.conformance.families.steps import Piece, PlacedStep
from hardpoint.conformance.memory import Placement, place
from hardpoint.conformance.probe import refill
from hardpoint.conformance.trials import Finding
from hardpoint.kernel_calls import KernelCalls
from hardpoint.ops.judge import judge_call
from hardpoint_plugin_api import NULL_PAGE, AttentionCall, CapturedGraph, CaptureGrade

if TYPE_CHECKING:
    from hardpoint.conformance.families.attention import AttentionProbe

UNUSED_REQUESTS = 2
"""Requests without a token at the end of a batch of any shape."""


def replay(probe: AttentionProbe, seed: int) -> Finding:
    """``replay``: one captured ``forward`` is right on later batches of the same key and token.

    Their lengths, pages and values are others; in batches of any shape, so are the numbers of queries. ``plan`` runs
    for each, and nothing but the token of its metadata is kept, as in an engine.
    """
    if reason := probe.not_recorded():
        return Finding.not_claimed("not-recorded", reason)
    if any(piece.query > 1 for piece in probe.pieces) and probe.layers[0].capture < CaptureGrade.ANY:
        return Finding.not_claimed("not-recorded", "below the grade ANY, engines capture single-token steps alone")
    backend, site = probe.layers[0], probe.subject.site
    captured, *others = (probe, *(probe.reshaped(pieces) for pieces in other_lengths(probe, random.Random(seed))))
    room = [other.pieces for other in others]
    step = _step(captured, seed, room)
    call = captured.call_of(step, captured.requests(seed), lambda: backend.plan(step.batch), (seed, None, 0))
    with torch.inference_mode():
        call.before()
        metadata = backend.plan(step.batch)
        arguments = AttentionCall(step.q, step.k, step.v, step.cache, metadata, step.out)

        def forward() -> torch.Tensor:
            backend.forward(arguments)
            return step.out

        calls = KernelCalls(site.home)
        run = calls.wrap(probe.subject.offer, probe.subject.target, forward)
        inputs = {i.label: i.tensor for i in call.inputs}
        graph = calls.prepare(site.platform.graph_engine(), "conformance", lambda **_: run(), inputs)
    judged = False
    for number, other in enumerate((*others, captured)):
        later = _step(other, seed + 1 + number, [captured.pieces, *room])
        batch = replace(
            step.batch, query_start_host=later.batch.query_start_host, seq_lens_host=later.batch.seq_lens_host
        )
        drawn = (seed + 1 + number, None, 0)
        new = other.call_of(later, other.requests(drawn[0]), partial(backend.plan, batch), drawn)
        assert refill(call, new), "steps of one size lie in arrays of one shape"
        with torch.inference_mode():
            if backend.plan(batch).token != metadata.token:
                continue  # an engine captures such a step by itself
        judged = True
        again = replace(new, inputs=call.inputs, before=call.before)
        finding = Finding.of(judge_call(again, partial(_replayed, other, graph)))
        if finding.faults:
            return finding
    return Finding() if judged else Finding.not_claimed("token", "each batch of other lengths has a token of its own")


def _replayed(probe: AttentionProbe, graph: CapturedGraph) -> tuple[torch.Tensor, ...]:
    return probe.outputs(graph.run())


def other_lengths(probe: AttentionProbe, draw: random.Random) -> list[tuple[Piece, ...]]:
    """Requests of two more steps that are replayed with the probe's: as many, with as many tokens.

    The first has the probe's longest length, so that what a plan rounds up of it is the same; the second goes beyond.
    """
    longest = max(piece.total for piece in probe.pieces)
    most = longest + probe.spec.block_size
    if (limit := probe.limits.max_context) is not None:
        most = min(most, max(longest, limit))
    found = []
    for end in (longest, most):
        queries = [piece.query for piece in probe.pieces]
        draw.shuffle(queries)
        queries.sort(key=lambda query: query > 1)  # decodes come first
        totals = [draw.randint(query, max(query, end)) for query in queries]
        totals[draw.randrange(len(totals))] = end
        found.append(tuple(Piece(query, max(query, total)) for query, total in zip(queries, totals, strict=True)))
    return found


def _step(probe: AttentionProbe, seed: int, room: Sequence[Sequence[Piece]]) -> PlacedStep:
    """The step of ``probe``, in arrays with room for those of ``room``; of any shape unless it is of decodes alone."""
    step = probe.step(seed, probe.requests(seed), Placement.AS_DRAWN, None, room=room)
    batch, device = step.batch, step.q.device
    if batch.graph_key is not None:
        return step
    tokens, requests = step.q.shape[0], batch.num_requests + UNUSED_REQUESTS

    def longer(x: torch.Tensor, value: int) -> torch.Tensor:
        rest = torch.full((UNUSED_REQUESTS, *x.shape[1:]), value, dtype=x.dtype)
        return place(torch.cat([x.cpu(), rest]), device)

    batch = replace(
        batch,
        query_start=longer(batch.query_start, batch.num_tokens),
        seq_lens=longer(batch.seq_lens, 1),
        block_table=longer(batch.block_table, NULL_PAGE),
        query_start_host=(0, *[tokens] * requests),
        seq_lens_host=(tokens, *[1] * (requests - 1)),
        num_decodes=0,
        graph_key=("tokens", tokens),
        any_shape=True,
    )
    return replace(step, batch=batch)
