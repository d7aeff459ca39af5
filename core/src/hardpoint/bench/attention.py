"""Attention backends beside each other, on batches that a short text describes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
import torch

from hardpoint.bench.attention_kinds import CausalKind, Kind, LatentKind, Requests
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
from hardpoint_plugin_api import NVFP4, AttentionBatch, AttentionSpec, ConfigError, LatentSpec, Reason, SelectionError

logger = logging.getLogger(__name__)

_PIECE = re.compile(r"(?P<count>\d*)q(?P<query>\d+k?)(?:s(?P<total>\d+k?))?")
_WORKING_SET = 256 * 2**20
_MOST_RUNS = 64
"""Layers that are gone through in turn: with a batch of a few tokens, it would take very many to exceed the caches."""


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
@click.option(
    "--kind",
    "kind_of",
    default="causal",
    show_default=True,
    type=click.Choice(["causal", "latent"]),
    help="Kind of attention: causal (--kv-heads, --head-size, --window) or latent (--latent-size, --rope-size).",
)
@click.option("--only", default="", metavar="REGEX", help="Measure only backends with a name that matches.")
@click.option("--heads", default=32, show_default=True, type=click.IntRange(min=1), help="Number of query heads.")
@click.option(
    "--kv-heads", default=8, show_default=True, type=click.IntRange(min=1), help="Number of key and value heads."
)
@click.option("--head-size", default=128, show_default=True, type=click.IntRange(min=1), help="Size of a head.")
@click.option(
    "--latent-size", default=512, show_default=True, type=click.IntRange(min=1), help="Size of a token's latent."
)
@click.option(
    "--rope-size", default=64, show_default=True, type=click.IntRange(min=1), help="Size of a token's rotated key."
)
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
    kind_of: str,
    only: str,
    heads: int,
    kv_heads: int,
    head_size: int,
    latent_size: int,
    rope_size: int,
    block_size: int,
    window: int | None,
    dtype: str,
    kv_cache_dtype: str | None,
    variants: bool,
    rounds: int,
) -> BenchResult:
    """Run every attention backend that serves on BATCHES, such as 8q1s4k, 2q512 or 4q1s1k_q2k.

    A batch is requests, joined by _: their number, q and their new tokens, s and their tokens in all (k for 1024);
    without s, they are whole prompts. Latent attention is measured in its absorbed form. A batch that reads more than
    it computes is judged by its bytes: keys and values, queries and results; the others by their multiplications, two
    for each pair of a query and a key that it reads.
    """
    settings = {"platform": platform} if platform else {}
    blueprint = draw(EngineConfig.create(model="demo", dtype=dtype, **settings))
    wanted = _pattern(only)
    dtypes = dtype, kv_cache_dtype or dtype
    if kv_cache_dtype != NVFP4:
        dtype_of(dtypes[1])  # refuses what is none, before backends are asked
    if kind_of == "latent":
        size = latent_size + rope_size
        kind: Kind = LatentKind(LatentSpec(heads, latent_size, rope_size, size**-0.5, *dtypes, block_size))
    else:
        if heads % kv_heads:
            raise ConfigError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
        spec = AttentionSpec(heads, kv_heads, head_size, head_size**-0.5, *dtypes, block_size, window)
        kind = CausalKind(spec)
    ctx, timer = blueprint.ctx, DeviceTimer(blueprint.platform, blueprint.ctx.torch_device, _WORKING_SET)
    parsed = {text: parse_batch(text) for text in batches or ("q1s512", "8q1s4k", "64q1s2k", "32q512", "q4k")}
    rows = []
    with torch.inference_mode():
        serving = _serving(ctx, kind, variants)
        backends = [b for b in serving if wanted.search(b.name)]
        if not backends:
            names = ", ".join(b.name for b in serving if not b.is_variant)
            raise ConfigError(f"--only {only}: found in the name of no attention backend that serves here: {names}")
        ceilings = timer.read_speed(rounds), timer.product_speed(rounds)
        peer_dtype = timer.dtype_at_speed(dtype_of(dtype))
        for text, requests in parsed.items():
            work = _Work.of(kind, requests)
            peer = None if window else _peer_seconds(kind, requests, timer, ctx.torch_device, peer_dtype, rounds, work)
            for candidate in backends:
                runs = _runs(candidate.backend, kind, requests, ctx.torch_device, work.copies)
                try:
                    seconds = timer.seconds(runs, rounds)
                except Exception as error:
                    if not candidate.is_variant:
                        raise
                    logger.warning("left out: %s %s: %s", text, candidate.name, str(error).strip().splitlines()[0])
                else:
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
    """The work of a batch: bytes read and written, operations, and the number of copies that exceed the caches."""

    nbytes: int
    flops: int
    copies: int

    @classmethod
    def of(cls, kind: Kind, batch: Sequence[Requests]) -> _Work:
        nbytes = flops = 0
        for requests in batch:
            pairs, keys = kind.reads(requests)
            flops += requests.count * pairs * kind.pair_flops
            nbytes += requests.count * (keys * kind.key_bytes + requests.query * kind.query_bytes)
        return cls(nbytes, flops, min(_MOST_RUNS, -(-_WORKING_SET // nbytes)))

    def row(self, name: str, seconds: float, ceilings: tuple[float, float], peer: float | None) -> BenchRow:
        """The rate by what bounds it: bytes or multiplications."""
        note = f"{seconds * 1e6:,.1f} us"
        reads = self.nbytes / ceilings[0] > self.flops / ceilings[1]
        amount, unit, ceiling = (self.nbytes, "GB/s", ceilings[0]) if reads else (self.flops, "GFLOP/s", ceilings[1])
        theirs = amount / peer / 1e9 if peer else None
        return BenchRow(name, amount / seconds / 1e9, unit, ceiling / 1e9, theirs, better="higher", note=note)


@dataclass(frozen=True)
class _Candidate:
    """A backend that serves, by the name to be shown. A variant's tuning may not fit the device."""

    name: str
    backend: Any
    is_variant: bool = False


