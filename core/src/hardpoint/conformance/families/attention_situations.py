"""The situations in which attention backends are tried: what they claim, and what every backend must cope with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.conformance.families.scaled_cache import cache_dtypes
from hardpoint.conformance.families.steps import LONG, Piece, batches
from hardpoint.conformance.plan import Exclusions, Plan, Row
from hardpoint.conformance.site import Subject
from hardpoint.selection.ranges import tokens_in
from hardpoint_plugin_api import AttentionSpec, Feature, Reason, StepLimits, TokensRequirement
from hardpoint_plugin_api.requirements import HeadMultipleRequirement

_LOW_IN = ("decode", "mixed", "chunked", "prompt")
"""The batches in which scores are low."""
_MANY = ("dozens", "hundreds")
"""Batches of more requests than tiles of decodes have rows."""

_ANY_HEAD_SIZE = (16, 33, 64, 80, 96, 128, 256)
"""And one that is drawn."""
_ANY_BLOCK_SIZE = (1, 5, 16, 32, 128)
_HEADS = ((4, 2), (3, 3), (8, 1), (20, 4), (32, 1), (32, 8))
"""Heads of queries and of keys; one more pair is drawn."""
_PIECE = 512
"""Tokens of a prompt, where a step has as many tokens as a claim begins with."""
_MOST_CLAIMED = 2**15
_MOST_HEADS_OF_LONG = 4


def _has_no_point(batch: str, values: str) -> bool:
    """Nothing is left of one NaN; a deep context is there for sums over many keys, not over few; many requests are
    there for their number.
    """
    plain = batch == "deep" or batch in _MANY
    low = values == "low" and batch not in _LOW_IN
    return (batch, values) == ("one", "nan") or low or (plain and values not in ("normal", "flat"))


def senseless(sizes_of_heads: Sequence[int]) -> Exclusions:
    """Combinations of factors that would test nothing, or take too long."""
    return {
        ("batch", "values"): _has_no_point,
        ("batch", "heads"): lambda batch, heads: batch in LONG and heads[0] > _MOST_HEADS_OF_LONG,
        ("batch", "span"): lambda batch, span: batch == "deep" and span[0] != "all",
        ("batch", "head_size"): lambda batch, size: batch in _MANY and size != min(sizes_of_heads),
        ("sinks", "values"): lambda sinks, values: sinks and values == "low",  # no weight is left beside the sink's
    }


def factors(subject: Subject, head_sizes: Sequence[int], seed: int) -> dict[str, Sequence[Any]]:
    """Situations that the backend claims, and situations that every backend must serve."""

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
        "heads": (*_HEADS, _drawn_heads(seed)),
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


def _drawn_heads(seed: int) -> tuple[int, int]:
    """From 5 to 16 heads of keys, each for 2 to 4 of queries."""
    draw = random.Random(seed)
    keys = draw.randint(5, 16)
    return keys * draw.randint(2, 4), keys


def block_sizes(subject: Subject) -> Sequence[int]:
    """Tokens per page that are claimed, or some."""
    return tuple(map(int, subject.claimed("block_size") or _ANY_BLOCK_SIZE))


def head_sizes(subject: Subject, plan: Plan) -> Sequence[int]:
    """Head sizes that are claimed, or some; one of them is drawn."""
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
    names = [name for name, pieces in batches(16).items() if admits(need, pieces)]
    ends = sorted({need.min, need.max or need.min} if need != TokensRequirement() else ())
    preferred = [tokens_in(preference.requires) for preference in subject.offer.contribution.preferred]
    decodes = sorted({n for p in preferred if p.phase == "decode" for n in (p.min, p.max) if n and n <= _MOST_CLAIMED})
    return (
        *names,
        *(f"tokens {n}" for n in ends if 0 < n <= (4096 if n == need.max else _MOST_CLAIMED)),
        *(f"decodes {n}" for n in decodes if need.phase != "prefill" and need.min <= n <= (need.max or n)),
    )


def admits(need: TokensRequirement, pieces: Sequence[Piece]) -> bool:
    """Whether a contribution for such steps serves one of these requests."""
    tokens = sum(piece.query for piece in pieces)
    phases = {"decode" if piece.query == 1 else "prefill" for piece in pieces}
    return need.min <= tokens <= (need.max or tokens) and need.phase in (None, *(phases if len(phases) == 1 else ()))


@dataclass(frozen=True)
class Situation:
    """The situation of one trial."""

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
