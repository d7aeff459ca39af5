"""Trials of attention backends: every claimed dtype, head size, block size and feature, on every kind of batch.

The truth is ``attend``, the family's definition, in float64, over keys and values as the cache's dtype holds them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch

from hardpoint.attention.phases import sub_batch
from hardpoint.conformance.checks import ADVERSARIAL, kernel_checks
from hardpoint.conformance.families.attention_replay import UNUSED_REQUESTS, replay
from hardpoint.conformance.families.cache_layout import keys_and_values, layout_trials
from hardpoint.conformance.families.scaled_cache import cache_dtypes, clash, scalings, set_scales
from hardpoint.conformance.families.steps import (
    HIGH_SCORE,
    LONG,
    LOW_SCORES,
    Piece,
    PlacedStep,
    Request,
    Tables,
    batches,
    draw_constants,
    draw_requests,
    draw_tables,
    expectations,
    lay_out,
    pages_to_be_far,
    without_first_row,
)
from hardpoint.conformance.memory import Placement, poison
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.probe import run, same_bits
from hardpoint.conformance.site import Subject, TrialResources, limits_of
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.context import Context
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.judge import Call, Expected, Input, judge_call
from hardpoint.selection.ranges import tokens_in
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    CacheLayout,
    CaptureGrade,
    Contribution,
    Feature,
    NumericConventions,
    Reason,
    StepLimits,
    TokensRequirement,
    Workload,
)
from hardpoint_plugin_api.requirements import HeadMultipleRequirement

ERRORS = ErrorModel(scale="row", finest=2.0**-20)
"""The exponentials of vector units, torch's own on CPUs among them, are good to 20 bits or a few more."""
HEIGHTS = {"large": HIGH_SCORE, "low": -min(LOW_SCORES)}
"""How far all scores are from zero. A score of this height, rounded to float32 once, changes its weight by 2^-24 of it.
"""
_LOW_IN = ("decode", "mixed", "chunked", "prompt")
"""The batches in which scores are low."""
_MANY = ("dozens", "hundreds")
"""Batches of more requests than tiles of decodes have rows."""

_ANY_HEAD_SIZE = (16, 33, 64, 80, 96, 128, 256)
"""And one that is drawn."""
_ANY_BLOCK_SIZE = (1, 5, 16, 32, 128)
_HEADS = ((4, 2), (3, 3), (8, 1), (20, 4), (32, 1))
_MOST_HEADS_OF_LONG = 4
_PIECE = 512
"""Tokens of a prompt, where a step has as many tokens as a claim begins with."""
_MOST_CLAIMED = 2**15
_CONTRACT = NumericConventions()
_LSE_BASES = ("e", "2")


class AttentionTrials:
    """The generator of causal attention."""

    family = "attention"

    def serves(self, contribution: Contribution) -> bool:
        """All backends of that kind: they share one interface."""
        return contribution.of == "causal"

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """The declarations, the cache layout, then steps."""
        yield Trial("declared", (Check("conventions", partial(conventions, subject), decisive=True),))
        head_sizes = _head_sizes(subject, plan)
        yield from layout_trials(subject, plan, block_sizes(subject), keys_and_values(head_sizes))
        senseless: Exclusions = {
            ("batch", "values"): _has_no_point,
            ("batch", "heads"): lambda batch, heads: batch in LONG and heads[0] > _MOST_HEADS_OF_LONG,
            ("batch", "span"): lambda batch, span: batch == "deep" and span[0] != "all",
            ("batch", "head_size"): lambda batch, size: batch in _MANY and size != min(head_sizes),
            ("sinks", "values"): lambda sinks, values: sinks and values == "low",  # no weight is left beside the sink's
        }
        factors, excludes = _factors(subject, head_sizes), {**senseless}
        if True in scalings(subject):
            factors["static_scales"], excludes["kv_dtype", "static_scales"] = scalings(subject), clash
        rows = plan.combinations(factors, excludes)
        # Spans in blocks and in tokens may come to the same.
        situations = {situation.title: situation for situation in map(Situation.of, rows)}
        for number, situation in enumerate(situations.values()):
            seed = plan.seed_of(f"{subject.offer.contribution}/{situation.title}")
            yield attention_trial(AttentionProbe(subject, situation, seed), plan, number)


