"""Faults planted where a cache of NVFP4 meets its nibbles and the scales of its groups: each is caught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.attention import AttentionTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.reference.nvfp4_cache_attention import Nvfp4CacheAttention
from hardpoint_plugin_api import NVFP4, CacheLayout, GroupScaledLayout, StoreCall, write_group_rounded
from tests.conformance.trying import HEALTHY, Caught, first_failure, subject

Tensor = torch.Tensor
Cache = dict[str, Tensor]


class ReadsOtherwise(Nvfp4CacheAttention):
    """Reads through a cache that ``changed`` returns."""

    def changed(self, name: str, view: Tensor) -> Tensor:
        """The view ``name``, spoiled."""
        return view

    def read(self, cache: Cache, pages: Tensor) -> tuple[Tensor, Tensor]:
        return super().read({name: self.changed(name, view) for name, view in cache.items()}, pages)


class ReadsSwappedNibbles(ReadsOtherwise):
    def changed(self, name: str, view: Tensor) -> Tensor:
        return view if name.endswith("_scale") else view >> 4 | view << 4


class ReadsAnotherTokensScales(ReadsOtherwise):
    def changed(self, name: str, view: Tensor) -> Tensor:
        return view.view(torch.uint8).roll(1, dims=1).view(view.dtype) if name.endswith("_scale") else view


class ReadsTheOtherHeadsScales(ReadsOtherwise):
    def changed(self, name: str, view: Tensor) -> Tensor:
        return view.view(torch.uint8).flip(-2).view(view.dtype) if name.endswith("_scale") else view


class ReadsTheOtherGroupsScale(ReadsOtherwise):
    def changed(self, name: str, view: Tensor) -> Tensor:
        return view.view(torch.uint8).flip(-1).view(view.dtype) if name.endswith("_scale") else view


class ReadsWithoutTheLayersScales(Nvfp4CacheAttention):
    def read(self, cache: Cache, pages: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layout.to_logical(cache, pages).values()
        return keys, values


class Stores(Nvfp4CacheAttention):
    """Stores as it should; faults change ``spoil``."""

    def spoil(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        """Change what was written for tokens at ``where``: pages, and slots in them."""

    def store(self, call: StoreCall) -> None:
        super().store(call)
        slots = call.slot_mapping.long()
        for name in "kv":
            self.spoil(call.cache, name, (slots // self.spec.block_size, slots % self.spec.block_size))


class StoresSwappedNibbles(Stores):
    def spoil(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        cache[name][where] = cache[name][where] >> 4 | cache[name][where] << 4


class StoresAnotherTokensScales(Stores):
    def spoil(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        scales = cache[f"{name}_scale"].view(torch.uint8)
        scales[where] = scales[where].roll(1, dims=0)


class StoresNoSigns(Stores):
    def spoil(self, cache: Cache, name: str, where: tuple[Tensor, Tensor]) -> None:
        cache[name][where] = cache[name][where] & 0x77


class StoresWithoutTheLayersScales(Nvfp4CacheAttention):
    def store(self, call: StoreCall) -> None:
        slots = call.slot_mapping.long()
        for name, x in (("k", call.k), ("v", call.v)):
            write_group_rounded(
                call.cache, name, (slots // self.spec.block_size, slots % self.spec.block_size), x, None
            )


class LayoutWithOneScaleForAHead(GroupScaledLayout):
    """Reads the scale of a head's first group for all of its groups."""

    def to_logical(self, views: Mapping[str, Tensor], pages: Tensor) -> Cache:
        firsts = {n: x[..., :1].expand_as(x) if n.endswith("_scale") else x for n, x in views.items()}
        return super().to_logical({n: x.contiguous() for n, x in firsts.items()}, pages)


def with_layout(kind: type[CacheLayout]) -> type[Nvfp4CacheAttention]:
    return type(f"With{kind.__name__}", (Nvfp4CacheAttention,), {"layout": kind()})


PLANTED: dict[str, tuple[type[Nvfp4CacheAttention], str, str]] = {
    "nibbles swapped": (ReadsSwappedNibbles, "values", "float32/*"),
    "scales of another token": (ReadsAnotherTokensScales, "values", "float32/*"),
    "scales of the other head": (ReadsTheOtherHeadsScales, "values", "float32/*"),
    "scale of the other group": (ReadsTheOtherGroupsScale, "values", "float32/*"),
    "layer's scales ignored": (ReadsWithoutTheLayersScales, "values", "float32/*/static/*"),
    "nibbles swapped in store": (StoresSwappedNibbles, "values", "store/*"),
    "scales stored for another token": (StoresAnotherTokensScales, "values", "store/*"),
    "signs not stored": (StoresNoSigns, "values", "store/*"),
    "layer's scales ignored in store": (StoresWithoutTheLayersScales, "values", "store/*/static"),
    "one scale for a head": (with_layout(LayoutWithOneScaleForAHead), "round-trip", "layout/*"),
}


def tried(site: Site, backend: type[Nvfp4CacheAttention], cases: str, every: int = 1) -> Caught | None:
    claims: list[dict[str, Any]] = [
        {"dtype": ["float32"]},
        {"kv_dtype": [NVFP4]},
        {"head_size": [32]},
        {"block_size": [4]},
        {"feature": ["static_cache_scales"]},
    ]
    contribution = subject(site, backend, "attention", name="reference_nvfp4_cache", requires=claims)
    return first_failure(contribution, AttentionTrials(), cases, Plan(), every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    backend, check, cases = PLANTED[title]
    caught = tried(site, backend, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)
    assert not caught.codes & {"structure", "exception"}, str(caught)


@HEALTHY
def test_a_healthy_backend_passes(site: Site, every: int) -> None:
    caught = tried(site, Nvfp4CacheAttention, "*", every)
    assert caught is None, str(caught)
