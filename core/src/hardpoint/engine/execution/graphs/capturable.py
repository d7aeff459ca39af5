"""Whether an engine's steps can be captured, and what of a model, its kernels or its platform cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from hardpoint.context import Context
from hardpoint.kernel_calls import REPEATED, can_repeat
from hardpoint_plugin_api import CaptureGrade, GraphEngine

logger = logging.getLogger(__name__)


def why_eager(ctx: Context, engine: GraphEngine) -> str | None:
    """Why no step can be captured, not even in pieces, as the metric's reason; None: some can."""
    if ctx.config.enforce_eager:
        return "enforce_eager"
    if engine.max_graphs == 0:
        return "no_graph_engine"
    if blockers := list(dict.fromkeys(uncapturable(ctx, engine))):
        logger.info("steps run eagerly: %s", "; ".join(blockers))
        return "not_capturable"
    return None


def why_not_full(ctx: Context, engine: GraphEngine) -> str | None:
    """Why no step can be captured whole, as the metric's reason: an attention backend cannot be; None: some can."""
    planners = [user.planner for user in ctx.cache_users.users]
    names = {type(planner).__name__ for planner in planners if planner.capture < CaptureGrade.SINGLE_TOKEN}
    if not names:
        return None
    how = "in pieces, or else eagerly" if engine.piece_sizes else "eagerly"
    logger.info("steps run %s: attention backend %s cannot be captured", how, ", ".join(sorted(names)))
    return "not_capturable"


def uncapturable(ctx: Context, engine: GraphEngine) -> Iterator[str]:
    """Yield a line for each part of the model that ``engine`` cannot put into a graph, nor between its pieces."""
    if max(ctx.parallel.tp.size, ctx.parallel.ep.size) > 1 and not engine.collectives_allowed:
        yield "the platform's graph engine allows no collectives between ranks"
    if not can_repeat(engine):
        for kernel in ctx.kernel_calls.opaque(engine):
            offer = kernel.offer
            if kernel.capturable:
                yield f"{offer.contribution} of plugin {offer.plugin} is no sequence of the operators that are recorded"
            else:
                yield f"{offer.contribution.family} {offer.contribution.name} cannot be captured"
    for plan in ctx.selector.plans:
        if plan.workload.family in REPEATED or getattr(plan.workload, "parallel", None) == "pp":
            continue  # pipeline stages hand on states between graphs
        for entry in plan.entries:
            if not getattr(ctx.load(entry.offer), "capturable", True):
                yield f"{plan.workload.family} {entry.offer.contribution.name} cannot be captured"