def _has_no_point(batch: str, values: str) -> bool:
    """Nothing is left of one NaN; a deep context is there for sums over many keys, not over few; many requests are
    there for their number.
    """
    plain = batch == "deep" or batch in _MANY
    low = values == "low" and batch not in _LOW_IN
    return (batch, values) == ("one", "nan") or low or (plain and values not in ("normal", "flat"))


def _factors(subject: Subject, head_sizes: Sequence[int]) -> dict[str, Sequence[Any]]:
    """What the backend claims, and what every backend must cope with."""

    def on_off(feature: Feature) -> Sequence[bool]:
        return (False, True) if feature in subject.features else (False,)

    spans: list[tuple[str, int]] = [("all", 0)]
    if Feature.SLIDING_WINDOW in subject.features:
        spans += [("window", 1), ("window", 5), ("window blocks", 1), ("window", 40)]
    if Feature.CHUNKED_LOCAL in subject.features:
        spans += [("chunk", 7), ("chunk blocks", 1), ("chunk", 40)]
    return {
        "dtype": subject.dtypes(),
        "kv_dtype": cache_dtypes(subject),
        "heads": _HEADS,
        "head_size": head_sizes,
        "block_size": block_sizes(subject),
        "span": spans,
        "soft_cap": on_off(Feature.SOFT_CAP),
        "sinks": on_off(Feature.SINKS),
        "alibi": on_off(Feature.ALIBI),
        "batch": batch_names(subject),
        "values": ("normal", "peaked", "flat", "large", "uneven", "low", "nan"),
        "shared": (False, True),
        "padding": (0, 3),
        "slack": (0, 2),
    }


def block_sizes(subject: Subject) -> Sequence[int]:
    """Tokens per page that are claimed, or some."""
    return tuple(map(int, subject.claimed("block_size") or _ANY_BLOCK_SIZE))


