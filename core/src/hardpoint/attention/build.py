"""From a plan of the family ``attention`` to the backend of one layer."""

from __future__ import annotations

from hardpoint.attention.phases import PhasedBackend
from hardpoint.context import Context
from hardpoint.plugins.blame import construct
from hardpoint_plugin_api import AttentionBackend, AttentionSpec, CacheUser


def attention_backend(ctx: Context, spec: AttentionSpec) -> tuple[int, AttentionBackend, str]:
    """Select and build the backend of the layer at ``ctx.path``.

    Returns the layer's number among the cache users, the backend, and the name of its cache layout. Fused ops
    that write the cache are selected by that name.
    """
    plan = ctx.select(spec.workload())
    built = {e.offer: construct(e.offer, ctx.load(e.offer), AttentionBackend, ctx, spec) for e in plan.entries}
    for offer, backend in built.items():
        ctx.kernel_calls.attach(offer, backend)
    if len(built) == 1:
        (backend,) = built.values()
    else:
        backend = PhasedBackend(ctx, spec, [(e.range, built[e.offer]) for e in plan.entries])
    user = CacheUser(ctx.path, backend.cache_spec, backend.layout, backend, (spec, type(backend)))
    return ctx.cache_users.add(user), backend, plan.layout
