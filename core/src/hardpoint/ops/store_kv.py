"""Writing keys and values to the paged cache, in the layout "plain".

Axes: T tokens, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import NULL_PAGE


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(name: str, tokens: int, heads: int, size: int, pages: int, block: int, padding: int = 0) -> Case:
        k, v = draw.normal(tokens, heads, size), draw.normal(tokens, heads, size)
        cache = random_cache(draw, pages, block, heads, size)
        return Case(name, (k, v, cache["k"], cache["v"], random_slots(draw, tokens, pages, block, padding)))

    yield case("random", 9, 2, 64, 5, 16)
    yield case("odd", 3, 3, 33, 4, 5)
    yield case("full", 24, 1, 16, 4, 8)
    yield case("padded", 8, 2, 32, 3, 16, padding=5)
    yield case("many_pages", 6, 1, 8, 3000, 16)
    yield case("empty", 0, 2, 64, 3, 16)
    yield case("one", 1, 1, 1, 2, 1)
    merged = draw.normal(6, 8, 64)
    cache = random_cache(draw, 4, 16, 2, 64)
    yield Case("strided", (merged[:, 4:6], merged[:, 6:], cache["k"], cache["v"], random_slots(draw, 6, 4, 16)))
    wide = {name: page.float() for name, page in random_cache(draw, 4, 16, 2, 64).items()}
    k, v = draw.normal(6, 2, 64), draw.normal(6, 2, 64)
    yield Case("other_dtype", (k, v, wide["k"], wide["v"], random_slots(draw, 6, 4, 16)))
    narrow = {name: page.bfloat16() for name, page in wide.items()}
    yield Case("narrow_cache", (k, v, narrow["k"], narrow["v"], random_slots(draw, 6, 4, 16)))
    yield Case("non_finite", (draw.with_non_finite(6, 2, 64), v, *cache.values(), random_slots(draw, 6, 4, 16)))


def random_cache(draw: Draw, pages: int, block: int, heads: int, size: int) -> dict[str, torch.Tensor]:
    """Keys and values of one layer, each [pages, block, K, D]: as in the layout, views of one buffer of pages."""
    buffer = draw.normal(pages, 2, block, heads, size)
    return {"k": buffer[:, 0], "v": buffer[:, 1]}


def random_slots(draw: Draw, tokens: int, pages: int, block: int, padding: int = 0) -> torch.Tensor:
    """Different slots for ``tokens`` rows, int32; the last ``padding`` of them share slots of the null page."""
    slots = draw.distinct((NULL_PAGE + 1) * block, pages * block, tokens)
    slots[tokens - padding :] = NULL_PAGE * block
    return slots.to(torch.int32)


@custom_op(
    cases=_cases,
    errors=ErrorModel(exact=True, ignore_null_page=("k_cache", "v_cache")),
    mutates=["k_cache", "v_cache"],
)
def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [T, K, D] to k_cache, v_cache [pages, block, K, D], cast to their dtype by rounding to nearest even.

    ``slot_mapping`` int32 [T] holds page * block + offset. Slots of requests differ; padding rows share slots of the
    null page, whose content is undefined. Mutates the caches alone. Slots are complete before the kernel that produces
    k and v begins: one that is launched early reads them while that kernel still runs.
    """
    slots, block = slot_mapping.long(), k_cache.shape[1]
    pages, offsets = slots // block, slots % block
    k_cache[pages, offsets] = k.to(k_cache.dtype)
    v_cache[pages, offsets] = v.to(v_cache.dtype)
