"""Checks that only attention backends have: of plans, of groups of layers, of requests by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.attention.phases import sub_batch
from hardpoint.conformance.families.attention_situations import admits
from hardpoint.conformance.families.steps import Piece, PlacedStep
from hardpoint.conformance.memory import Placement
from hardpoint.conformance.probe import run, same_bits
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Finding
from hardpoint.ops.judge import judge_call
from hardpoint_plugin_api import AttentionBackend, AttentionCall, CacheLayout, CaptureGrade

if TYPE_CHECKING:
    from hardpoint.conformance.families.attention import AttentionProbe


def declarations(subject: Subject) -> Finding:
    """``declarations``: what the class declares is of the contract's types, and named as the manifest names it."""
    target, contribution = subject.target, subject.offer.contribution
    if not (isinstance(target, type) and issubclass(target, AttentionBackend)):
        return Finding.failed("declared", contribution.target, f"is no AttentionBackend but {target!r}")
    layout: Any = getattr(target, "layout", None)  # whatever a plugin gives
    if not isinstance(layout, CacheLayout):
        return Finding.failed("declared", "layout", f"is no CacheLayout but {layout!r}")
    if layout.name != contribution.layout:
        message = f"the class says {layout.name!r}, the manifest {contribution.layout!r}"
        return Finding.failed("layout-name", "layout", message)
    capture: Any = target.capture
    if not isinstance(capture, CaptureGrade):
        return Finding.failed("declared", "capture", f"is no CaptureGrade but {capture!r}")
    return Finding()


def group(probe: AttentionProbe, seed: int) -> Finding:
    """``group``: the plan made on a group's first layer serves the second, with that one's own constants and cache."""
    requests = probe.requests(seed)
    step = probe.step(seed, requests, Placement.AS_DRAWN, None, layer=1)
    return Finding.of(
        judge_call(probe.call_of(step, requests, lambda: probe.layers[0].plan(step.batch), (seed, None, 1)))
    )


def interleaved(probe: AttentionProbe, seed: int) -> Finding:
    """``interleaved``: all groups of a step are planned before the first layer runs, and scratch memory is shared."""
    first, second = probe.call(seed), probe.call(seed + 1, layer=1)

    def both() -> object:
        second.before()
        second.plan()
        second.run()
        return first.run()

    return Finding.of(judge_call(first, both))


def sizes(probe: AttentionProbe, seed: int) -> Finding:
    """``sizes``: layers whose first step was a small one serve a larger one."""
    fresh = type(probe)(probe.subject, probe.situation, probe.seed)
    requests = fresh.requests(seed)
    step, backend = fresh.step(seed, requests, Placement.AS_DRAWN, None), fresh.layers[0]
    smallest = min(range(len(fresh.pieces)), key=lambda i: fresh.pieces[i].total)
    with torch.inference_mode():
        _alone(backend, step, smallest)
    return Finding.of(judge_call(fresh.call_of(step, requests, lambda: backend.plan(step.batch), (seed, None, 0))))


def bounds(probe: AttentionProbe, seed: int) -> Finding:
    """``bounds``: a backend that needs no exact lengths finds them on the device where the host has bounds."""
    requests = probe.requests(seed)
    step, backend = probe.step(seed, requests, Placement.AS_DRAWN, None), probe.layers[0]
    most = step.batch.block_table.shape[1] * probe.spec.block_size
    longer = tuple(min(length + 1 + 3 * (i % 3), most) for i, length in enumerate(step.batch.seq_lens_host))
    batch = replace(step.batch, seq_lens_host=longer, exact_lengths=False)
    return Finding.of(judge_call(probe.call_of(step, requests, lambda: backend.plan(batch), (seed, None, 0))))


def batch_invariant(probe: AttentionProbe, seed: int) -> Finding:
    """``batch-invariant``: a request by itself has the bits that it has in the batch, and so has a prompt's last token
    that is computed as a decode. All heads are compared.
    """
    requests = probe.requests(seed)
    step, backend = probe.step(seed, requests, Placement.AS_DRAWN, None), probe.layers[0]
    run(probe.call_of(step, requests, lambda: backend.plan(step.batch), (seed, None, 0)))
    whole, starts = step.out.clone(), step.batch.query_start_host
    for i, piece in enumerate(probe.pieces):
        first = starts[i] + (i == 0 and probe.first_is_undefined)
        with torch.inference_mode():
            alone = _alone(backend, step, i)
            last = _alone(backend, step, i, last_only=True)
        where = f"request {i} ({piece.query} of {piece.total})"
        if not same_bits([whole[first : starts[i + 1]]], [alone[first - starts[i] :]]):
            return Finding.failed("batch-variant", where, "has other bits by itself than in the batch")
        if piece.query > 1 and _decodes(probe) and not same_bits([alone[-1:]], [last]):
            return Finding.failed("batch-variant", where, "its last token has other bits when it is decoded")
    return Finding()


def _decodes(probe: AttentionProbe) -> bool:
    """Whether the contribution serves a step of one decode."""
    return admits(probe.subject.tokens, (Piece(1, 2),))


def _alone(backend: AttentionBackend, step: PlacedStep, request: int, *, last_only: bool = False) -> torch.Tensor:
    """The output of one request of a step that is laid out, or of its last token alone, [T, H, D]."""
    batch = sub_batch(step.batch, request, request + 1)
    rows = slice(step.batch.query_start_host[request], step.batch.query_start_host[request + 1])
    if last_only:
        rows = slice(rows.stop - 1, rows.stop)
        one = torch.tensor([0, 1], dtype=batch.query_start.dtype, device=batch.query_start.device)
        batch = replace(
            batch,
            query_start=one,
            query_start_host=(0, 1),
            slot_mapping=batch.slot_mapping[-1:],
            num_decodes=1,
            graph_key=1,
        )
    out = torch.full_like(step.out[rows], float("nan"))
    metadata = backend.plan(batch)
    backend.forward(AttentionCall(step.q[rows], step.k[rows], step.v[rows], step.cache, metadata, out))
    return out
