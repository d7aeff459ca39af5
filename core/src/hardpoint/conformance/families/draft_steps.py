"""Steps that verify drafts and refuse some: what layers and models with a cache go through beside plain steps."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint.conformance.families.step_memory import Pieces
from hardpoint.conformance.families.steps import Piece
from hardpoint.context import Context
from hardpoint_plugin_api import Reason


def _steps_with_drafts(most: int) -> Pieces:
    """Steps of pages of 16 tokens with up to ``most`` drafts of a request.

    Requests: one that is mostly without drafts; one whose prompt is one token; one that goes on to another block by
    drafts that are refused; one whose prompt is in two chunks, the second with drafts; one that begins with what the
    first left. Each goes on from behind its first, last and other tokens, in steps of drafts alone and beside prompts
    and plain decodes, and one pauses behind drafts that are refused. The last step reads every state.

    No step has a multiple of 16 tokens. Rows of padding may be NaN, and torch's ``linear`` in bfloat16 lets that into
    the row before, where this is the 16th and has an odd number of columns (torch 2.13 on a CPU with AMX).
    """
    n, none = 1 + most, (0, 0)
    steps = (  # tokens of each request, and how many of them stay
        ((16, 16), none, (13 - 2 * n, 13 - 2 * n), (9, 9), none),
        ((1, 1), none, (n, 1), (11, 11 - most), (4, 4)),
        ((n, n), none, (n, 2), none, (n, most)),
        ((1, 1), none, (n, n), (n, 1), (n, 1)),
        ((n, 1), none, (n, 1), none, (n, n)),
        ((1, 1), (1, 1), (n, 1), (n, 2), (n, 1)),
        ((1, 1),) * 5,
        ((n, n), (n, 1), (n, n), (n, 1), (n, 2)),
        ((2, 1), (2, 2), (2, 1), (2, 2), (2, 1)),
        ((1, 1), (n, n), (2, 1), (n, 1), (2, 2)),
        ((1, 1),) * 5,
    )
    ends, pieces = [0, 0, 0, 0, 16], []
    for step in steps:
        pieces.append(tuple(Piece(query, end + query) for (query, _), end in zip(step, ends, strict=True)))
        ends = [end + stays for (_, stays), end in zip(step, ends, strict=True)]
    return tuple(pieces)


DRAFTED: Mapping[int, Pieces] = {most: _steps_with_drafts(most) for most in (1, 3)}
"""By the most drafts of a request: steps that take some back."""


def why_no_drafts(ctx: Context) -> Reason | None:
    """Why what was built with ``ctx`` is not asked to take drafts back: a planner of states does not claim that."""
    states = (user for user in ctx.cache_users.users if user.spec.retention.per_sequence)
    planner = next((type(user.planner).__name__ for user in states if not user.planner.keeps_drafts), None)
    return None if planner is None else Reason("drafts", f"{planner}.keeps_drafts is False")
