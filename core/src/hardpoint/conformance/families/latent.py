"""Trials of latent attention: those of causal attention with one KV head, whose values are a part of its keys.

A backend of latent attention, in the absorbed form, does what one of causal attention does over keys that are latents
beside rotated keys, and values that are the latents alone. So an adapter makes one of the other, and requests, truth,
checks and their bounds are those of causal attention. ``store`` and the layout are tried as they are.

Where a backend claims index lists, some trials have them. Which positions a list has follows from its query's position
alone (``ListedSpan``), so that the truth, which is a masked attention, and the adapter agree on them.

Axes: T tokens, S positions of one request, H query heads, L latent size, R rope size, K positions of a list.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from hardpoint.conformance.families.attention import AttentionProbe, attention_trial
from hardpoint.conformance.families.attention_checks import declarations
from hardpoint.conformance.families.attention_situations import Situation, batch_names, block_sizes
from hardpoint.conformance.families.cache_layout import CacheKind, layout_trials
from hardpoint.conformance.families.scaled_cache import cache_dtypes
from hardpoint.conformance.families.steps import LONG, Request, expectations
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.ops.judge import Expectation
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    BuildContext,
    CacheLayout,
    CacheSpec,
    CaptureGrade,
    Contribution,
    Feature,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    Phase,
    Region,
    Span,
    StepLimits,
    StoreCall,
    Workload,
)

_HEADS = (4, 1, 16, 20, 128)
_LATENT_SIZES, _ROPE_SIZES = (16, 40, 512), (8, 64)
_MOST_ELEMENTS_OF_LONG = 2048
"""Elements of all heads' queries in batches that take the reference long."""
_MOST_SCORES, _JUDGED_HEADS = 1 << 20, 16
"""Of a step with more scores than this, over all heads, so many heads are judged: a prompt of 300 tokens with 128 heads
takes the reference half a minute for each draw. A fault of one head alone is seen there by some seeds, in smaller steps
by all."""
_EVEN = 16
_TOP_K = (0, 7, 64)
"""Positions of a list; 0: there are no lists. Contexts are shorter and longer than both, and as long as either."""
_VALUES = ("normal", "peaked", "flat", "large", "low", "nan")


class LatentTrials:
    """The generator of latent attention."""

    family = "attention"

    def serves(self, contribution: Contribution) -> bool:
        """All backends of that kind."""
        return contribution.of == "latent"

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """The declarations, the cache layout, then steps."""
        yield Trial("declared", (Check("declarations", partial(_declarations, subject), decisive=True),))
        sizes: dict[str, Sequence[Any]] = {
            "latent_size": _claimed(subject, "latent_size", _LATENT_SIZES),
            "rope_size": _claimed(subject, "rope_size", _ROPE_SIZES),
        }
        yield from layout_trials(subject, plan, block_sizes(subject), CacheKind(sizes, _spec, _title, LatentStoreCall))
        heads = [number for number in _HEADS if _takes(subject, number, sizes)] or _HEADS
        factors = {
            "dtype": subject.dtypes(),
            "kv_dtype": cache_dtypes(subject),
            "heads": heads,
            **sizes,
            "block_size": block_sizes(subject),
            "batch": batch_names(subject),
            "values": _VALUES,
            "top_k": _TOP_K if Feature.INDEX_LISTS in subject.features else (0,),
            "shared": (False, True),
            "padding": (0, 3),
            "slack": (0, 2),
        }
        smallest = min(sizes["latent_size"])
        senseless: Exclusions = {
            ("batch", "values"): _has_no_point,
            ("values", "top_k"): lambda values, top_k: values == "nan" and top_k > 0,  # few queries would read it
            ("batch", "heads"): lambda batch, number: batch in LONG and number > heads[0],
            ("batch", "latent_size"): lambda batch, size: batch in LONG and size > smallest,
            ("heads", "latent_size"): lambda number, size: number > heads[0] and number * size > _MOST_ELEMENTS_OF_LONG,
        }
        adapted = replace(subject, target=as_causal(subject.target))
        situations = map(LatentSituation.of, plan.combinations(factors, senseless))
        for number, situation in enumerate({situation.title: situation for situation in situations}.values()):
            seed = plan.seed_of(f"{subject.offer.contribution}/{situation.title}")
            yield attention_trial(LatentProbe(adapted, situation, seed), plan, number)


def _claimed(subject: Subject, key: str, some: Sequence[int]) -> Sequence[int]:
    return tuple(map(int, subject.claimed(key) or some))


