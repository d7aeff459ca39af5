"""Latent attention whose decodes are by a kernel for Hopper alone, in Gluon: kernels/latent_hopper.py.

Cache, prompts and all else are those of core's Triton backend. A decode's tile is 64 heads, so a rank has a multiple of
them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hardpoint.kernels.attention import MOST_MERGED, SCANNED, in_order, scan_size
from hardpoint.kernels.latent_attention import TritonLatentAttention
from hardpoint.kernels.launch import Launcher
from hardpoint_cuda.kernels import latent_hopper
from hardpoint_cuda.kernels.latent_hopper import BOX_LAYOUT, decode_latents_on_hopper
from hardpoint_plugin_api import BuildContext, DeviceInfo, LatentSpec, LatentWorkload, Reason

HEADS, POSITIONS = latent_hopper.HEADS.value, latent_hopper.POSITIONS.value
_HALVES, _BOX = 2, 64
_WARPS = 4
"""Of the kernel's first part; the compiler adds those of the others."""
_PROGRAMS = 132
"""A program fills a multiprocessor: of these there are so many on an H100 and an H200."""


class HopperLatentAttention(TritonLatentAttention):
    """See the top of this file."""

    min_chunk: ClassVar[int] = 512
    """The fewest positions of a split. On an H100 one decode at 4,096 took 34.6 us so, 37.6 with 256, 56.6 with 128."""

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        super().__init__(ctx, spec)
        self._hopper_blocks = spec.num_heads // HEADS
        self._hopper_splits = max(2, _PROGRAMS // self._hopper_blocks)
        constants = {
            "NUM_HEADS": spec.num_heads,
            "BLOCK_SIZE": spec.block_size,
            "ROWS": min(POSITIONS, spec.block_size),
            "SPLITS": self._hopper_splits,
            "MOST_SPLITS": min(MOST_MERGED, triton.next_power_of_2(self._hopper_splits + 1) // 2),
            "MIN_CHUNK": self.min_chunk,
        }
        self.hopper_constants = {scan: {**constants, "SCAN": scan} for scan in SCANNED}
        self._hopper_launchers = {
            scan: (Launcher(decode_latents_on_hopper), in_order(decode_latents_on_hopper, named))
            for scan, named in self.hopper_constants.items()
        }
        size = f"{spec.num_heads}_{self._hopper_splits}"
        self._hopper_partial, self._hopper_counters = (f"hopper_latent_{x}_{size}" for x in ("partial", "counters"))
        nbytes = 4 * self._hopper_splits * spec.num_heads * (spec.latent_size + 2 * _HALVES)
        ctx.resources.declare(self._hopper_partial, nbytes, scope="step")
        ctx.resources.declare(self._hopper_counters, 4 * self._hopper_splits * self._hopper_blocks * _HALVES)

    @classmethod
    def supports(cls, workload: LatentWorkload, device: DeviceInfo) -> list[Reason]:
        """Refuse heads that fill no tiles, and a cache of another dtype than the queries'."""
        found, heads = super().supports(workload, device), workload.num_heads
        if heads is not None and heads % HEADS:
            message, supported = "query heads of a rank fill no tiles", f"multiples of {HEADS}"
            found.append(Reason("num-heads", message, wanted=str(heads), supported=supported))
        if workload.kv_dtype not in (None, workload.dtype):
            message = "the cache's dtype is not the queries'"
            found.append(Reason("kv-dtype", message, wanted=workload.kv_dtype, supported=workload.dtype))
        return found

    @classmethod
    def variants(cls) -> dict[str, type[Self]]:
        """Backends with shorter and longer splits: for benchmarks, which say which is best on a device."""
        return {f"decode of {n}": type(cls.__name__, (cls,), {"min_chunk": n}) for n in (128, 256, 1024)}

    def _decode(
        self, count: int, key: Any, rows: tuple[Any, ...], pages: tuple[Any, ...], table: tuple[Any, ...]
    ) -> None:
        latents, rope_keys = (self._boxes(x) for x in pages[:2])
        partial, counters = (self.ctx.resources.get(x) for x in (self._hopper_partial, self._hopper_counters))
        queries = (*with_even_heads(*rows[:3]), *with_even_heads(*rows[3:6]))
        scan = scan_size(count)
        launcher, constants = self._hopper_launchers[scan]
        launcher(
            key and (scan, *key),
            ((self._hopper_splits + count) * self._hopper_blocks, 1, 1),
            _WARPS,
            *queries,
            *rows[6:],
            latents,
            rope_keys,
            *table,
            count,
            partial.view(torch.float32),
            counters.view(torch.int32),
            self._factor,
            *constants,
        )

    def _boxes(self, pages: torch.Tensor) -> TensorDescriptor:
        """How the copies address [pages, B, size]. Made for each call: kept, it would keep the cache's memory."""
        rows = min(POSITIONS, self.spec.block_size)
        return TensorDescriptor(pages, [*pages.shape], [*pages.stride()], [1, rows, _BOX], BOX_LAYOUT)


def with_even_heads(x: torch.Tensor, token_stride: int, head_stride: int) -> tuple[torch.Tensor, int, int]:
    """``x`` [N, H, size] with its strides; a copy where the heads' stride is no multiple of 16 elements.

    The kernel copies 16 bytes at a time to shared memory, and Triton compiles no such copy for another stride.
    """
    if head_stride % 16 == 0:
        return x, token_stride, head_stride
    copy = x.clone(memory_format=torch.contiguous_format)
    return copy, copy.stride(0), copy.stride(1)
