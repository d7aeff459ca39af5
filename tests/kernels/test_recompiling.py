"""Nothing is compiled again for values that change between steps: numbers of tokens and requests, array offsets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton

from hardpoint.kernels import activation, lora, norm, quantize, rope_store, routing, step_inputs
from hardpoint.ops.draw import Draw
from hardpoint.ops.rotary_embedding import random_table
from hardpoint_plugin_api import QuantSpec, Scale

pytestmark = pytest.mark.accelerator

_INT8 = QuantSpec("int8", scales=(Scale("float32", (1, -1)),), static=False)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The kernels that are compiled, or read from Triton's cache, while the test runs."""
    names: list[str] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *, src, **others: names.append(src.name)
    yield names
    triton.knobs.compilation.listener = before


def step(tokens: int, device: torch.device) -> None:
    """The kernels of a decoder block, on ``tokens`` tokens whose integers begin anywhere."""
    size, heads, kv_heads, block = 64, 4, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device).bfloat16()
    q, k, v = (x.unflatten(1, (-1, size)) for x in qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1))
    shift = tokens % 5
    positions, ids = (torch.arange(-shift, tokens, device=device) % most for most in (50, 9))
    ints = torch.arange(-shift, tokens + 1, dtype=torch.int32, device=device)[shift:]  # 0, 1, 2, ...
    table = random_table(Draw(torch.Generator(), torch.bfloat16, device), 50, size)
    cache = torch.zeros(2, tokens + 1, block, kv_heads, size, dtype=torch.bfloat16, device=device)
    views = {"k": cache[0], "v": cache[1]}
    weight = torch.ones(size, dtype=torch.bfloat16, device=device)
    tables = torch.ones(tokens + 16, 8, dtype=torch.int32, device=device)
    slots = step_inputs.slot_mapping(positions[shift:], ints[:tokens], ints, tables, block_size=block)
    x = step_inputs.embedding_lookup(ids[shift:], torch.randn(9, 256, device=device).bfloat16())
    wide = torch.ones(256, dtype=torch.bfloat16, device=device)
    rope_store.qk_norm_rope_store(
        q, k, v, table, positions[shift:], views, slots, weight, weight, eps=1e-6, interleaved=False
    )
    norm.rms_norm(x, wide, eps=1e-6)
    norm.add_rms_norm(x, x.clone(), wide, eps=1e-6)
    norm.add_rms_norm_quantized(x, x.clone(), wide, eps=1e-6, spec=_INT8)
    activation.act_and_mul(x, activation="silu")
    activation.act_and_mul_quantized(x, activation="silu", spec=_INT8)
    quantize.quantize_rows(x, spec=_INT8)
    experts, weights = routing.topk_softmax(x[:, :16].float(), top_k=4, renormalize=True, scaling=1.0)
    rows, _, places = routing.moe_permute(x, experts, num_experts=16)
    routing.moe_unpermute(rows, places, weights)
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((3, 8, 256), (128, 3, 8)))
    lora.add_lora(torch.zeros(tokens, 128, device=device).bfloat16(), x, a, b, ints[:tokens] % 4 - 1)


def test_other_numbers_of_tokens_compile_nothing(compiled: list[str]) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    for tokens in (1, 100):  # few pairs of token and expert are sorted by a smaller kernel than many
        step(tokens, device)
    assert compiled
    compiled.clear()
    for tokens in (2, 3, 7, 16, 31, 64, 111, 256, 1000):
        step(tokens, device)
    assert not compiled
