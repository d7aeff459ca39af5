"""Attention backends beside each other, on batches that a short text describes.

Axes: T tokens of a step, S tokens of a request, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import click
import torch

from hardpoint.attention.phases import PhasedBackend
from hardpoint.bench.device_timer import DeviceTimer, Run
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.engine.blueprint import draw
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import construct
from hardpoint.resources import EngineResources
from hardpoint.selection import Settings
from hardpoint.selection.selector import Selector
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionSpec,
    ConfigError,
    Reason,
    SelectionError,
    StoreCall,
)

_PIECE = re.compile(r"(?P<count>\d*)q(?P<query>\d+k?)(?:s(?P<total>\d+k?))?")
_WORKING_SET = 256 * 2**20
_MOST_RUNS = 64
"""Layers that are gone through in turn: with a batch of a few tokens, it would take very many to exceed the caches."""


@dataclass(frozen=True)
class Requests:
    """``count`` requests alike: ``query`` new tokens at the end of ``total``."""

    count: int
    query: int
    total: int

    @property
    def num_reads(self) -> int:
        """Pairs of a query and a key that it reads, of one request, if it reads all of them."""
        return self.query * (self.total - self.query) + self.query * (self.query + 1) // 2


def parse_batch(text: str) -> tuple[Requests, ...]:
    """Read "8q1s4k_2q512": 8 requests with 1 query and 4,096 tokens in all, 2 prompts of 512. Raises ConfigError.

    Decodes come first, as in a step.
    """
    found = []
    for part in text.split("_"):
        match = _PIECE.fullmatch(part)
        if not match:
            raise ConfigError(
                f"{part!r} in the batch {text!r} is not COUNTqQUERYsTOTAL, such as 8q1s4k or 2q512 (k for 1024)"
            )
        query = _number(match["query"])
        one = Requests(int(match["count"] or 1), query, _number(match["total"]) if match["total"] else query)
        if not 0 < one.query <= one.total or not one.count:
            raise ConfigError(f"{part!r} in the batch {text!r}: a request has a query, and no more than it has tokens")
        found.append(one)
    return tuple(sorted(found, key=lambda one: one.query > 1))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"--only {text!r} is no regular expression: {error}") from error


def _number(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


@click.argument("batches", nargs=-1)
@click.option(
    "--platform", default=None, help="Kind of device to run on. Default: an accelerator if one is found, else cpu."
)
@click.option("--only", default="", metavar="REGEX", help="Measure only backends with a name that matches.")
@click.option("--heads", default=32, show_default=True, type=click.IntRange(min=1), help="Number of query heads.")
@click.option(
    "--kv-heads", default=8, show_default=True, type=click.IntRange(min=1), help="Number of key and value heads."
)
@click.option("--head-size", default=128, show_default=True, type=click.IntRange(min=1), help="Size of a head.")
@click.option(
    "--block-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens of a page of the KV cache."
)
@click.option(
    "--window",
    default=None,
    type=click.IntRange(min=1),
    help="Size of the sliding window in tokens. Default: full attention.",
)
@click.option("--dtype", default="bfloat16", show_default=True, help="Data type of queries.")
@click.option("--kv-cache-dtype", default=None, help="Data type of keys and values. Default: that of queries.")
@click.option("--variants", is_flag=True, help="Measure each backend with all of its tunings, not its default alone.")
@click.option(
    "--rounds", default=9, show_default=True, type=click.IntRange(min=3), help="Rounds to measure; the median counts."
)
@benchmark("attention", "Attention backends on batches of your own.")
def attention(
    batches: Sequence[str],
    platform: str | None,
    only: str,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    window: int | None,
    dtype: str,
    kv_cache_dtype: str | None,
    variants: bool,
    rounds: int,
) -> BenchResult:
    """Run every attention backend that serves on BATCHES, such as 8q1s4k, 2q512 or 4q1s1k_q2k.

    A batch is requests, joined by _: their number, q and their new tokens, s and their tokens in all (k for 1024);
    without s, they are whole prompts. A batch that reads more than it computes is judged by its bytes: keys and values,
    queries and results; the others by their multiplications, two for each pair of a query and a key that it reads.
    """
    settings = {"platform": platform} if platform else {}
    blueprint = draw(EngineConfig.create(model="demo", dtype=dtype, **settings))
    wanted = _pattern(only)
    if heads % kv_heads:
        raise ConfigError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    kv_dtype = kv_cache_dtype or dtype
    dtype_of(kv_dtype)  # refuses what is none, before backends are asked
    spec = AttentionSpec(heads, kv_heads, head_size, head_size**-0.5, dtype, kv_dtype, block_size, window)
    ctx, timer = blueprint.ctx, DeviceTimer(blueprint.platform, blueprint.ctx.torch_device, _WORKING_SET)
    parsed = {text: parse_batch(text) for text in batches or ("q1s512", "8q1s4k", "64q1s2k", "32q512", "q4k")}
    rows = []
    with torch.inference_mode():
        serving = _serving(ctx, spec, variants)
        backends = [b for b in serving if wanted.search(b.name)]
        if not backends:
            names = ", ".join(b.name for b in serving)
            raise ConfigError(f"--only {only}: found in the name of no attention backend that serves here: {names}")
        ceilings = timer.read_speed(rounds), timer.product_speed(rounds)
        peer_dtype = timer.dtype_at_speed(dtype_of(spec.dtype))
        for text, requests in parsed.items():
            work = _Work.of(spec, requests)
            dense = _dense(spec, requests, ctx.torch_device, peer_dtype, work.copies) if not window else None
            peer = timer.seconds(dense, rounds) if dense else None
            for candidate in backends:
                runs = _runs(candidate.backend, spec, requests, ctx.torch_device, work.copies)
                seconds = timer.seconds(runs, rounds)
                rows.append(work.row(f"{text} {candidate.name}", seconds, ceilings, peer))
                del runs
    return BenchResult(
        "attention",
        tuple(rows),
        roofline=f"torch's sum over as many bytes, or {timer.product}",
        peer=f"torch's scaled_dot_product_attention in {dtype_name(peer_dtype)}, keys and values side by side",
    )


@dataclass(frozen=True)
class _Work:
    """What a batch reads and writes, in bytes, and computes; and in how many copies it exceeds the caches."""

    nbytes: int
    flops: int
    copies: int

    @classmethod
    def of(cls, spec: AttentionSpec, batch: Sequence[Requests]) -> _Work:
        pairs = keys = tokens = 0
        for requests in batch:
            read = min(requests.total, (spec.window or requests.total) + requests.query - 1)
            hidden = 0 if spec.window is None else _beyond(requests, spec.window)
            pairs += requests.count * (requests.num_reads - hidden)
            keys += requests.count * read
            tokens += requests.count * requests.query
        cached = 2 * keys * spec.num_kv_heads * spec.head_size * dtype_of(spec.kv_dtype).itemsize
        nbytes = cached + 2 * tokens * spec.num_heads * spec.head_size * dtype_of(spec.dtype).itemsize
        return cls(nbytes, 4 * pairs * spec.num_heads * spec.head_size, min(_MOST_RUNS, -(-_WORKING_SET // nbytes)))

    def row(self, name: str, seconds: float, ceilings: tuple[float, float], peer: float | None) -> BenchRow:
        """The rate by what bounds it: bytes or multiplications."""
        note = f"{seconds * 1e6:,.1f} us"
        reads = self.nbytes / ceilings[0] > self.flops / ceilings[1]
        amount, unit, ceiling = (self.nbytes, "GB/s", ceilings[0]) if reads else (self.flops, "GFLOP/s", ceilings[1])
        theirs = amount / peer / 1e9 if peer else None
        return BenchRow(name, amount / seconds / 1e9, unit, ceiling / 1e9, theirs, better="higher", note=note)


def _beyond(requests: Requests, window: int) -> int:
    """Pairs of one request that a window hides."""
    first, last = requests.total - requests.query + 1, requests.total  # keys up to and with each query
    hidden = [max(0, first - window), max(0, last - window)]
    count = min(requests.query, hidden[1])
    return (hidden[1] + max(hidden[0], 1 if hidden[1] else 0)) * count // 2


@dataclass(frozen=True)
class _Candidate:
    """A backend that serves, by the name to be shown."""

    name: str
    backend: AttentionBackend


def _serving(ctx: Context, spec: AttentionSpec, variants: bool) -> list[_Candidate]:
    """The backends that this device and spec admit, and where asked for, their other tunings.

    Raises SelectionError, with the reasons against each, where there is none.
    """
    serving: list[_Candidate] = []
    rejected: dict[str, Sequence[Reason]] = {}
    for offer in ctx.plugins.offers("attention", "causal"):
        name = offer.contribution.name
        asked = Settings({"attention": name})
        chosen = replace(
            ctx,
            selector=Selector(ctx.plugins, ctx.device, asked, load=ctx.load),
            resources=EngineResources(),
            kv_dtype=spec.kv_dtype,
            block_size=spec.block_size,
        )
        try:
            plan = chosen.select(spec.workload())
        except SelectionError as error:
            rejected |= error.rejected
            continue
        parts = [(e.range, construct(e.offer, ctx.load(e.offer), AttentionBackend, chosen, spec)) for e in plan.entries]
        built = [_Candidate(name, parts[0][1] if len(parts) == 1 else PhasedBackend(chosen, spec, parts))]
        if variants:
            built += _variants(offer, chosen, spec)
        chosen.resources.allocate(ctx.torch_device)
        serving += built
    if not serving:
        workload = spec.workload().key()
        raise SelectionError(f"nothing can serve attention ({workload}) on {ctx.device.name}", rejected)
    return serving


def _variants(offer: Offer, ctx: Context, spec: AttentionSpec) -> Iterator[_Candidate]:
    """A backend's other tunings: classes like it, by name, under its ``variants``."""
    target = ctx.load(offer)
    for name, kind in getattr(target, "variants", dict)().items():
        yield _Candidate(f"{offer.contribution.name} {name}", cast(Callable[..., AttentionBackend], kind)(ctx, spec))


