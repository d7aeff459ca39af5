"""Writing the index keys of sparse attention (DeepSeek-V3.2, arXiv:2512.02556) to the paged cache.

A cache of index keys is one plane, ``index_key`` [G, D / G] of each token: G groups of at most 128 elements. In the
layout "plain_scaled" each group has a float32 scale beside it, in the same page.

Axes: T tokens, D index head size, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.store_kv import random_slots
from hardpoint_plugin_api import CacheSpec, Plane, write_rounded
from hardpoint_plugin_api.cache import Scaling
from hardpoint_plugin_api.elements import BUILT_IN

Cache = dict[str, torch.Tensor]
GROUP = 128
"""Elements that share a scale, in DeepSeek's caches."""


def index_key_spec(head_size: int, dtype: str) -> CacheSpec:
    """The cache of index keys: elements of 8 bits have a scale for each group; heads that groups do not fill have one
    group."""
    groups = head_size // GROUP if head_size % GROUP == 0 else 1
    scaling: Scaling = "row" if dtype in BUILT_IN else "none"
    return CacheSpec((Plane("index_key", (groups, head_size // groups), dtype, scaling),))


def random_index_cache(draw: Draw, pages: int, block: int, size: int, scaled: bool) -> Cache:
    """A cache as the layouts have it, full of garbage: NaN, or where elements have scales, numbers that matter."""
    groups = size // GROUP if size % GROUP == 0 else 1
    shape = (pages, block, groups, size // groups)
    if not scaled:
        return {"index_key": torch.full(shape, float("nan"), dtype=draw.dtype, device=draw.device)}
    elements = (draw.floats(*shape) * 400).to(torch.float8_e4m3fn)
    return {"index_key": elements, "index_key_scale": draw.floats(*shape[:-1]) + 0.5}


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str, k: torch.Tensor, pages: int = 5, block: int = 16, padding: int = 0, scaled: bool = False
    ) -> Case:
        cache = random_index_cache(draw, pages, block, k.shape[-1], scaled)
        slots = random_slots(draw, k.shape[0], pages, block, padding)
        return Case(name, (k, cache, slots), {}, {"layout": "plain_scaled" if scaled else "plain"})

    for scaled in (False, True):
        suffix = "_scaled" if scaled else ""
        yield case("random" + suffix, draw.normal(9, 128), scaled=scaled)
        yield case("groups" + suffix, draw.normal(7, 256), scaled=scaled)
        yield case("odd" + suffix, draw.normal(3, 33), 4, 5, scaled=scaled)
        yield case("padded" + suffix, draw.normal(8, 32), 3, padding=5, scaled=scaled)
        yield case("strided" + suffix, draw.strided(6, 64), scaled=scaled)
        yield case("empty" + suffix, draw.normal(0, 64), scaled=scaled)
    yield case("zeros_scaled", draw.normal(4, 128, scale=0.0), scaled=True)
    yield case("uneven_scaled", draw.normal(6, 128) * draw.between(-8, 8, 6, 1).exp(), scaled=True)


@custom_op(cases=_cases, errors=ErrorModel(exact=True, ignore_null_page=("cache",)), mutates=["cache"])
def store_index_keys(k: torch.Tensor, cache: Cache, slot_mapping: torch.Tensor) -> None:
    """Write index keys k [T, D] to ``cache``: ``index_key`` [pages, block, G, D / G], of any dtype that k rounds to.

    With an ``index_key_scale`` float32 [pages, block, G], each group is divided by what just fits its largest
    magnitude (1 where it is zero), which is kept there, and rounded to nearest even. ``slot_mapping`` int32 [T] is as
    in store_kv. Mutates the cache alone.
    """
    keys = cache["index_key"]
    slots, block = slot_mapping.long(), keys.shape[1]
    where = (slots // block, slots % block)
    k = k.reshape(-1, *keys.shape[2:])
    if "index_key_scale" in cache:
        write_rounded(cache, "index_key", where, k, None)
    else:
        keys[where] = k.to(keys.dtype)
