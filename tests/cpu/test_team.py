"""Compiled kernels on several threads: the same bits as on one, from every family that cuts its work into chunks.

The shapes are the smallest that give each thread several chunks, for ThreadSanitizer's sake (scripts/sanitize_cpu.sh).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch

from hardpoint.numerics import quantize_weight
from hardpoint_cpu.linear import Int4PanelLinear, Int8PanelLinear, Int8WeightPanelLinear, PanelLinear, PlainPanelLinear
from hardpoint_cpu.native_attention import NativeAttention, NativeQuantizedCacheAttention
from hardpoint_cpu.ops.norm import add_rms_norm
from hardpoint_cpu.ops.sampling import argmax_tokens, sample_tokens, token_logprobs
from hardpoint_cpu.recorded_list import RecordedLists
from hardpoint_plugin_api import AttentionSpec, BuildContext, LinearCall, LinearWorkload, QuantSpec, Scale
from tests.cpu.building import needs_kernels
from tests.support.attention import Piece, run_backend

needs_kernels()

_THREADS = 3
"""More than there may be cores: threads then take turns within a list."""


@dataclass(frozen=True)
class Context:
    """The build context as a linear kernel uses it."""

    dtype: torch.dtype = torch.bfloat16
    torch_device: torch.device = field(default=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def both(compute: Callable[[], object]) -> tuple[Any, Any]:
    """The results of ``compute`` on one thread and on several."""
    torch.set_num_threads(1)
    alone = compute()
    torch.set_num_threads(_THREADS)
    return alone, compute()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


_PLAIN = QuantSpec("bfloat16")
_ROWS = QuantSpec("int8", scales=(Scale("float32", (1, -1)),))
_LINEAR: dict[str, tuple[type[PanelLinear], QuantSpec, QuantSpec]] = {
    "plain": (PlainPanelLinear, _PLAIN, _PLAIN),
    "int8": (Int8PanelLinear, _ROWS, QuantSpec("int8", scales=_ROWS.scales, static=False)),
    "int8-weight": (Int8WeightPanelLinear, _ROWS, _PLAIN),
    "int4": (Int4PanelLinear, QuantSpec("uint4", scales=(Scale("bfloat16", (1, 32)),), zero_point=True), _PLAIN),
}


@pytest.mark.parametrize("name", _LINEAR)
def test_linear(level: str, name: str) -> None:
    kind, spec, activation = _LINEAR[name]
    n, k = 520, 64  # 33 panels: at least 5 blocks of them
    weight = noise(n, k).bfloat16()
    workload = LinearWorkload(dtype="bfloat16", in_features=k, out_features=n, spec=(spec, activation))
    kernel = kind(cast(BuildContext, Context()), workload)

    def compute(rows: int) -> list[torch.Tensor]:
        weights = kernel.prepack({"weight": weight.clone()} if spec.is_plain else quantize_weight(weight, spec))
        return [kernel.apply(LinearCall(noise(rows, k).bfloat16(), weights, None)), kernel.unpack(weights)]

    for rows in (1, 40, 200):
        alone, together = both(partial(compute, rows))
        assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_attention(level: str, kv_dtype: str) -> None:
    """A decode that is cut into splits, by how many threads there are: so bits differ. And some prompts beside it."""
    spec = AttentionSpec(4, 2, 64, 0.125, "bfloat16", kv_dtype, 16)
    kind = NativeAttention if kv_dtype == "bfloat16" else NativeQuantizedCacheAttention
    pieces = [Piece(1, 3000), Piece(1, 40), Piece(20, 90), Piece(70, 70)]
    alone, together = both(lambda: run_backend(kind, spec, pieces)[0])
    torch.testing.assert_close(together, alone, rtol=0.02, atol=0.01)
    assert torch.equal(together[2:], alone[2:])


def test_sampling(level: str) -> None:
    logits, count = noise(9, 20_000), 9
    settings = [torch.full((count,), x) for x in (1.1, 0.9, 0.0)]
    top_k, uniform = torch.full((count,), 50, dtype=torch.int32), torch.rand(count)

    def compute() -> list[torch.Tensor]:
        tokens = sample_tokens(logits, settings[0], top_k, settings[1], settings[2], uniform)
        return [tokens, argmax_tokens(logits), *token_logprobs(logits, tokens, top_n=5)]

    alone, together = both(compute)
    assert all(map(torch.equal, alone, together))


def test_a_recorded_list(level: str) -> None:
    """Each of 20 kernels reads what others wrote, on whichever thread, and memory is used again."""
    rows, width = 300, 128
    plain = QuantSpec("float32")
    workload = LinearWorkload(dtype="float32", in_features=width, out_features=width, spec=(plain, plain))
    linear = PlainPanelLinear(cast(BuildContext, Context(torch.float32)), workload)
    weights, scale = linear.prepack({"weight": noise(width, width) / width**0.5}), 1 + 0.1 * noise(width)

    def step(x: torch.Tensor) -> torch.Tensor:
        residual = x
        for _ in range(10):
            x, residual = add_rms_norm(linear.apply(LinearCall(x, weights)), residual, scale, eps=1e-6)
        return x

    with torch.inference_mode():
        prepared = RecordedLists().prepare("step", step, {"x": noise(rows, width)})
        alone, together = both(lambda: [prepared.run().clone() for _ in range(5)][-1])
    assert torch.equal(alone, together)
