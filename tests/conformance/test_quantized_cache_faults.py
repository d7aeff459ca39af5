"""Faults planted where a cache of 8-bit elements meets its scales: each is caught, by the check that should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.attention.quantized_cache import QuantizedCacheAttention, ScaledLayout, write_rounded
from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint_plugin_api import CacheLayout, CacheSpec, Region
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor
Cache = dict[str, Tensor]
Read = tuple[Tensor, Tensor]


class ReadsWithoutScales(QuantizedCacheAttention):
    def read(self, cache: Cache, pages: Tensor) -> Read:
        return cache["k"][pages].float(), cache["v"][pages].float()


class ReadsByDividing(QuantizedCacheAttention):
    def read(self, cache: Cache, pages: Tensor) -> Read:
        if self.spec.static_cache_scales:
            return super().read(cache, pages)
        k, v = (cache[name][pages].float() / cache[f"{name}_scale"][pages].unsqueeze(-1) for name in "kv")
        return k, v


class ReadsTheNeighboursScale(QuantizedCacheAttention):
    """Each token's scale is that of the token before it in its block."""

    def read(self, cache: Cache, pages: Tensor) -> Read:
        if self.spec.static_cache_scales:
            return super().read(cache, pages)
        k, v = (cache[n][pages].float() * cache[f"{n}_scale"][pages].roll(1, dims=1).unsqueeze(-1) for n in "kv")
        return k, v


class ReadsTheOtherHeadsScale(QuantizedCacheAttention):
    def read(self, cache: Cache, pages: Tensor) -> Read:
        if self.spec.static_cache_scales:
            return super().read(cache, pages)
        k, v = (cache[n][pages].float() * cache[f"{n}_scale"][pages].flip(-1).unsqueeze(-1) for n in "kv")
        return k, v


class SwapsStaticScales(QuantizedCacheAttention):
    def read(self, cache: Cache, pages: Tensor) -> Read:
        keys, values = self.layout.to_logical(cache, pages)
        k_scale, v_scale = self.cache_scales
        return keys if v_scale is None else keys * v_scale, values if k_scale is None else values * k_scale


class Stores(QuantizedCacheAttention):
    """Stores as it should; faults change ``stored``."""

    def stored(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        """Spoil what was written for tokens at ``where``: pages, and slots in them."""

    def store(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        super().store(k, v, cache, slot_mapping)
        slots = slot_mapping.long()
        for name in "kv":
            self.stored(cache, name, (slots // self.spec.block_size, slots % self.spec.block_size))


class StoresNoScale(Stores):
    def stored(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        if f"{name}_scale" in cache:
            cache[f"{name}_scale"][where] = 1.0


class StoresInvertedScales(Stores):
    def stored(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        if f"{name}_scale" in cache:
            cache[f"{name}_scale"][where] = 1 / cache[f"{name}_scale"][where]


class StoresTheNeighboursScale(Stores):
    def stored(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        if f"{name}_scale" in cache:
            cache[f"{name}_scale"][where] = cache[f"{name}_scale"][where].roll(1, dims=0)


class StoresWithoutStaticScales(QuantizedCacheAttention):
    def store(self, k: Tensor, v: Tensor, cache: Cache, slot_mapping: Tensor) -> None:
        slots = slot_mapping.long()
        for name, x in (("k", k), ("v", v)):
            write_rounded(cache, name, (slots // self.spec.block_size, slots % self.spec.block_size), x, None)


class LayoutWithoutScales(ScaledLayout):
    """Casts and saturates on the way in, and reads as it wrote."""

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        return super().regions(spec, block_size)[:2]


class LayoutReadsTheNeighboursScale(ScaledLayout):
    def to_logical(self, views: Cache, pages: Tensor) -> Read:
        shifted = {n: x.roll(1, dims=1) if n.endswith("_scale") else x for n, x in views.items()}
        return super().to_logical(shifted, pages)


def with_layout(kind: type[CacheLayout]) -> type[QuantizedCacheAttention]:
    return type(f"With{kind.__name__}", (QuantizedCacheAttention,), {"layout": kind()})


FLOAT8, INT8 = "float8_e4m3fn", "int8"
PLANTED: dict[str, tuple[type[QuantizedCacheAttention], str, str]] = {
    "scale ignored": (ReadsWithoutScales, "values", "float32/*"),
    "scale inverted": (ReadsByDividing, "values", "float32/*"),
    "scale of the neighbouring token": (ReadsTheNeighboursScale, "values", "float32/*"),
    "scale of the other head": (ReadsTheOtherHeadsScale, "values", "float32/*"),
    "static scales swapped": (SwapsStaticScales, "values", "float32/*"),
    "scale not stored": (StoresNoScale, "values", "store/*"),
    "stored scale inverted": (StoresInvertedScales, "values", "store/*"),
    "stored for the neighbouring token": (StoresTheNeighboursScale, "values", "store/*"),
    "static scale ignored in store": (StoresWithoutStaticScales, "values", "store/*/static"),
    "layout without scales": (with_layout(LayoutWithoutScales), "round-trip", "layout/*"),
    "layout reads the neighbour's scale": (with_layout(LayoutReadsTheNeighboursScale), "round-trip", "layout/*"),
}


def tried(site: Site, backend: type[QuantizedCacheAttention], kv_dtype: str, cases: str) -> Caught | None:
    claims: list[dict[str, Any]] = [
        {"dtype": ["float32"]},
        {"kv_dtype": [kv_dtype]},
        {"head_size": [16]},
        {"block_size": [4]},
        {"feature": ["static_cache_scales"]},
    ]
    contribution = subject(site, backend, "attention", name="reference_quantized_cache", requires=claims)
    return first_failure(contribution, AttentionTrials(), cases, Plan())


@pytest.mark.parametrize("kv_dtype", [FLOAT8, INT8])
@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str, kv_dtype: str) -> None:
    backend, check, cases = PLANTED[title]
    caught = tried(site, backend, kv_dtype, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)
    assert not caught.codes & {"structure", "exception"}, str(caught)


@pytest.mark.parametrize("kv_dtype", [FLOAT8, INT8])
def test_a_healthy_backend_passes(site: Site, kv_dtype: str) -> None:
    caught = tried(site, QuantizedCacheAttention, kv_dtype, "*")
    assert caught is None, str(caught)
