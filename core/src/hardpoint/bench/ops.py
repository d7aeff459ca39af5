"""How near each kernel comes to what the device can do: its memory's speed, or its multipliers'."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import click
import torch

from hardpoint.attention.build import attention_backend
from hardpoint.bench.device_timer import DeviceTimer, Run
from hardpoint.bench.recurrences import Recurrent, recurrences
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.config import EngineConfig
from hardpoint.context import Context
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.engine.blueprint import draw
from hardpoint.numerics import quantize_weight
from hardpoint.ops.act_and_mul import act_and_mul
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.draw import Draw
from hardpoint.plugin_host.blame import construct
from hardpoint.quantization.methods.block_floats import MXFP4, NVFP4
from hardpoint.resources import EngineResources
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionCall,
    AttentionSpec,
    ConfigError,
    EagerGraphEngine,
    ExpertsCall,
    ExpertsKernel,
    ExpertsWorkload,
    GraphEngine,
    LinearCall,
    LinearKernel,
    LinearWorkload,
    PlatformError,
    QuantSpec,
    Scale,
)

logger = logging.getLogger(__name__)

_HIDDEN, _WIDTH = 1024, 3072
"""Of Qwen3-0.6B."""

_EXPERTS, _TOP_K, _EXPERTS_HIDDEN, _EXPERT_WIDTH = 128, 8, 2048, 768
"""Of Qwen3-30B-A3B."""

_WORKING_SET = 256 * 2**20
"""Bytes of weights that are gone through before one is read again: more than caches hold."""

_DTYPE = "bfloat16"
_PLAIN = QuantSpec(_DTYPE)
_INT8 = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))
_INT4 = QuantSpec("uint4", scales=(Scale(_DTYPE, (1, 64)),), zero_point=True)
_SPECS = {
    "bfloat16": (_PLAIN, _PLAIN),
    "int8, int8 activations": (_INT8, replace(_INT8, static=False)),
    "int8": (_INT8, _PLAIN),
    "int4 in groups of 64": (_INT4, _PLAIN),
    "mxfp4": (MXFP4, _PLAIN),
    "nvfp4": (NVFP4, _PLAIN),
}


@click.option(
    "--platform", default=None, help="Kind of device to run on. Default: an accelerator if one is found, else cpu."
)
@click.option("--only", default="", metavar="TEXT", help="Measure only rows with TEXT in their name.")
@click.option(
    "--rounds", default=15, show_default=True, type=click.IntRange(min=3), help="Rounds to measure; the median counts."
)
@click.option(
    "--eager",
    is_flag=True,
    help="Time kernels without captured graphs: each is called from Python, and the call is included.",
)
@click.option(
    "--sequences",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of sequences in rows of decode attention.",
)
@click.option(
    "--length", default=2048, show_default=True, type=click.IntRange(min=1), help="Tokens of each such sequence."
)
@benchmark("ops", "Each kernel's share of the memory's speed, or of the multipliers'.")
def ops(platform: str | None, only: str, rounds: int, eager: bool, sequences: int, length: int) -> BenchResult:
    """Run the kernels that this platform would choose, each beside a plain read or a plain product.

    A kernel that reads more than it computes is compared with torch's sum over as many bytes, one that computes with
    torch's matmul, measured in turns with it, by the device's clock: in bfloat16, or in float32 where the device does
    not multiply bfloat16 at speed. Shapes are those of Qwen3-0.6B, for decode attention 32 query heads and 8 KV heads
    of 128, in pages of 16, for experts those of Qwen3-30B-A3B, and for delta nets, which read and write their states,
    those of Qwen3-Next. Peers are torch's matmuls that do the work of 4,096 tokens' experts as that of one. Calls are
    prepared by the platform's graph engine and replayed, as an engine's steps are. Kernels that it cannot prepare are
    called from Python, as all are with --eager; their times are by the host's clock and include the calls.
    """
    settings = {"platform": platform} if platform else {}
    blueprint = draw(EngineConfig.create(model="demo", dtype=_DTYPE, **settings))
    ctx, device = blueprint.ctx, blueprint.platform
    timer = DeviceTimer(device, ctx.torch_device, _WORKING_SET, by_host=eager)
    kernels = dict(_kernels(ctx, timer, sequences, length))
    wanted = [name for name in kernels if only in name]
    if not wanted:
        raise ConfigError(f"--only {only}: found in the name of no row; they are {'; '.join(kernels)}")
    bench = _Bench(timer, rounds, EagerGraphEngine() if eager else device.graph_engine())
    with torch.inference_mode():
        rows = [bench.row(name, kernels[name]()) for name in wanted]
    return BenchResult(
        "ops",
        tuple(rows),
        roofline=f"torch's sum over as many bytes, or {timer.product}",
        peer=f"torch's matmuls of as much work, in {dtype_name(timer.dtype_at_speed(dtype_of(_DTYPE)))}",
    )


class _Bench:
    """Measures a kernel and its roofline in turns."""

    def __init__(self, timer: DeviceTimer, rounds: int, engine: GraphEngine) -> None:
        self._timer, self._rounds, self._engine = timer, rounds, engine

    def row(self, name: str, work: _Work) -> BenchRow:
        """A table row: the kernel's speed beside the roofline's."""
        timed = [self._prepared(work.runs), self._timer.multiply if work.flops else self._timer.read]
        if work.peer:
            timed.append(self._prepared([work.peer]))
        for run in timed:
            run()
        ours, bound, *others = self._timer.in_turns(timed, self._rounds, hopeless=math.inf)
        ours /= len(work.runs)
        amount, unit = (work.flops, "GFLOP/s") if work.flops else (work.nbytes, "GB/s")
        roofline = (self._timer.product.flops if work.flops else _WORKING_SET) / bound / 1e9
        peer = amount / others[0] / 1e9 if others else None
        note = f"{ours * 1e6:,.1f} us"
        return BenchRow(name, amount / ours / 1e9, unit, roofline, peer, better="higher", note=note)

    def _prepared(self, runs: Sequence[Run]) -> Run:
        """One replay of all ``runs``, or calls one by one where they cannot be prepared."""

        def step() -> None:
            for run in runs:
                run()

        try:
            return self._engine.prepare("bench", step, {}).run
        except PlatformError as error:
            logger.warning("calls are made one by one: %s", error)
            return step


@dataclass(frozen=True)
class _Work:
    """Calls that do the same on different memory: the bytes of one, and its products where these take the time.

    ``peer`` does the work of one otherwise.
    """

    runs: Sequence[Run]
    nbytes: int
    flops: int = 0
    peer: Run | None = None


def _kernels(
    ctx: Context, timer: DeviceTimer, sequences: int, length: int
) -> Iterator[tuple[str, Callable[[], _Work]]]:
    for name, specs in _SPECS.items():
        for tokens in (1, 8, 512):
            yield f"linear {name}, {tokens} rows", partial(_linear, ctx, specs, tokens)
    yield f"decode attention, {sequences} x {length}", partial(_attention, ctx, sequences, length)
    for tokens in (32, 4096):
        yield f"experts, {tokens} tokens", partial(_experts, ctx, timer, tokens)
    yield "add_rms_norm, 4096 rows", partial(_norm, ctx)
    yield "act_and_mul, 4096 rows", partial(_activation, ctx)
    for name, make in recurrences(ctx, _WORKING_SET):
        yield name, partial(_recurrent, make)


def _linear(ctx: Context, specs: tuple[QuantSpec, QuantSpec], tokens: int) -> _Work:
    """Gate and up projection."""
    n, k = 2 * _WIDTH, _HIDDEN
    plan = ctx.select(LinearWorkload(dtype=_DTYPE, in_features=k, out_features=n, spec=specs))
    chosen = next(e for e in plan.entries if e.range.max is None or tokens <= e.range.max).offer
    kernel = construct(chosen, ctx.load(chosen), LinearKernel, ctx, plan.workload)
    weight = torch.randn(n, k, device=ctx.torch_device).bfloat16()
    slots = {"weight": weight} if specs[0].is_plain else quantize_weight(weight, specs[0])
    nbytes = sum(x.nbytes for x in slots.values())
    copies = 1 if tokens > 64 else max(1, _WORKING_SET // nbytes)
    packed = [kernel.prepack({name: x.clone() for name, x in slots.items()}) for _ in range(copies)]
    x = torch.randn(tokens, k, device=ctx.torch_device).bfloat16()
    runs = [partial(kernel.apply, LinearCall(x, w)) for w in packed]
    return _Work(runs, nbytes, 2 * tokens * n * k if tokens > 64 else 0)


def _experts(ctx: Context, timer: DeviceTimer, tokens: int) -> _Work:
    """A layer's experts, each token's drawn at random. For a few tokens the bytes of those that are used count."""
    device, hidden, width = ctx.torch_device, _EXPERTS_HIDDEN, _EXPERT_WIDTH
    workload = ExpertsWorkload(
        dtype=_DTYPE,
        spec=_SPECS["bfloat16"],
        activation="silu_and_mul",
        routing="topk_softmax",
        parallel="none",
        format="standard",
        num_experts=_EXPERTS,
        top_k=_TOP_K,
        hidden_size=hidden,
        intermediate_size=width,
    )
    plan = ctx.select(workload)
    chosen = next(e for e in plan.entries if e.range.max is None or tokens <= e.range.max).offer
    kernel = construct(chosen, ctx.load(chosen), ExpertsKernel, ctx, plan.workload)
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, _EXPERTS, generator=generator).argsort(-1)[:, :_TOP_K].int()
    active = ids.unique().numel()
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    stacked = {
        "w13.weight": torch.randn(_EXPERTS, 2 * width, hidden, device=device).bfloat16(),
        "w2.weight": torch.randn(_EXPERTS, hidden, width, device=device).bfloat16(),
    }
    peer_dtype = timer.dtype_at_speed(x.dtype)
    dense = [weight[0].to(peer_dtype, copy=True) for weight in stacked.values()]
    w, out, here = kernel.prepack(stacked), torch.empty_like(x), ids.to(device)
    weights = torch.rand(tokens, _TOP_K, device=device)
    workspace = torch.empty(kernel.workspace_bytes(tokens), dtype=torch.uint8, device=device)
    run = partial(kernel.apply, ExpertsCall(x, here, weights, w, out, workspace))
    nbytes, flops = active * 3 * width * hidden * 2, 6 * tokens * _TOP_K * width * hidden
    if tokens <= 64:
        return _Work([run], nbytes)
    rows = x.repeat_interleave(_TOP_K, 0).to(peer_dtype)
    middle = torch.randn(len(rows), width, device=device).to(peer_dtype)

    def as_one() -> None:
        torch.nn.functional.linear(rows, dense[0])
        torch.nn.functional.linear(middle, dense[1])

    return _Work([run], nbytes, flops, as_one)


def _attention(ctx: Context, sequences: int, length: int) -> _Work:
    block, device = 16, ctx.torch_device
    ctx = replace(ctx.child("bench"), resources=EngineResources())
    spec = AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5, dtype=_DTYPE, kv_dtype=_DTYPE, block_size=block
    )
    _, backend, _ = attention_backend(ctx, spec)
    ctx.resources.allocate(device)
    per_sequence = -(-length // block)
    pages = sequences * per_sequence + 1
    size = backend.layout.page_bytes(spec.cache_spec, block)
    buffer = torch.randint(0, 60, (pages * size,), dtype=torch.uint8, device=device)  # bfloat16 near zero
    cache = backend.layout.views(buffer, pages, spec.cache_spec, block)
    table = (torch.randperm(pages - 1, device=device).int() + 1).view(sequences, per_sequence)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    slots = table[:, (length - 1) // block] * block + (length - 1) % block
    host = tuple(range(sequences + 1)), (length,) * sequences
    metadata = backend.plan(AttentionBatch(starts, lengths, table, slots, *host, sequences))
    q, k, v = (torch.randn(sequences, heads, 128, device=device).bfloat16() for heads in (32, 8, 8))
    out = torch.empty_like(q)
    nbytes = sequences * length * 8 * 128 * 2 * 2
    return _Work([partial(backend.forward, AttentionCall(q, k, v, cache, metadata, out))], nbytes)


def _recurrent(make: Callable[[], Recurrent]) -> _Work:
    found = make()
    return _Work(found.runs, found.nbytes, found.flops)


def _norm(ctx: Context) -> _Work:
    draw_ = Draw(torch.Generator().manual_seed(0), torch.bfloat16, ctx.torch_device)
    run, weight = add_rms_norm.bind(ctx), draw_.normal(_HIDDEN)
    inputs = [(draw_.normal(4096, _HIDDEN), draw_.normal(4096, _HIDDEN)) for _ in range(16)]
    return _Work([partial(run, x, r, weight, eps=1e-6) for x, r in inputs], 4 * inputs[0][0].nbytes)


def _activation(ctx: Context) -> _Work:
    draw_ = Draw(torch.Generator().manual_seed(0), torch.bfloat16, ctx.torch_device)
    run = act_and_mul.bind(ctx, activation="silu")
    inputs = [draw_.normal(4096, 2 * _WIDTH) for _ in range(6)]
    return _Work([partial(run, x, activation="silu") for x in inputs], inputs[0].nbytes * 3 // 2)