def _head_sizes(subject: Subject, plan: Plan) -> Sequence[int]:
    if claimed := subject.claimed("head_size"):
        return tuple(map(int, claimed))
    requires = subject.offer.contribution.requires
    multiple = next((r.multiple for r in requires if isinstance(r, HeadMultipleRequirement)), 1)
    drawn = random.Random(plan.seed).randint(34, 255)
    sizes = {-(-size // multiple) * multiple for size in (*_ANY_HEAD_SIZE, drawn)}
    return tuple(sorted({size for size in sizes if size <= 512} | {multiple if multiple > 1 else 16}))


def batch_names(subject: Subject) -> Sequence[str]:
    """Kinds of batches that the backend's range of tokens and its phase admit, and the ends of that range.

    Where it is preferred for some numbers of decodes, the ends of those ranges, too: it may be cut by them.
    """
    need = subject.tokens
    names = [name for name, pieces in batches(16).items() if _admits(need, pieces)]
    ends = sorted({need.min, need.max or need.min} if need != TokensRequirement() else ())
    preferred = [tokens_in(preference.requires) for preference in subject.offer.contribution.preferred]
    decodes = sorted({n for p in preferred if p.phase == "decode" for n in (p.min, p.max) if n and n <= _MOST_CLAIMED})
    return (
        *names,
        *(f"tokens {n}" for n in ends if 0 < n <= (4096 if n == need.max else _MOST_CLAIMED)),
        *(f"decodes {n}" for n in decodes if need.phase != "prefill" and need.min <= n <= (need.max or n)),
    )


def _admits(need: TokensRequirement, pieces: Sequence[Piece]) -> bool:
    tokens = sum(piece.query for piece in pieces)
    phases = {"decode" if piece.query == 1 else "prefill" for piece in pieces}
    return need.min <= tokens <= (need.max or tokens) and need.phase in (None, *(phases if len(phases) == 1 else ()))


@dataclass(frozen=True)
class Situation:
    """What one trial asks of a backend."""

    spec: AttentionSpec
    batch: str
    values: str
    shared: bool
    padding: int
    slack: int

    @classmethod
    def of(cls, row: Row) -> Situation:
        """The situation of one combination of factors."""
        kind, size = row["span"]
        size *= row["block_size"] if kind.endswith("blocks") else 1
        heads, kv_heads = row["heads"]
        spec = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=row["head_size"],
            scale=1.3 * row["head_size"] ** -0.5,  # not what a kernel would take if it ignored the scale it was given
            dtype=row["dtype"],
            kv_dtype=row["kv_dtype"],
            block_size=row["block_size"],
            window=size if kind.startswith("window") else None,
            chunk=size if kind.startswith("chunk") else None,
            soft_cap=2.0 if row["soft_cap"] else None,
            sinks=row["sinks"],
            alibi=row["alibi"],
            static_cache_scales=row.get("static_scales", False),
        )
        return cls(spec, row["batch"], row["values"], row["shared"], row["padding"], row["slack"])

    @property
    def title(self) -> str:
        """A short name, unique among situations."""
        spec = self.spec
        parts = [spec.dtype, f"kv-{spec.kv_dtype}", f"heads-{spec.num_heads}x{spec.num_kv_heads}"]
        parts += [f"size-{spec.head_size}", f"block-{spec.block_size}"]
        parts += ["static"] if spec.static_cache_scales else []
        parts += [f"window-{spec.window}"] if spec.window else []
        parts += [f"chunk-{spec.chunk}"] if spec.chunk else []
        parts += [f.value for f in (Feature.SOFT_CAP, Feature.SINKS, Feature.ALIBI) if f in spec.features]
        parts += [self.batch.replace(" ", "-"), self.values, *(["shared"] if self.shared else [])]
        parts += [f"padding-{self.padding}"] if self.padding else []
        return "/".join(parts + ([f"slack-{self.slack}"] if self.slack else []))

    def pieces(self, need: TokensRequirement, seed: int) -> tuple[Piece, ...]:
        """The requests of the step; "tokens N" are as many, in the phase that is needed, "decodes N" decodes."""
        kind, _, count = self.batch.partition(" ")
        if kind not in ("tokens", "decodes"):
            return batches(self.spec.block_size, seed)[self.batch]
        tokens = int(count)
        if "decode" in (need.phase, kind.removesuffix("s")) or (need.phase is None and tokens <= _PIECE):
            return tuple(Piece(1, 1 + 5 * i % 40) for i in range(tokens))
        whole, rest = divmod(tokens, _PIECE)
        return tuple(Piece(n, n + 5) for n in (*[_PIECE] * whole, *([rest] if rest else [])))


def attention_trial(probe: AttentionProbe, plan: Plan, number: int) -> Trial:
    """The checks of one situation."""
    title, seed = probe.situation.title, probe.seed
    if reason := probe.subject.refuses(probe.workload):
        return Trial(title, unsupported=reason, workload=probe.workload)
    own: dict[str, Callable[[AttentionProbe, int], Finding]] = {
        "group": group,
        "interleaved": interleaved,
        "sizes": sizes,
    }
    if not getattr(probe.subject.target, "exact_lengths", True):
        own["bounds"] = bounds
    checks = kernel_checks(probe, seed, plan, number, without=("replay",))
    if plan.includes(list(ADVERSARIAL).index("replay"), number):
        checks.append(Check("replay", partial(replay, probe, seed)))
    checks += [Check(name, partial(check, probe, seed)) for name, check in own.items() if plan.includes(number, 0)]
    if Feature.BATCH_INVARIANT in probe.subject.features:
        checks.append(Check("batch-invariant", partial(batch_invariant, probe, seed)))
    checks = [replace(check, run=partial(_within_limits, probe, check.run)) for check in checks]
    return Trial(title, checks, workload=probe.workload)


def _within_limits(probe: AttentionProbe, check: Callable[[], Finding]) -> Finding:
    """Make a check, unless the backend's own limits say that no step is like this."""
    reason = beyond(probe.limits, probe.pieces)
    return Finding(unsupported=reason) if reason else check()


def beyond(limits: StepLimits, pieces: Sequence[Piece]) -> Reason | None:
    """Why a step of these requests would never be scheduled."""
    tokens, longest = sum(p.query for p in pieces), max(p.total for p in pieces)
    for what, wanted, most in (
        ("tokens", tokens, limits.max_tokens),
        ("requests", len(pieces), limits.max_requests),
        ("positions", longest, limits.max_context),
    ):
        if most is not None and wanted > most:
            return Reason("step-limits", f"steps hold fewer {what}", wanted=str(wanted), supported=f"up to {most}")
    if not limits.mixed_phases and len({p.query == 1 for p in pieces}) > 1:
        return Reason("step-limits", "steps do not mix phases")
    ragged = [p for p in pieces if 1 < p.query < p.total and p.query % limits.chunk_multiple]
    if ragged:
        return Reason("step-limits", f"chunks are multiples of {limits.chunk_multiple} tokens", wanted=str(ragged[0]))
    return None


Drawn = tuple[int, tuple[int, ...] | None, int]
"""What a call's values depend on: seed, order of rows, layer."""


class AttentionProbe:
    """One backend in one situation. Two layers of it stand in one context, as in a model."""

    allocates = False

    def __init__(self, subject: Subject, situation: Situation, seed: int) -> None:
        """``seed`` draws what the case leaves open; it is the seed of the case's checks."""
        self.subject, self.situation, self.spec, self.seed = subject, situation, situation.spec, seed
        self.pieces = situation.pieces(subject.tokens, seed)
        self._expected: dict[Drawn, Expected] = {}

    @property
    def workload(self) -> Workload:
        """The workload that selects a backend."""
        return self.spec.workload()

    @cached_property
    def context(self) -> Context:
        """The build context of the layers."""
        spec, pieces = self.spec, self.pieces
        limits = limits_of(
            tokens=sum(piece.query for piece in pieces) + self.situation.padding,
            requests=len(pieces) + UNUSED_REQUESTS,
            length=max(piece.total for piece in pieces) + 2 * spec.block_size,  # of replays and bounds
        )
        return self.subject.site.context(spec.dtype, kv_dtype=spec.kv_dtype, block_size=spec.block_size, limits=limits)

    @cached_property
    def layers(self) -> tuple[AttentionBackend, AttentionBackend]:
        """Two layers of one group, each with constants of its own."""
        ctx = self.context.for_plugin(self.subject.offer.plugin)
        made = cast(
            "tuple[AttentionBackend, AttentionBackend]", tuple(self.subject.target(ctx, self.spec) for _ in range(2))
        )
        self.context.resources.allocate(self.subject.site.device)
        for number, (layer, constants) in enumerate(zip(made, self.constants, strict=True)):
            set_scales(layer, self.subject.site.device, number)
            layer.set_head_constants(*(None if x is None else x.to(self.subject.site.device) for x in constants))
        return made

    @cached_property
    def constants(self) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Sinks and slopes of each layer, on the host."""
        generator = torch.Generator().manual_seed(1)
        return [draw_constants(self.spec, generator) for _ in range(2)]

    @cached_property
    def limits(self) -> StepLimits:
        """What a step may hold with this backend on this platform."""
        return self.layers[0].step_limits().intersect(self.subject.site.platform.step_limits())

    def requests(self, seed: int) -> list[Request]:
        """The requests of a seed."""
        generator = torch.Generator().manual_seed(seed)
        return draw_requests(self.spec, self.pieces, generator, self.situation.values, self._shared)

    @property
    def first_is_undefined(self) -> bool:
        """Whether the first query holds a NaN: what becomes of it, the contract leaves open."""
        return self.situation.values == "nan"

    @property
    def _shared(self) -> int:
        """Positions of a common beginning, in whole blocks: about half of the longest context."""
        block = self.spec.block_size
        longest = max(piece.total - piece.query for piece in self.pieces)
        return max(block, longest // 2 // block * block) if self.situation.shared else 0

    def step(
        self,
        seed: int,
        requests: Sequence[Request],
        placement: Placement,
        far: str | None,
        layer: int = 0,
        room: Sequence[Sequence[Piece]] = (),
    ) -> PlacedStep:
        """Lay a step out, for one of the layers, in arrays that have ``room`` for steps of these requests, too."""
        backend, site = self.layers[layer], self.subject.site
        pages = pages_to_be_far(backend.layout, backend.cache_spec, self.spec.block_size) if far == "cache" else 0
        generator = torch.Generator().manual_seed(seed + 1)
        tables: Tables = draw_tables(self.spec, self.pieces, generator, self._shared, pages, room)
        buckets = self.limits.token_buckets
        tokens = sum(piece.query for piece in self.pieces)
        padding = next((b - tokens for b in buckets if b >= tokens), self.situation.padding)
        return lay_out(
            backend,
            self.pieces,
            requests,
            tables,
            site.device,
            placement=placement,
            far=far,
            padding=padding,
            slack=self.situation.slack * max(backend.layout.alignment, 16),
            free_bytes=site.free_bytes if far else 0,
        )

    def reshaped(self, pieces: tuple[Piece, ...]) -> AttentionProbe:
        """A probe of the same layers whose steps hold other requests."""
        assert self.layers  # which the copy then shares
        other = copy.copy(self)
        other.pieces, other._expected = pieces, {}
        return other

    def outputs(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The part of each request in ``out`` [T, H, D], without the query that nothing is expected of."""
        rows = sum(piece.query for piece in self.pieces)
        first, *rest = out[:rows].split([piece.query for piece in self.pieces])
        return (first[1:] if self.first_is_undefined else first, *rest)

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
        layer: int = 0,
    ) -> Call:
        """See Probe. ``layer`` says which of the two."""
        requests = self.requests(seed)
        if order is not None:
            rows = torch.cat([r.q for r in requests])[torch.tensor(order)]
            parts = rows.split([piece.query for piece in self.pieces])
            requests = [replace(r, q=q) for r, q in zip(requests, parts, strict=True)]
        drawn = (seed, None if order is None else tuple(order), layer)
        step, backend = self.step(seed, requests, placement, far, layer), self.layers[layer]
        return self.call_of(step, requests, lambda: backend.plan(step.batch), drawn, whole=far != "cache")

    def call_of(
        self,
        step: PlacedStep,
        requests: Sequence[Request],
        plan: Callable[[], AttentionMetadata],
        drawn: Drawn,
        whole: bool = True,
    ) -> Call:
        """The call of a step that is laid out; ``plan`` makes its metadata, ``drawn`` is what ``requests`` are from."""
        layer = drawn[2]
        backend, planned = self.layers[layer], list[AttentionMetadata]()

        def make_plan() -> object:
            planned[:] = [plan()]
            return planned[0].token

        def forward() -> object:
            backend.forward(AttentionCall(step.q, step.k, step.v, step.cache, planned[0], step.out))
            return self.outputs(step.out)

        def expect() -> Expected:
            if drawn not in self._expected:  # most checks of a trial draw the same inputs
                first, *rest = expectations(self.spec, requests, self.pieces, *self.constants[layer], step.held)
                first = without_first_row(first) if self.first_is_undefined else first
                self._expected[drawn] = Expected((first, *rest))
            return self._expected[drawn]

        def before() -> None:
            poison([step.out])
            cast(TrialResources, self.context.resources).spoil()

        batch = step.batch
        tensors = {"q": step.q, "k": step.k, "v": step.v, "out": step.out, **({"cache": step.buffer} if whole else {})}
        tensors |= {n: getattr(batch, n) for n in ("query_start", "seq_lens", "block_table", "slot_mapping")}
        return Call(
            inputs=tuple(Input(name, name, x) for name, x in tensors.items()),
            plan=make_plan,
            run=forward,
            idle=partial(self.outputs, step.out),
            before=before,
            expect=expect,
            errors=replace(ERRORS, finest=max(ERRORS.finest, HEIGHTS.get(self.situation.values, 0.0) * 2.0**-24)),
            mutates=frozenset({"out"}),
            aliases=frozenset((i, "out") for i in range(len(self.pieces))),
        )

    def num_rows(self, call: Call) -> int:
        """The tokens of the step."""
        return sum(piece.query for piece in self.pieces) if self.situation.padding == 0 else 0

    def not_recorded(self) -> str | None:
        """By the grade that the backend claims: single-token steps, steps of as many tokens per request, or any."""
        grade = self.layers[0].capture
        counts = {piece.query for piece in self.pieces}
        recorded = {
            CaptureGrade.NEVER: False,
            CaptureGrade.SINGLE_TOKEN: counts == {1},
            CaptureGrade.UNIFORM: len(counts) == 1,
            CaptureGrade.ANY: True,
        }[grade]
        return None if recorded else f"its capture grade is {grade.name}"

    def far_inputs(self, call: Call) -> Sequence[str]:
        """The cache always; queries where there are several."""
        return ("cache", *(["q"] if call.inputs[0].tensor.shape[0] > 1 else []))


