"""The shapes of captured steps, as data: a row for each kind of step.

``shape_rows`` makes the rows of an engine. ``Graphs`` (graphs.py) finds, captures and replays the shapes that they
list. Another kind of step is another row. Steps that verify k drafts for each request have k + 1 tokens per request:
they are captured where every attention backend has the grade UNIFORM, take their inputs as steps with prompts do, and
end with the logits of all tokens. Steps of a draft model or an encoder are rows of a ``Graphs`` over that model. A
further difference between shapes is one more field of StepShape: ``adapted`` says whether tokens have LoRA adapters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from hardpoint.engine.execution.sampling.sampler import PlainDraw
from hardpoint.engine.scheduling.step import StepInput
from hardpoint_plugin_api import CaptureGrade, ConfigError, GraphEngine, PlatformError, StepLimits

Mode = Literal["eager", "piecewise", "full"]
"""How a step runs: without a graph, in captured pieces with attention called between them, or captured whole."""

End = Literal["states", "hidden", "logits", "token_logits", "greedy", "random"]
"""The last that a step computes: states of its tokens for the next pipeline stage, hidden states of its tokens, logits
behind each request's last token, logits behind every token, or a token for each request, drawn as PlainDraw says."""

DRAWS: tuple[PlainDraw, ...] = get_args(PlainDraw)

Layout = tuple[int, int | None, int | None]
"""Tokens, requests, queries of a shape: shapes of one layout read the same buffers."""

Kind = tuple[Mode, int | None, bool]
"""Mode, queries, and whether there are adapters: the same for all shapes of a row."""

MOST_GRAPHS = 32
"""How many captured graphs are kept for an engine that sets no limit."""


class StepShape(NamedTuple):
    """The shape of a step: T ``tokens`` of N ``requests``, padding included, each with as many tokens as ``queries``.

    ``queries`` is None where requests have any number of tokens; ``requests`` is None where there may be any number,
    since only attention knows of them, and is not captured.
    """

    mode: Mode
    tokens: int
    requests: int | None
    queries: int | None
    end: End
    adapted: bool = False

    def __repr__(self) -> str:
        return f"<{self.words}, {self.end}>"

    @property
    def layout(self) -> Layout:
        """The fixed buffers that steps of this shape read."""
        return self.tokens, self.requests, self.queries

    @property
    def kind(self) -> Kind:
        """The kind of step that it is a shape of."""
        return self.mode, self.queries, self.adapted

    @property
    def words(self) -> str:
        """Steps of this shape, for the log."""
        adapters = " with adapters" if self.adapted else ""
        if self.queries is None:
            return f"{'piecewise ' if self.mode == 'piecewise' else ''}steps of {self.tokens} tokens{adapters}"
        kind = "decode steps" if self.queries == 1 else f"steps with {self.queries} tokens per request,"
        return f"{kind} of {self.requests} request{'' if self.requests == 1 else 's'}{adapters}"


