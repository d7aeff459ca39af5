"""From a plan of the family ``attention`` to the backend of one layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from hardpoint.attention.phases import PhasedBackend, PhasedLatentBackend
from hardpoint.context import Context
from hardpoint.plugin_host.blame import construct
from hardpoint.selection import Plan, StepRange
from hardpoint_plugin_api import AttentionBackend, AttentionSpec, CacheUser, LatentBackend, LatentSpec, StepPlanner

_Spec = TypeVar("_Spec", bound=Hashable)
_Backend = TypeVar("_Backend", AttentionBackend, LatentBackend)


def attention_backend(ctx: Context, spec: AttentionSpec) -> tuple[int, AttentionBackend, str]:
    """Select and build the backend of the layer at ``ctx.path``.

    Returns the layer's number among the cache users, the backend, and the name of its cache layout. Fused ops
    that write the cache are selected by that name.
    """
    plan = ctx.select(spec.workload())
    number, backend = _built(ctx, spec, plan, AttentionBackend, PhasedBackend)
    return number, backend, plan.layout


def latent_backend(
    ctx: Context, spec: LatentSpec, planner: Callable[[LatentBackend], StepPlanner] | None = None
) -> tuple[int, LatentBackend]:
    """Select and build the backend of the layer of latent attention at ``ctx.path``.

    ``planner`` makes what plans its steps of the backend, which plans them itself by default. Returns the layer's
    number among the cache users, and the backend.
    """
    return _built(ctx, spec, ctx.select(spec.workload()), LatentBackend, PhasedLatentBackend, planner)


def _built(
    ctx: Context,
    spec: _Spec,
    plan: Plan,
    kind: Callable[..., _Backend],
    joining: Callable[[Context, _Spec, Sequence[tuple[StepRange, _Backend]]], _Backend],
    planner: Callable[[_Backend], StepPlanner] | None = None,
) -> tuple[int, _Backend]:
    """The backend of ``plan``, several of them behind one by ``joining``, and its number among the cache users."""
    entries = _entries(ctx, spec, plan, kind)
    backend = entries[0][1]
    if ctx.selector.postponed(plan.workload):
        joined: Any = joining(ctx, spec, entries)  # of phases.py
        backend = joined
        drafts = ctx.config.num_drafts > 0
        ctx.switches.add(plan.workload, lambda other: joined.switch(_entries(ctx, spec, other, kind), drafts))
    elif len({id(one) for _, one in entries}) > 1:
        backend = joining(ctx, spec, entries)
    plans = backend if planner is None else planner(backend)
    user = CacheUser(ctx.path, backend.cache_spec, backend.layout, plans, (spec, type(backend)))
    return ctx.cache_users.add(user), backend


def _entries(ctx: Context, spec: _Spec, plan: Plan, kind: Callable[..., _Backend]) -> list[tuple[StepRange, _Backend]]:
    """The backend of each range of ``plan``; one for each winner."""
    built = {e.offer: construct(e.offer, ctx.load(e.offer), kind, ctx, spec) for e in plan.entries}
    for offer, backend in built.items():
        ctx.kernel_calls.attach(offer, backend)
    return [(e.range, built[e.offer]) for e in plan.entries]