# Checks that only attention has.


def conventions(subject: Subject) -> Finding:
    """``conventions``: what the class declares is of the contract's types, and named as the manifest names it."""
    target, contribution = subject.target, subject.offer.contribution
    if not (isinstance(target, type) and issubclass(target, AttentionBackend)):
        return Finding.failed("declared", contribution.target, f"is no AttentionBackend but {target!r}")
    declared: Any = target.conventions  # whatever a plugin gives
    layout: Any = getattr(target, "layout", None)
    if not isinstance(layout, CacheLayout):
        return Finding.failed("declared", "layout", f"is no CacheLayout but {layout!r}")
    if layout.name != contribution.layout:
        message = f"the class says {layout.name!r}, the manifest {contribution.layout!r}"
        return Finding.failed("layout-name", "layout", message)
    capture: Any = target.capture
    if not isinstance(capture, CaptureGrade):
        return Finding.failed("declared", "capture", f"is no CaptureGrade but {capture!r}")
    if not isinstance(declared, NumericConventions) or declared.lse_base not in _LSE_BASES:
        return Finding.failed("declared", "conventions", f"are not of the contract: {declared!r}")
    if declared.causal_alignment != _CONTRACT.causal_alignment:
        message = f"{declared.causal_alignment!r} is declared; queries are the newest tokens, so the contract's is "
        return Finding.failed("declared", "causal_alignment", f"{message}{_CONTRACT.causal_alignment!r}")
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
    that is computed as a decode.
    """
    requests = probe.requests(seed)
    step, backend = probe.step(seed, requests, Placement.AS_DRAWN, None), probe.layers[0]
    whole = run(probe.call_of(step, requests, lambda: backend.plan(step.batch), (seed, None, 0)))
    for i, piece in enumerate(probe.pieces):
        with torch.inference_mode():
            alone = _alone(backend, step, i)
            last = _alone(backend, step, i, last_only=True)
        where = f"request {i} ({piece.query} of {piece.total})"
        if not same_bits([whole[i]], [alone[1:] if i == 0 and probe.first_is_undefined else alone]):
            return Finding.failed("batch-variant", where, "has other bits by itself than in the batch")
        if piece.query > 1 and _decodes(probe) and not same_bits([alone[-1:]], [last]):
            return Finding.failed("batch-variant", where, "its last token has other bits when it is decoded")
    return Finding()


def _decodes(probe: AttentionProbe) -> bool:
    """Whether the contribution serves a step of one decode."""
    return _admits(probe.subject.tokens, (Piece(1, 2),))


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