def _takes(subject: Subject, heads: int, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the backend serves so many heads, in any of the dtypes and sizes that it claims."""
    factors = {**sizes, "kv_dtype": cache_dtypes(subject), "block_size": block_sizes(subject)}
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    specs = (_spec({**row, "heads": heads}, dtype) for row in rows for dtype in subject.dtypes())
    return any(subject.refuses(spec.workload()) is None for spec in specs)


def _has_no_point(batch: str, values: str) -> bool:
    """Nothing is left of few requests, of which one holds a NaN query and one a NaN key, which spoils whole results.

    Large batches and deep contexts are there for their sizes.
    """
    few = batch in ("one", "long") or batch.startswith("tokens ")
    return (few and values == "nan") or (batch in LONG and values not in ("normal", "flat"))


def _spec(row: Row, dtype: str) -> LatentSpec:
    heads, sizes = row.get("heads", 1), (row["latent_size"], row["rope_size"])
    scale = 1.3 * sum(sizes) ** -0.5  # not what a kernel would take if it ignored the scale it was given
    return LatentSpec(heads, *sizes, scale, dtype, row["kv_dtype"], row["block_size"], row.get("top_k") or None)


def _title(row: Row) -> str:
    return f"latent-{row['latent_size']}/rope-{row['rope_size']}"


def _declarations(subject: Subject) -> Finding:
    """``declarations``: those of causal attention that a latent backend declares, too."""
    target = subject.target
    if not (isinstance(target, type) and issubclass(target, LatentBackend)):
        return Finding.failed("declared", subject.offer.contribution.target, f"is no LatentBackend but {target!r}")
    return declarations(replace(subject, target=as_causal(target)))


@dataclass(frozen=True)
class SharedLatents(AttentionSpec):
    """``latent`` as a spec of causal attention over one head of L + R elements."""

    latent: LatentSpec | None = None

    @property
    def span(self) -> Span:
        """Which earlier positions a query reads."""
        top_k = None if self.latent is None else self.latent.top_k
        return Span() if top_k is None else ListedSpan(top_k=top_k)

    @classmethod
    def of(cls, latent: LatentSpec) -> SharedLatents:
        """The spec of the adapter."""
        return cls(
            num_heads=latent.num_heads,
            num_kv_heads=1,
            head_size=latent.latent_size + latent.rope_size,
            scale=latent.scale,
            dtype=latent.dtype,
            kv_dtype=latent.kv_dtype,
            block_size=latent.block_size,
            latent=latent,
        )


@dataclass(frozen=True)
class ListedSpan(Span):
    """All positions up to a query's own, of which it reads ``top_k`` at most: as good as random ones, and its own."""

    top_k: int = 1

    def hides(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """See Span. ``key`` are all positions from 0 on."""
        mixed = (query * 40503 + key * 25717 + (query ^ key) * 9973) % 65521
        rank = torch.where(key > query, 65522, torch.where(key == query, -1, mixed))
        order = rank.sort(dim=-1, stable=True).indices[..., : self.top_k]
        hidden = torch.ones(rank.shape, dtype=torch.bool, device=rank.device)
        return hidden.scatter(-1, order, False) | (key > query)

    def lists(self, query: torch.Tensor, length: int) -> torch.Tensor:
        """The lists of queries at positions ``query`` [T] below ``length``, int32 [T, K], as LatentCall has them."""
        key = torch.arange(max(length, self.top_k), device=query.device)
        hidden = self.hides(query[:, None].long(), key)
        found = torch.where(hidden, len(key), key).sort(dim=-1).values[:, : self.top_k]
        return found.masked_fill(found == len(key), -1).to(torch.int32)


@dataclass(frozen=True)
class LatentSituation(Situation):
    """The question of one trial to a backend of latent attention."""

    @classmethod
    def of(cls, row: Row) -> LatentSituation:
        """The situation of one combination of factors."""
        spec = SharedLatents.of(_spec(row, row["dtype"]))
        return cls(spec, row["batch"], row["values"], row["shared"], row["padding"], row["slack"])

    @property
    def title(self) -> str:
        """A short name, unique among situations."""
        latent = _latent(self.spec)
        sizes = f"latent-{latent.latent_size}/rope-{latent.rope_size}"
        sizes += f"/listed-{latent.top_k}" if latent.top_k else ""
        return super().title.replace(f"x1/size-{self.spec.head_size}/", f"/{sizes}/", 1)


class LatentProbe(AttentionProbe):
    """One backend of latent attention, adapted, in one situation."""

    @property
    def workload(self) -> Workload:
        """The workload that selects a backend."""
        return _latent(self.spec).workload()

    def __init__(self, subject: Subject, situation: Situation, seed: int) -> None:
        """See AttentionProbe. Where scores are many, few heads are judged, from one on that the seed draws.

        Memory that the trial itself takes is not the kernel's: the adapter makes lists of positions in the call, and
        has queries copied whose rows begin at no multiple of 16 elements, as none of an engine's layers do.
        """
        super().__init__(subject, situation, seed)
        heads = self.spec.num_heads
        self.allocates = _latent(self.spec).top_k is not None or heads * self.spec.head_size % _EVEN != 0
        scores = heads * sum(piece.query * piece.total for piece in self.pieces)
        step = 1 if scores <= _MOST_SCORES else max(heads // _JUDGED_HEADS, 1)
        self.judged = slice(seed % step, None, step)

    def outputs(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See AttentionProbe: of the heads that are judged."""
        return super().outputs(out[:, self.judged])

    def expected(
        self, requests: Sequence[Request], layer: int, held: Sequence[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> Sequence[Expectation]:
        """See AttentionProbe. Latent attention has no constants of heads."""
        few = [replace(request, q=request.q[:, self.judged]) for request in requests]
        spec = replace(self.spec, num_heads=few[0].q.shape[1])
        return expectations(spec, few, self.pieces, None, None, held)

    def requests(self, seed: int) -> list[Request]:
        """The requests of a seed: values are the latents, with the NaN that the values were to have."""
        size, found = _latent(self.spec).latent_size, []
        for request in super().requests(seed):
            keys = request.k.clone()
            keys[..., 0] = torch.where(request.v[..., 0].isnan(), request.v[..., 0], keys[..., 0])
            found.append(replace(request, k=keys, v=keys[..., :size]))
        return found


class LatentsAsKeys(CacheLayout):
    """A layout of latents, read as keys and values of one head: ``k`` [..., 1, L + R] and ``v`` [..., 1, L]."""

    def __init__(self, inner: CacheLayout) -> None:
        self._inner = inner
        self.name, self.alignment = inner.name, inner.alignment

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        return self._inner.regions(spec, block_size)

    def page_bytes(self, spec: CacheSpec, block_size: int) -> int:
        return self._inner.page_bytes(spec, block_size)

    def to_logical(self, views: Mapping[str, torch.Tensor], pages: torch.Tensor) -> dict[str, torch.Tensor]:
        planes = self._inner.to_logical(views, pages)
        latent, rope_key = (planes[name].float().unsqueeze(-2) for name in ("latent", "rope_key"))
        return {"k": torch.cat([latent, rope_key], dim=-1), "v": latent}

    def from_logical(
        self, views: Mapping[str, torch.Tensor], pages: torch.Tensor, planes: Mapping[str, torch.Tensor]
    ) -> None:
        latent, rope_key = planes["k"].squeeze(-2).split([planes["v"].shape[-1], views["rope_key"].shape[-1]], dim=-1)
        self._inner.from_logical(views, pages, {"latent": latent, "rope_key": rope_key})


@functools.cache
def as_causal(inner: Any) -> type[AttentionBackend]:
    """A backend of causal attention, for SharedLatents, of a class of latent attention."""

    class LatentAsCausal(AttentionBackend):
        layout, capture, traceable = LatentsAsKeys(inner.layout), inner.capture, inner.traceable
        exact_lengths = inner.exact_lengths

        def __init__(self, ctx: BuildContext, spec: AttentionSpec) -> None:
            super().__init__(ctx, spec)
            self._latent = _latent(spec)
            self._inner: LatentBackend = inner(ctx, self._latent)

        supports = inner.supports

        @property
        def cache_spec(self) -> CacheSpec:
            return self._inner.cache_spec

        def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
            return self._inner.grade(phase, tokens)

        def step_limits(self) -> StepLimits:
            return self._inner.step_limits()

        def store(self, call: StoreCall) -> None:
            self._inner.store(LatentStoreCall(*self._parts(call.k[:, 0]), call.cache, call.slot_mapping))

        def plan(self, batch: AttentionBatch) -> AttentionMetadata:
            return self._inner.plan(batch)

        def forward(self, call: AttentionCall) -> None:
            keys, lists = self._parts(call.k[:, 0]), self._lists(call)
            self._inner.forward(LatentCall(*self._parts(call.q), *keys, call.cache, call.metadata, call.out, lists))

        def _lists(self, call: AttentionCall) -> torch.Tensor | None:
            """The positions of the step's tokens, computed on the device; padding has none."""
            span, batch = self.spec.span, call.metadata.batch
            if not isinstance(span, ListedSpan):
                return None
            starts, tokens = batch.query_start, torch.arange(call.q.shape[0], device=call.q.device)
            requests = (torch.searchsorted(starts, tokens.int(), right=True) - 1).clamp(max=batch.num_requests - 1)
            positions = batch.seq_lens[requests] - starts[requests + 1] + tokens
            lists = span.lists(positions, batch.block_table.shape[1] * self.spec.block_size)
            return lists.masked_fill((tokens >= starts[-1])[:, None], -1)

        def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            latent, rope = x.split([self._latent.latent_size, self._latent.rope_size], dim=-1)
            return latent, rope

    LatentAsCausal.__name__ = f"{inner.__name__}AsCausal"
    return LatentAsCausal


def _latent(spec: AttentionSpec) -> LatentSpec:
    assert isinstance(spec, SharedLatents)
    assert spec.latent is not None
    return spec.latent