@dataclass(frozen=True)
class ShapeRow:
    """The shapes of one kind of step, which differ in size and end.

    ``sizes``, ascending, count requests where each has the same number of tokens, ``queries``, and draws the next;
    otherwise tokens, of at most ``requests`` requests (None: any number). ``ends`` begins with the draws that a graph
    may hold, if any; the last end is for steps that need another. Where sizes are ``listed``, steps are padded
    to the next captured size: the start captures some of them (late_graphs.py), the others follow. Otherwise each size
    is captured when it is first met.
    """

    mode: Mode
    sizes: tuple[int, ...]
    ends: tuple[End, ...]
    queries: int | None = None
    requests: int | None = None
    listed: bool = True
    adapted: bool = False

    @property
    def kind(self) -> Kind:
        """The kind of step that it has the shapes of."""
        return self.mode, self.queries, self.adapted

    @property
    def draws(self) -> tuple[PlainDraw, ...]:
        """The draws among ``ends``."""
        return tuple(draw for draw in DRAWS if draw in self.ends)

    @property
    def num_ahead(self) -> int:
        """Number of graphs that are captured before a step needs them."""
        return len(self.sizes) * (len(self.draws) or 1) if self.listed else 0

    @property
    def grade(self) -> CaptureGrade:
        """The grade that attention backends must have."""
        if self.mode == "piecewise":
            return CaptureGrade.NEVER
        by_queries = {None: CaptureGrade.ANY, 1: CaptureGrade.SINGLE_TOKEN}
        return by_queries.get(self.queries, CaptureGrade.UNIFORM)

    def needs(self, step: StepInput) -> int:
        """The size that ``step`` has without padding; 0 where it is of another kind."""
        shares, queries = step.scheduled, self.queries
        if step.is_empty:
            return int(queries is None or queries == 1)
        if queries is None:
            if self.ends == ("logits",) and any(share.drafts for share in shares):
                return 0  # drafts need the logits of several tokens
            return step.num_tokens if self.requests is None or len(shares) <= self.requests else 0
        if not all(share.count == queries and share.samples for share in shares):
            return 0
        # Decode steps take their lengths from the host.
        return 0 if queries == 1 and any(share.slack for share in shares) else len(shares)

    def sizes_for(self, needed: int, tokens: int | None = None) -> tuple[int, ...]:
        """The sizes that a step may be padded to, best first: the one of so many ``tokens`` where that is given."""
        best = bisect_left(self.sizes, needed)
        sizes = self.sizes[best:] if self.listed else self.sizes[best : best + 1]
        return sizes if tokens is None else tuple(size for size in sizes if size * (self.queries or 1) == tokens)

    def shape(self, size: int, end: End) -> StepShape:
        """The shape of one of ``sizes``."""
        if self.queries is None:
            return StepShape(self.mode, size, self.requests, None, end, self.adapted)
        return StepShape(self.mode, size * self.queries, size, self.queries, end, self.adapted)


def captured_tokens(rows: Iterable[ShapeRow], step: StepInput) -> frozenset[int]:
    """The numbers of tokens to which ``step`` may be padded, to replay a graph that was captured ahead."""
    needs = [(row, row.needs(step)) for row in rows if row.listed]
    return frozenset(size * (row.queries or 1) for row, needed in needs if needed for size in row.sizes_for(needed))


def shape_rows(engine: GraphEngine, limits: StepLimits, num_drafts: int = 0) -> tuple[ShapeRow, ...]:
    """All that ``engine`` would capture of steps with these limits; a step takes the first row that it fits.

    ``num_drafts`` is the most that a step verifies for a request.

    Raises PlatformError for an engine whose data contradict each other, and ConfigError for a size that the user listed
    and no step has.
    """
    assert limits.max_requests is not None
    decodes = _decodes(engine, limits)
    if engine.max_graphs is not None and decodes.num_ahead > engine.max_graphs:
        raise PlatformError(
            f"a graph engine that keeps {engine.max_graphs} graphs asks for {len(decodes.sizes)} sizes, with "
            f"{len(decodes.draws)} for each: {decodes.sizes}"
        )
    verifying = (_verifying(decodes, limits, num_drafts + 1),) if num_drafts else ()
    mixed = ShapeRow(
        "full",
        _token_sizes(engine.token_sizes, "token_sizes", limits),
        ("logits",),
        requests=min(engine.requests_per_token_size, limits.max_requests),
    )
    pieces = ShapeRow("piecewise", _token_sizes(engine.piece_sizes, "piece_sizes", limits), ("hidden",))
    for name, row in (("batch_sizes", decodes), ("token_sizes", mixed), ("piece_sizes", pieces)):
        if setting := engine.asked_sizes.get(name):
            _require(getattr(engine, name), row, setting, limits)
    return decodes, *verifying, mixed, pieces


def with_adapters(rows: tuple[ShapeRow, ...]) -> tuple[ShapeRow, ...]:
    """``rows``, and the same rows once more for steps with LoRA adapters."""
    return (*rows, *(replace(row, adapted=True) for row in rows))