def _peer_seconds(
    kind: Kind,
    requests: Sequence[Requests],
    timer: DeviceTimer,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    work: _Work,
) -> float | None:
    """Seconds of torch's attention over the batch. None, with a warning, where it takes more memory than there is."""
    try:
        calls = [kind.dense(one, device, dtype) for one in requests]
        return timer.seconds([partial(_all, calls) for _ in range(work.copies)], rounds)
    except torch.OutOfMemoryError as error:
        logger.warning("no peer for a batch: torch's attention ran out of memory: %s", str(error).split(". ")[0])
        return None


def _serving(ctx: Context, kind: Kind, variants: bool) -> list[_Candidate]:
    """The backends that this device and kind admit, and where asked for, their other tunings.

    Raises SelectionError, with the reasons against each, where there is none.
    """
    spec = kind.spec
    serving: dict[tuple[Offer, ...], list[_Candidate]] = {}  # several plugins may offer kernels of one name
    rejected: dict[str, Sequence[Reason]] = {}
    for offer in ctx.plugins.offers("attention", kind.of):
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
        chosen_offers = tuple(entry.offer for entry in plan.entries)
        if chosen_offers in serving:
            continue
        parts = [(e.range, construct(e.offer, ctx.load(e.offer), kind.backend, chosen, spec)) for e in plan.entries]
        built = [_Candidate(name, parts[0][1] if len(parts) == 1 else kind.joined(chosen, spec, parts))]
        if variants:
            built += _variants(offer, chosen, spec)
        chosen.resources.allocate(ctx.torch_device)
        serving[chosen_offers] = built
    if not serving:
        workload = spec.workload().key()
        raise SelectionError(f"nothing can serve attention {kind.of} ({workload}) on {ctx.device.name}", rejected)
    return [candidate for built in serving.values() for candidate in built]


def _variants(offer: Offer, ctx: Context, spec: Any) -> Iterator[_Candidate]:
    """A backend's other tunings: classes like it, by name, under its ``variants``."""
    target = ctx.load(offer)
    for name, kind in getattr(target, "variants", dict)().items():
        yield _Candidate(f"{offer.contribution.name} {name}", kind(ctx, spec), is_variant=True)


def _runs(backend: Any, kind: Kind, batch: Sequence[Requests], device: torch.device, copies: int) -> list[Run]:
    """Calls of ``forward`` as a step makes them: planned once, and for each of ``copies`` layers with its own cache."""
    each = [(one.query, one.total) for one in batch for _ in range(one.count)]
    block = kind.spec.block_size
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
    over = kind.call(backend, len(slots), device)
    pages = sum(needed) + 1
    size = backend.layout.page_bytes(backend.cache_spec, block)
    runs: list[Run] = []
    for _ in range(copies):
        buffer = torch.randint(0, 60, (pages * size,), dtype=torch.uint8, device=device)  # near zero in any dtype
        cache = backend.layout.views(buffer, pages, backend.cache_spec, block)
        runs.append(over(cache, slots, metadata))
    return runs


def _slots(table: torch.Tensor, each: Sequence[tuple[int, int]], block: int) -> torch.Tensor:
    found = []
    for row, (query, total) in zip(table, each, strict=True):
        position = torch.arange(total - query, total)
        found.append(row[position // block] * block + position % block)
    return torch.cat(found).int()


def _all(runs: Sequence[Run]) -> None:
    for run in runs:
        run()
