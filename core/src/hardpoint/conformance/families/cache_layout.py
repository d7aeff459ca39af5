"""Trials of cache layouts and of ``store``: regions, round trips, and what a write to the cache touches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, cast

import torch

from hardpoint.conformance.checks import kernel_checks
from hardpoint.conformance.families.cache_rounding import rounded
from hardpoint.conformance.families.scaled_cache import (
    ERRORS,
    WIDE,
    cache_dtypes,
    clash,
    element_bytes,
    scalings,
    set_scales,
    spread,
    static_scales,
)
from hardpoint.conformance.memory import (
    POISON,
    Placement,
    empty,
    far_pages,
    place,
    place_far,
)
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject, TrialResources
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.dtypes import dtype_of
from hardpoint.numerics import round_to
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint.ops.judge import Call, Expectation, Expected, Input
from hardpoint_plugin_api import (
    NULL_PAGE,
    AttentionBackend,
    AttentionSpec,
    CacheLayout,
    CacheSpec,
    LatentBackend,
    LatentSpec,
    Plane,
    Region,
    StoreCall,
)

_PAGES = 7
_SAID = {"k": "keys", "v": "values"}
_TOKENS = {"few": 5, "none": 0, "one": 1, "many": 40}


@dataclass(frozen=True)
class CacheKind:
    """Facts of the cache of one kind of attention, as the kit tries it.

    ``sizes`` are factors of trials; ``spec`` makes of their values, and of dtypes and tokens per page, what a backend
    is built with, and ``title`` a part of a case's name. ``store_call`` takes a tensor for each plane of the spec's
    cache, in order, then the cache's views and the slots.
    """

    sizes: Mapping[str, Sequence[Any]]
    spec: Callable[[Row, str], AttentionSpec | LatentSpec]
    title: Callable[[Row], str]
    store_call: Callable[..., Any]


def keys_and_values(head_sizes: Sequence[int]) -> CacheKind:
    """The cache of causal attention."""

    def spec(row: Row, dtype: str) -> AttentionSpec:
        heads, size = row["kv_heads"], row["head_size"]
        made = AttentionSpec(heads, heads, size, size**-0.5, dtype, row["kv_dtype"], row["block_size"])
        return replace(made, static_cache_scales=row.get("static_scales", False))

    sizes = {"head_size": head_sizes, "kv_heads": (1, 2, 5)}
    return CacheKind(sizes, spec, lambda row: f"heads-{row['kv_heads']}/size-{row['head_size']}", StoreCall)


def layout_trials(subject: Subject, plan: Plan, block_sizes: Sequence[int], kind: CacheKind) -> Iterator[Trial]:
    """The layout on its own, then ``store``, in each claimed dtype and with each claimed size."""
    factors: dict[str, Sequence[Any]] = {
        "kv_dtype": cache_dtypes(subject),
        "block_size": block_sizes,
        "slack": (0, 3),
        **kind.sizes,
    }
    excludes: Exclusions = {}
    if True in scalings(subject):
        factors["static_scales"], excludes = scalings(subject), {("kv_dtype", "static_scales"): clash}
    for row in plan.combinations(factors, excludes):
        yield _layout_trial(subject, row, plan, kind)
    more = {"dtype": subject.dtypes(), "tokens": tuple(_TOKENS), "padding": (0, 4)}
    for number, row in enumerate(plan.combinations(factors | more, excludes)):
        yield _store_trial(StoreProbe(subject, row, kind), plan, number)


def _layout_trial(subject: Subject, row: Row, plan: Plan, kind: CacheKind) -> Trial:
    title = f"layout/{row['kv_dtype']}/{kind.title(row)}/block-{row['block_size']}"
    title += (f"/slack-{row['slack']}" if row["slack"] else "") + ("/static" if row.get("static_scales") else "")
    attention = kind.spec(row, next(iter(subject.dtypes())))
    if reason := subject.refuses(attention.workload()):
        return Trial(title, unsupported=reason)
    spec = attention.cache_spec
    checks = (
        Check("regions", partial(regions, subject, spec, row["block_size"]), decisive=True),
        Check(
            "round-trip",
            partial(round_trip, subject, spec, row["block_size"], row["slack"], plan.seed_of(title)),
        ),
    )
    return Trial(title, checks)


def _store_trial(probe: StoreProbe, plan: Plan, number: int) -> Trial:
    if reason := probe.subject.refuses(probe.spec.workload()):
        return Trial(probe.title, unsupported=reason)
    seed = plan.seed_of(f"{probe.subject.offer.contribution}/{probe.title}")
    without = ("ghost", "far", "offset", "apart", "fresh", "repeat") if probe.num_tokens == 0 else ()
    return Trial(probe.title, kernel_checks(probe, seed, plan, number, without), of_a_part=True)


def regions(subject: Subject, spec: CacheSpec, block_size: int) -> Finding:
    """``regions``: the parts of a page lie inside it, apart from each other, where their dtype can be read."""
    layout = _layout(subject)
    size, parts = layout.page_bytes(spec, block_size), layout.regions(spec, block_size)
    if size <= 0 or size % layout.alignment:
        return Finding.failed("page-bytes", "page_bytes", f"{size} is no positive multiple of {layout.alignment}")
    if len({r.name for r in parts}) < len(parts):
        return Finding.failed("regions", "regions", f"two have one name: {[r.name for r in parts]}")
    for region in parts:
        if reason := _misplaced(region, size):
            return Finding.failed("regions", region.name, reason)
    ordered = sorted(parts, key=lambda r: r.offset)
    if list(parts) != ordered:
        return Finding.failed("regions", "regions", "they are not in the order of their offsets")
    for a, b in pairwise(ordered):
        if a.offset + a.nbytes > b.offset:
            return Finding.failed("regions", b.name, f"begins at {b.offset}, before {a.name} ends")
    return Finding()


def _misplaced(region: Region, page_bytes: int) -> str | None:
    item, count = dtype_of(region.dtype).itemsize, 1
    for extent in region.shape:
        count *= extent
    if region.offset < 0 or region.offset + region.nbytes > page_bytes:
        return f"bytes {region.offset} to {region.offset + region.nbytes} are not inside a page of {page_bytes}"
    if count * item != region.nbytes:
        return f"{list(region.shape)} of {region.dtype} are {count * item} bytes, not {region.nbytes}"
    return f"offset {region.offset} is no multiple of {item}" if region.offset % item else None


def round_trip(subject: Subject, spec: CacheSpec, block_size: int, slack: int, seed: int) -> Finding:
    """``round-trip``: what ``from_logical`` writes, ``to_logical`` reads, and no other page and no gap is touched.

    Where each token's head, or each group of its elements, has a scale, values are rounded on the way: by no more than
    such elements must.
    """
    layout, device = _layout(subject), subject.site.device
    size = layout.page_bytes(spec, block_size) + slack * max(layout.alignment, 16)
    generator = torch.Generator().manual_seed(seed)
    buffer = place(torch.full((_PAGES * size,), POISON, dtype=torch.uint8), device)
    views = layout.views(buffer, _PAGES, spec, block_size, size)
    for name, view in views.items():
        if view.shape[0] != _PAGES or view.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
            return Finding.failed("views", name, f"is no view of the buffer's {_PAGES} pages, shape {list(view.shape)}")
    pages = torch.randperm(_PAGES, generator=generator)[:3]
    drawn = {plane.name: _logical((3, block_size), plane, generator).to(device) for plane in spec.planes}
    layout.from_logical(views, pages.to(device), drawn)
    read = layout.to_logical(views, pages.to(device))
    if read.keys() != drawn.keys():
        message = f"to_logical gives the planes {', '.join(read)}, and the spec has {', '.join(drawn)}"
        return Finding.failed("round-trip", "planes", message)
    for plane in spec.planes:
        name, wanted, got = plane.name, drawn[plane.name], read[plane.name]
        if plane.scaling in ("row", "group"):
            host = wanted.cpu()
            truth, own = host.double(), rounded(host, plane)
            if (found := compare(name, got.float(), own, truth, ERRORS, device)).faults:
                return Finding.of(found)
        elif got.shape != wanted.shape or not torch.equal(got, wanted):
            shape = list(wanted.shape)
            return Finding.failed("round-trip", name, f"to_logical gives other values than from_logical took: {shape}")
        if got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            return Finding.failed("round-trip", name, "to_logical returns a view of the cache, and must return a copy")
    rows = buffer.view(_PAGES, size).cpu()
    others = [page for page in range(_PAGES) if page not in pages.tolist()]
    if (rows[others] != POISON).any():
        return Finding.failed("page-touched", "from_logical", "it wrote to pages that were not named")
    if slack and (rows[:, layout.page_bytes(spec, block_size) :] != POISON).any():
        return Finding.failed("page-touched", "from_logical", "it wrote behind the layout's own part of a page")
    return Finding()


def _logical(shape: Sequence[int], plane: Plane, generator: torch.Generator) -> torch.Tensor:
    """Values [*shape, *plane.shape] that a layout can hold: to the bit, unless rows have scales."""
    x = torch.randn(*shape, *plane.shape, generator=generator)
    if plane.scaling == "none":
        return x.to(dtype_of(plane.dtype))
    return round_to(x * 30, plane.dtype).float() if plane.scaling == "static" else spread(x, plane, generator, WIDE)


def _numbers(x: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Values of a plane in the dtype in which they are compared: those that have scales in float32."""
    return x if plane.scaling == "none" else x.float()