def _runs(
    backend: AttentionBackend, spec: AttentionSpec, batch: Sequence[Requests], device: torch.device, copies: int
) -> list[Run]:
    """Calls of ``forward`` as a step makes them: planned once, and for each of ``copies`` layers with its own cache."""
    each = [(one.query, one.total) for one in batch for _ in range(one.count)]
    block, dtype = spec.block_size, dtype_of(spec.dtype)
    needed = [-(-total // block) for _, total in each]
    table, at = torch.zeros(len(each), max(needed), dtype=torch.int32), 0
    ids = (torch.randperm(sum(needed)) + 1).int()
    for row, count in zip(table, needed, strict=True):
        row[:count] = ids[at : at + count]
        at += count
    starts = torch.tensor([0, *(query for query, _ in each)]).cumsum(0)
    totals = torch.tensor([total for _, total in each])
    metadata = backend.plan(
        AttentionBatch(
            query_start=starts.int().to(device),
            seq_lens=totals.int().to(device),
            block_table=table.to(device),
            slot_mapping=(slots := _slots(table, each, block).to(device)),
            query_start_host=tuple(starts.tolist()),
            seq_lens_host=tuple(totals.tolist()),
            num_decodes=sum(query == 1 for query, _ in each),
        )
    )
    q, k, v = (
        torch.randn(len(slots), heads, spec.head_size, device=device).to(dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    out = torch.empty_like(q)
    pages = sum(needed) + 1
    size = backend.layout.page_bytes(backend.cache_spec, block)
    runs: list[Run] = []
    for _ in range(copies):
        buffer = torch.randint(0, 60, (pages * size,), dtype=torch.uint8, device=device)  # near zero in any dtype
        cache = backend.layout.views(buffer, pages, backend.cache_spec, block)
        backend.store(StoreCall(k, v, cache, slots))
        runs.append(partial(backend.forward, AttentionCall(q, k, v, cache, metadata, out)))
    return runs


def _slots(table: torch.Tensor, each: Sequence[tuple[int, int]], block: int) -> torch.Tensor:
    found = []
    for row, (query, total) in zip(table, each, strict=True):
        position = torch.arange(total - query, total)
        found.append(row[position // block] * block + position % block)
    return torch.cat(found).int()


def _dense(
    spec: AttentionSpec, batch: Sequence[Requests], device: torch.device, dtype: torch.dtype, copies: int
) -> list[Run]:
    """Torch's own attention, one call for requests alike."""
    size = spec.head_size

    def call(one: Requests) -> Run:
        q = torch.randn(one.count, spec.num_heads, one.query, size, device=device).to(dtype)
        k, v = torch.randn(2, one.count, spec.num_kv_heads, one.total, size, device=device).to(dtype)
        mask = None
        if 1 < one.query < one.total:
            mask = torch.ones(one.query, one.total, dtype=torch.bool, device=device).tril(one.total - one.query)
        return partial(
            torch.nn.functional.scaled_dot_product_attention,
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=one.query == one.total > 1,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )

    return [partial(_all, [call(one) for one in batch]) for _ in range(copies)]


def _all(runs: Sequence[Run]) -> None:
    for run in runs:
        run()