def graph_bytes(engine: GraphEngine, limits: StepLimits, num_drafts: int = 0, *, adapters: bool = False) -> int:
    """Bytes that captured graphs may take, by what the engine says of one. ``num_drafts`` as in ``shape_rows``."""
    rows = shape_rows(engine, limits, num_drafts)
    rows = with_adapters(rows) if adapters else rows
    if all(row.listed for row in rows):
        number = sum(row.num_ahead for row in rows)
        number = number if engine.max_graphs is None else min(number, engine.max_graphs)
    else:
        number = MOST_GRAPHS if engine.max_graphs is None else engine.max_graphs
    return engine.bytes_per_graph * number


def most_captured_tokens(engine: GraphEngine, limits: StepLimits, num_drafts: int = 0) -> int:
    """Tokens of the largest step that is captured, 0 where none is. ``num_drafts`` as in ``shape_rows``."""
    rows = shape_rows(engine, limits, num_drafts)
    return max((row.shape(row.sizes[-1], row.ends[-1]).tokens for row in rows if row.sizes), default=0)


def bucketed(count: int, limits: StepLimits) -> int:
    """``count`` tokens, padded to the next of the limits' buckets."""
    return min((bucket for bucket in limits.token_buckets if bucket >= count), default=count)


def _require(asked: tuple[int, ...], row: ShapeRow, setting: str, limits: StepLimits) -> None:
    """Raise ConfigError for sizes of ``setting`` that are none of ``row``: they would be padded or left out."""
    lost = [size for size in asked if size not in row.sizes]
    if not lost:
        return
    requests, tokens = limits.max_requests, limits.max_tokens
    assert requests is not None
    most = min(requests, tokens or requests) if row.queries else tokens or requests
    near, reason = {most}, f"steps have at most {most} {'requests' if row.queries else 'tokens'}"
    if buckets := limits.token_buckets:
        reason = f"steps are padded to {', '.join(map(str, buckets))} tokens"
        lower = {max((bucket for bucket in buckets if bucket < size), default=buckets[0]) for size in lost}
        near = lower | {bucketed(size, limits) for size in lost} & set(buckets) if row.queries else set()
    remedy = f"the nearest are {', '.join(map(str, sorted(near)))}" if near else "set it to none"
    raise ConfigError(f"{setting}: no step has the sizes {', '.join(map(str, lost))}: {reason}; {remedy}")


def _decodes(engine: GraphEngine, limits: StepLimits) -> ShapeRow:
    """Decode steps: every request has one token. No size is larger than it takes to hold all requests."""
    assert limits.max_requests is not None
    sizes = engine.batch_sizes
    if sizes is None:
        counts = {bucketed(count, limits) for count in range(1, limits.max_requests + 1)}
        return ShapeRow("full", tuple(sorted(counts)), (*DRAWS, "logits"), queries=1, listed=False)
    if not sizes or min(sizes) < 1:
        raise PlatformError(f"a graph engine's batch_sizes must be positive numbers, got {sizes}")
    padded = sorted({bucketed(size, limits) for size in sizes})
    enough = next((size for size in padded if size >= limits.max_requests), padded[-1])
    most = min(enough, limits.max_tokens or enough)
    return ShapeRow("full", tuple(size for size in padded if size <= most), (*DRAWS, "logits"), queries=1)


def _verifying(decodes: ShapeRow, limits: StepLimits, queries: int) -> ShapeRow:
    """Steps that verify ``queries`` - 1 drafts for each request, of as many requests as decode steps have."""
    most = (limits.max_tokens or 0) if not limits.token_buckets else 0
    sizes = tuple(size for size in decodes.sizes if size * queries <= most)
    return ShapeRow("full", sizes, ("token_logits",), queries=queries, listed=decodes.listed)


def _token_sizes(sizes: tuple[int, ...], name: str, limits: StepLimits) -> tuple[int, ...]:
    """Return the sizes that steps of these limits reach; none where steps are padded to buckets anyway."""
    if sizes and min(sizes) < 1:
        raise PlatformError(f"a graph engine's {name} must be positive numbers, got {sizes}")
    most = limits.max_tokens or 0
    return tuple(size for size in sorted(sizes) if size <= most and not limits.token_buckets)