def _layout(subject: Subject) -> CacheLayout:
    return cast("type[AttentionBackend]", subject.target).layout


def _stored(x: torch.Tensor, plane: Plane, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of ``x`` [T, K, D] in a cache, less a ``scale`` for all of them: rounded to its elements, and in
    float64."""
    if plane.scaling == "none":
        own = x.to(dtype_of(plane.dtype))
        return own, own
    if scale is None:
        return rounded(x, plane), x.double()
    elements = x.float() / scale
    if plane.scaling == "group":
        return rounded(elements, plane), elements.double()
    return round_to(elements, plane.dtype).float(), elements.double()


class StoreProbe:
    """``store`` of one backend: some tokens to slots of permuted pages, padding rows to the null page."""

    allocates = True

    def __init__(self, subject: Subject, row: Row, kind: CacheKind) -> None:
        self.subject, self._row, self._kind = subject, row, kind
        block = row["block_size"]
        self.spec = kind.spec(row, row["dtype"])
        self.num_tokens = min(_TOKENS[row["tokens"]], (_PAGES - 1) * block)
        self.title = f"store/{row['dtype']}/kv-{row['kv_dtype']}/{kind.title(row)}/block-{block}/"
        self.title += row["tokens"] + ("/padding" if row["padding"] else "") + ("/slack" if row["slack"] else "")
        self.title += "/static" if row.get("static_scales") else ""

    @cached_property
    def context(self) -> Context:
        """The build context of the backend."""
        spec = self.spec
        return self.subject.site.context(spec.dtype, kv_dtype=spec.kv_dtype, block_size=spec.block_size)

    @cached_property
    def backend(self) -> AttentionBackend | LatentBackend:
        """The backend."""
        made = cast(
            "AttentionBackend | LatentBackend",
            self.subject.target(self.context.for_plugin(self.subject.offer.plugin), self.spec),
        )
        self.context.resources.allocate(self.subject.site.device)
        if self._row.get("static_scales"):
            set_scales(cast(AttentionBackend, made), self.subject.site.device)
        return made

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
    ) -> Call:
        """See Probe. Compared is all that is cached on the pages that hold tokens, and on one that does not."""
        layout, spec, device = self.backend.layout, self.backend.cache_spec, self.subject.site.device
        block, generator = self.spec.block_size, torch.Generator().manual_seed(seed)
        size = layout.page_bytes(spec, block) + self._row["slack"] * max(layout.alignment, 16)
        free = self.subject.site.free_bytes if far else 0
        planes, own_planes = spec.planes, self.spec.cache_spec.planes  # an adapter may store wider heads
        names, first = [plane.name for plane in planes], planes[0]
        count = far_pages(size // element_bytes(first)) if far == "cache" else _PAGES
        pages = torch.cat([torch.arange(1, 4), torch.arange(count - 3, count)])  # near both ends
        rows = self.num_tokens + self._row["padding"]
        slots = torch.randperm(len(pages) * block, generator=generator)[: self.num_tokens]
        where = torch.cat(
            [pages[slots // block] * block + slots % block, torch.zeros(self._row["padding"], dtype=torch.int64)]
        )
        drawn = (spread(torch.randn(rows, *plane.shape, generator=generator), plane, generator) for plane in own_planes)
        new = [x.to(dtype_of(self.spec.dtype)) for x in drawn]
        if order is not None:
            *new, where = (x[torch.tensor(order)] for x in (*new, where))
        old = {plane.name: _logical((len(pages), block), plane, generator) for plane in planes}
        if far == "cache":
            buffer = empty(count * size, torch.uint8, device, free)
        else:
            buffer = place(torch.zeros(count * size, dtype=torch.uint8), device)
        views = layout.views(buffer, count, spec, block, size)
        layout.from_logical(views, pages.to(device), {name: x.to(device) for name, x in old.items()})
        scaled = first.scaling != "none"
        if scaled:  # what stays is what was there, rounded
            held = layout.to_logical(views, pages.to(device))
            old = {plane.name: _numbers(held[plane.name], plane).cpu() for plane in planes}
        placed = {
            name: place_far(x, device, free) if far == name else place(x, device, placement)
            for name, x in zip(names, new, strict=True)
        }
        placed_slots = place(where.to(torch.int32), device)
        scales = static_scales() if self._row.get("static_scales") else (None,) * len(planes)

        def written(slots: torch.Tensor) -> torch.Tensor:
            """Of the cached slots, those that are written to, in the order of tokens."""
            used = slots[slots != NULL_PAGE].long()
            return torch.searchsorted(pages, used // block) * block + used % block

        def parts(content: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """The slots that are written to, and the others: rounding errors of the first say nothing of the others."""
            flat, index = content.flatten(0, 1), index.to(content.device)
            others = torch.ones(len(flat), dtype=torch.bool, device=flat.device).index_fill_(0, index, False)
            return flat[index], flat[others]

        def state() -> Sequence[torch.Tensor]:
            content, index = self.backend.layout.to_logical(views, pages.to(device)), written(placed_slots.cpu())
            return [part for plane in planes for part in parts(_numbers(content[plane.name], plane), index)]

        def expect() -> Expected:
            wanted, index = [], written(where)
            for plane, x, scale in zip(planes, new, scales, strict=True):
                before, stored = old[plane.name], x[: len(index)] if order is None else x[where != NULL_PAGE]
                contents = []
                for values in _stored(stored, plane, scale):
                    content = before.flatten(0, 1).to(values.dtype)
                    content[index, ..., : x.shape[-1]] = values
                    content[index, ..., x.shape[-1] :] = 0
                    contents.append(parts(content.view(before.shape), index))
                name = _SAID.get(plane.name, plane.name)
                for said, own, true in zip((name, f"{name} of other slots"), *contents, strict=True):
                    wanted.append(Expectation(said, own, true))
            return Expected((), tuple(wanted))

        inputs = {**placed, "slot_mapping": placed_slots, **({"cache": buffer} if far != "cache" else {})}
        store: Callable[[Any], None] = self.backend.store
        call = self._kind.store_call(*placed.values(), views, placed_slots)
        return Call(
            inputs=tuple(Input(name, name, x) for name, x in inputs.items()),
            run=lambda: store(call),
            state=state,
            expect=expect,
            errors=ERRORS if scaled else ErrorModel(exact=True),
            before=cast(TrialResources, self.context.resources).spoil,
            mutates=frozenset({"cache"}),
        )

    def num_rows(self, call: Call) -> int:
        """Tokens, padding included."""
        return call.inputs[0].tensor.shape[0]

    def not_recorded(self) -> str | None:
        """Stores are recorded with the steps that call them."""
        return None if self.subject.capturable else "the target declares capturable = False"

    def far_inputs(self, call: Call) -> Sequence[str]:
        """The cache, and what is stored of the first plane where there are several tokens."""
        return ("cache", *([call.inputs[0].label] if self.num_tokens > 1 else []))
