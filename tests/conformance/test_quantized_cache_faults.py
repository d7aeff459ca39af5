"""Faults planted where a cache of 8-bit elements meets its scales: each is caught, by the check that should."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.attention import ERRORS, AttentionTrials
from hardpoint.conformance.families.steps import Piece, draw_requests, expectations, with_scaled_weights
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.ops.error_model import compare
from hardpoint.reference.quantized_cache_attention import QuantizedCacheAttention
from hardpoint_plugin_api import AttentionSpec, CacheLayout, CacheSpec, Region, ScaledLayout, StoreCall, write_rounded
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject

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
        keys, values = self.layout.to_logical(cache, pages).values()
        k_scale, v_scale = self.cache_scales
        return keys if v_scale is None else keys * v_scale, values if k_scale is None else values * k_scale


class Stores(QuantizedCacheAttention):
    """Stores as it should; faults change ``stored``."""

    def stored(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        """Spoil what was written for tokens at ``where``: pages, and slots in them."""

    def store(self, call: StoreCall) -> None:
        super().store(call)
        slots = call.slot_mapping.long()
        for name in "kv":
            self.stored(call.cache, name, (slots // self.spec.block_size, slots % self.spec.block_size))


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
    def store(self, call: StoreCall) -> None:
        slots = call.slot_mapping.long()
        for name, x in (("k", call.k), ("v", call.v)):
            write_rounded(call.cache, name, (slots // self.spec.block_size, slots % self.spec.block_size), x, None)


class LayoutWithoutScales(ScaledLayout):
    """Casts and saturates on the way in, and reads as it wrote."""

    def regions(self, spec: CacheSpec, block_size: int) -> tuple[Region, ...]:
        return super().regions(spec, block_size)[:2]


class LayoutReadsTheNeighboursScale(ScaledLayout):
    def to_logical(self, views: Mapping[str, Tensor], pages: Tensor) -> Cache:
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


def tried(
    site: Site, backend: type[QuantizedCacheAttention], kv_dtype: str, cases: str, every: int = 1
) -> Caught | None:
    claims: list[dict[str, Any]] = [
        {"dtype": ["float32"]},
        {"kv_dtype": [kv_dtype]},
        {"head_size": [16]},
        {"block_size": [4]},
        {"feature": ["static_cache_scales"]},
    ]
    contribution = subject(site, backend, "attention", name="reference_quantized_cache", requires=claims)
    return first_failure(contribution, AttentionTrials(), cases, Plan(), every=every)


@pytest.mark.parametrize("kv_dtype", [FLOAT8, pytest.param(INT8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str, kv_dtype: str) -> None:
    backend, check, cases = PLANTED[title]
    caught = tried(site, backend, kv_dtype, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)
    assert not caught.codes & {"structure", "exception"}, str(caught)


@HEALTHY
@pytest.mark.parametrize("kv_dtype", [FLOAT8, pytest.param(INT8, marks=pytest.mark.nightly)])
def test_a_healthy_backend_passes(site: Site, kv_dtype: str, every: int) -> None:
    caught = tried(site, QuantizedCacheAttention, kv_dtype, "*", every)
    assert caught is None, str(caught)


@pytest.mark.parametrize("kv_dtype", ["float8_e5m2", INT8])
@pytest.mark.parametrize("keys", [1, 3])
def test_a_scale_that_is_rounded_into_its_weight_is_no_sum_in_16_bits(kv_dtype: str, keys: int) -> None:
    """With few keys, all elements of a head share one error: its size is luck."""
    spec, pieces = AttentionSpec(32, 1, 16, 0.25, "bfloat16", kv_dtype, 16), (Piece(1, keys),)
    for seed in range(60):
        (request,) = requests = draw_requests(spec, pieces, torch.Generator().manual_seed(seed))
        held = [(request.k.double(), request.v.double())]
        (wanted,) = expectations(spec, requests, pieces, None, None, held)
        (result,) = with_scaled_weights(request.q, request.k, request.v, spec, None, None, seeds=[1000 + seed])
        judged = compare("output", result, wanted.own, wanted.truth, ERRORS, result.device)
        assert not judged.faults, f"{seed}: {judged.faults}"
