"""The compiled kernels over GGUF's blocks beside dequantized products in double precision, at every level there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint.checkpoint.gguf.blocks import SPECS
from hardpoint.dtypes import dtype_name
from hardpoint.numerics import fake_quantize, quantize_weight
from hardpoint_cpu.block_linear import BlockPanelLinear
from hardpoint_cpu.native import kernel_number
from hardpoint_plugin_api import (
    BuildContext,
    Feature,
    LinearCall,
    LinearWorkload,
    PluginLoadError,
    QuantSpec,
    Scale,
    dequantize,
)
from tests.cpu.building import needs_kernels
from tests.support.engines import small_llm

needs_kernels()

FILE = Path(__file__).parents[1] / "quantization" / "fixtures" / "gguf" / "llama-Q4_K_M.gguf"
ROUNDED = QuantSpec("int8", scales=(Scale("float32", (1, 32)),), static=False)
SERVED = [name for name in SPECS if name not in ("IQ4_NL", "IQ4_XS", "MXFP4")]
ROWS = (1, 3, 8, 13, 70)
"""70 are more than vector registers multiply where there are tiles."""


@dataclass(frozen=True)
class Context:
    """The build context as a linear kernel uses it."""

    dtype: torch.dtype
    torch_device: torch.device = field(default=torch.device("cpu"))


def _kernel(name: str, n: int, k: int, dtype: torch.dtype, *features: Feature) -> BlockPanelLinear:
    pair, numbers = (SPECS[name].spec, ROUNDED), dtype_name(dtype)
    workload = LinearWorkload(dtype=numbers, in_features=k, out_features=n, spec=pair, features=frozenset(features))
    assert not BlockPanelLinear.supports(workload, cast(Any, None))
    return BlockPanelLinear(cast(BuildContext, Context(dtype)), workload)


def _slots(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """A matrix of the type, with rows of unlike sizes and scales of both signs where the type has them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    slots = quantize_weight(weight, SPECS[name].spec)
    outer = f"weight_scale{'_2' if len(SPECS[name].spec.scales) > 1 else ''}"
    if not SPECS[name].spec.minimum:
        slots[outer][::2] *= -1
    return slots


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplies_as_its_spec_says(level: str, name: str, dtype: torch.dtype) -> None:
    n, k, spec = 40, 512, SPECS[name].spec  # a panel that is not full
    slots, kernel = _slots(name, n, k), _kernel(name, n, k, dtype)
    numbers = dequantize(slots, spec, torch.float64)
    weights = kernel.prepack({slot: value.clone() for slot, value in slots.items()})
    assert torch.equal(kernel.unpack(weights), dequantize(slots, spec, dtype))
    ids = torch.tensor([n - 1, 0, 17])
    assert torch.equal(kernel.rows(weights, ids), dequantize(slots, spec, dtype, ids))
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(n, generator=generator).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 2 * k, generator=generator).to(dtype)[:, :k]  # rows apart
        x[0, 32:64] = 0
        wanted = fake_quantize(x.double(), ROUNDED, {}) @ numbers.T
        for given, more in ((None, 0.0), (bias, bias.double())):
            got = kernel.apply(LinearCall(x, weights, given)).double()
            limit = 4 * torch.finfo(dtype).eps * (wanted.abs().amax() + 1) + 1.5e-5 * k**0.5
            assert (got - wanted - more).abs().max() <= limit, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q6_K", "Q8_0"])
def test_a_row_has_the_same_bits_whoever_is_with_it(level: str, name: str, dtype: torch.dtype) -> None:
    kernel = _kernel(name, 40, 512, dtype, Feature.BATCH_INVARIANT)
    weights = kernel.prepack(_slots(name, 40, 512))
    x = torch.randn(70, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = kernel.apply(LinearCall(x, weights))
    for rows in (slice(0, 1), slice(60, 63), slice(7, 20)):
        assert torch.equal(kernel.apply(LinearCall(x[rows], weights)), whole[rows])


@pytest.mark.parametrize("name", SERVED)
def test_the_greatest_sums_are_exact(level: str, name: str) -> None:
    """Every element and every activation at its limit, of all signs, where sums of few bits would overflow."""
    n, k, spec = 16, 512, SPECS[name].spec
    slots, kernel = _slots(name, n, k), _kernel(name, n, k, torch.float32)
    bits = int(spec.element[-1])
    low, high = (0, 2**bits - 1) if spec.element.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for row, code in enumerate((low, high) * (n // 2)):
        nibbles = slots["weight"].shape[1] < k
        slots["weight"][row] = ((code & 0xF) * 0x11 if nibbles else code) if row < 8 else slots["weight"][row]
    numbers = dequantize(slots, spec, torch.float64)
    x = torch.ones(11, k)
    x[1] = -1
    x[2, ::2] = -1
    x[3:] = torch.randn(8, k, generator=torch.Generator().manual_seed(1)).sign()
    got = kernel.apply(LinearCall(x, kernel.prepack(slots))).double()
    wanted = x.double() @ numbers.T
    assert (got - wanted).abs().max() <= 1e-5 * (numbers.abs().sum(1).max() + 1)


def test_what_is_no_number_stays_none(level: str) -> None:
    kernel = _kernel("Q4_K", 40, 512, torch.float32)
    weights = kernel.prepack(_slots("Q4_K", 40, 512))
    x = torch.ones(3, 512)
    x[1, 5] = torch.nan
    got = kernel.apply(LinearCall(x, weights))
    assert bool(got[1].isnan().all())
    assert bool(got[[0, 2]].isfinite().all())


def test_columns_that_blocks_do_not_divide_are_refused() -> None:
    workload = LinearWorkload(dtype="bfloat16", in_features=320, out_features=16, spec=(SPECS["Q4_K"].spec, ROUNDED))
    (reason,) = BlockPanelLinear.supports(workload, cast(Any, None))
    assert "wanted 32 of 320, supported a multiple of 256, in groups of 16 or 32" in str(reason)


def test_a_file_is_multiplied_by_them() -> None:
    """Activations of 16 bits are rounded as llama.cpp does; those of float32 stay as they are."""
    for dtype, wanted in (("bfloat16", str(ROUNDED)), ("float32", "float32")):
        with small_llm(FILE, dtype=dtype, skip_tokenizer_init=True) as llm:
            layers: list[Any] = [m for m in llm.core.blueprint.model.modules() if getattr(m, "kernels", None)]
        assert {str(layer.scheme.activation) for layer in layers} == {wanted}
        if dtype == "bfloat16":
            assert {type(layer.kernels[0]) for layer in layers} == {BlockPanelLinear}


def test_a_kernel_that_an_older_build_lacks_is_an_error_with_the_command_that_compiles_it() -> None:
    with pytest.raises(PluginLoadError, match=r"no 'pack_of_a_later_version'; compile them anew: .*pip install"):
        kernel_number("pack_of_a_later_version")
