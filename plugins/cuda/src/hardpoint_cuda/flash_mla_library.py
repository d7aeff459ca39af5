"""FlashMLA, DeepSeek's library of latent attention (module ``flash_mla``), as it is called here.

Arguments are passed by name, as recorded from ``flash_mla/flash_mla_interface.py`` of version 1.0.0 at
9241ae3ef9bac614dd25e45e507e089f888280e0 (github.com/deepseek-ai/FlashMLA). Limits of its kernels: ``csrc/api/`` there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from hardpoint.plugin_host.recorded_library import RecordedLibrary
from hardpoint_plugin_api import BuildContext, LatentSpec, Reason

LATENT_SIZE, ROPE_SIZE = 512, 64
ROW = LATENT_SIZE + ROPE_SIZE
MOST_HEADS = 128

_MOST_ROWS = 32768
"""Rows (queries times heads) of a call. The library allocates float32 results of 512 elements for each row and each
part of a long context: so up to some 200 MB."""

FLASH_MLA = RecordedLibrary(
    "FlashMLA",
    "flash-mla",
    "install FlashMLA (github.com/deepseek-ai/FlashMLA, 9241ae3 or near it), built for this PyTorch",
    {
        "flash_mla:get_mla_metadata": (),
        "flash_mla:flash_mla_with_kvcache": (
            *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
            *("softmax_scale", "causal", "is_fp8_kvcache", "indices"),
        ),
        "flash_mla:flash_mla_sparse_fwd": ("q", "kv", "indices", "sm_scale", "d_v"),
    },
)


def find(function: str) -> Any:
    """The library's ``function``."""
    return FLASH_MLA.find(f"flash_mla:{function}")


def tokens_per_call(heads: int) -> int:
    """Tokens of ``heads`` queries that one call takes at most."""
    return max(1, _MOST_ROWS // heads)


class Schedules:
    """Schedules of a step's launches. The device computes them in the first layer's calls; other layers reuse them.

    A layer that comes again begins another run of the step: the run that warms up before a capture must not leave the
    recorded one without its computation.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._seen: set[int] = set()

    def begin(self, layer: object) -> None:
        """``layer`` comes next."""
        if id(layer) in self._seen:
            self._seen.clear()
            self._kept.clear()
        self._seen.add(id(layer))

    def of(self, launch: Hashable) -> Any:
        """The argument ``tile_scheduler_metadata`` of launches that are scheduled alike."""
        if launch not in self._kept:
            self._kept[launch] = find("get_mla_metadata")()[0]
        return self._kept[launch]


class PaddedQueries:
    """Queries of sparse attention as the library wants them: of 64 or 128 heads, each a latent part and a rotated one.

    Heads that a layer does not have are zeros in the engine's memory, which no call writes.
    """

    def __init__(self, ctx: BuildContext, spec: LatentSpec) -> None:
        self._heads = spec.num_heads
        self.padded = 64 if spec.num_heads <= 64 else MOST_HEADS
        self.tokens = tokens_per_call(self.padded)
        self._resources, self._key = ctx.resources, f"flash_mla_queries_{spec.num_heads}"
        ctx.resources.declare(self._key, self.tokens * self.padded * ROW * 2)

    def memory(self) -> torch.Tensor:
        """The memory of a step, bfloat16 [tokens, padded, 576]."""
        return self._resources.get(self._key).view(torch.bfloat16).view(self.tokens, self.padded, ROW)

    def fill(self, memory: torch.Tensor, q_latent: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """Write the queries of up to ``tokens`` tokens to ``memory``. Returns its part that holds them."""
        filled = memory[: q_latent.shape[0]]
        filled[:, : self._heads, :LATENT_SIZE] = q_latent
        filled[:, : self._heads, LATENT_SIZE:] = q_rope
        return filled


def widened(lists: torch.Tensor, multiple: int) -> torch.Tensor:
    """Lists [T, K], with K a multiple: places that are added hold -1."""
    more = -lists.shape[1] % multiple
    return torch.nn.functional.pad(lists, (0, more), value=-1) if more else lists.contiguous()


def heads_refused(num_heads: int | None) -> list[Reason]:
    """The reason against more heads than sparse kernels have, where there are more."""
    if num_heads is None or num_heads <= MOST_HEADS:
        return []
    return [Reason("num-heads", "query heads of a rank", wanted=str(num_heads), supported=f"up to {MOST_HEADS}")]


def split_into_powers(counts: Sequence[int], most: int) -> dict[int, list[tuple[int, int]]]:
    """Cut ``counts`` of queries into pieces of 1, 2, 4 ... queries, up to ``most``, a power of two.

    Returns size -> (request, first query) of its pieces, the largest size first.
    """
    pieces: dict[int, list[tuple[int, int]]] = {1 << i: [] for i in reversed(range(int(math.log2(most)) + 1))}
    for request, count in enumerate(counts):
        first = 0
        for size, found in pieces.items():
            while count - first >= size:
                found.append((request, first))
                first += size
    return {size: found for size, found in pieces.items() if found}
