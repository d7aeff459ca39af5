"""Faults planted in the layer ``mla``, where latents meet rotation and absorption: each is caught, by the check that
should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hardpoint.conformance.families.layers import LayerTrials
from hardpoint.conformance.site import Site
from hardpoint.context import Context
from hardpoint.layers.latent_prompts import Prompts
from hardpoint.layers.mla import MLA
from hardpoint_plugin_api import MLAArgs
from tests.conformance.trying import FEWER, Caught, first_failure, subject

Tensor = torch.Tensor
LN_2 = math.log(2)


class Healthy(MLA):
    """Core's own layer, whose parts faults can change one of."""

    def __init__(self, ctx: Context, args: MLAArgs) -> None:
        super().__init__(ctx, args)
        self._norm = self._rms_norm
        self._rms_norm = self.norm
        if args.rope is not None:
            self._turn = self._rotary_embedding
            self._rotary_embedding = self.rotate

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self._turn(q, k, positions, cos_sin, interleaved=interleaved)

    def norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return self._norm(x, weight, eps=eps)


class AbsorbsTheTransposed(Healthy):
    """Reads the matrix of keys and values as [rows of a head, heads], and not as [heads, rows of a head]."""

    def bind(self) -> None:
        super().bind()
        keys = self.kv_up.weights["keys"]
        size = keys.shape
        self.kv_up.weights["keys"] = keys.reshape(size[1], size[0], size[2]).transpose(0, 1).contiguous()


class SwapsKeysAndValuesOfHeads(Healthy):
    """The values' matrix is that of the next head."""

    def bind(self) -> None:
        super().bind()
        self.kv_up.weights["values"] = self.kv_up.weights["values"].roll(1, dims=0)


class RotatesNothing(Healthy):
    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        return q, k


class RotatesKeysTwice(Healthy):
    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, positions, cos_sin, interleaved=interleaved)
        return q, super().rotate(q, k, positions, cos_sin, interleaved=interleaved)[1]


class RotatesTheOtherWay(Healthy):
    """Rotates keys by pairs that stand as those of queries do not."""

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        turned, _ = super().rotate(q, k, positions, cos_sin, interleaved=interleaved)
        return turned, super().rotate(q, k, positions, cos_sin, interleaved=not interleaved)[1]


class ScaleOfTheHead(Healthy):
    """The scale that follows from a head's size, and not the one that YaRN makes of it."""

    def __init__(self, ctx: Context, args: MLAArgs) -> None:
        super().__init__(ctx, replace(args, scale=(args.nope_size + args.rope_size) ** -0.5))


class CachesLatentsWithoutTheirNorm(Healthy):
    def norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return x if weight is self.weights["latent_norm"] else super().norm(x, weight, eps=eps)


class DropsCachedTokens(Healthy):
    """Chunks of a prompt attend to the step's own tokens alone."""

    def _unabsorbed(
        self, q: Tensor, latent: Tensor, rope_key: Tensor, cache: dict[str, Tensor], prompts: Prompts
    ) -> Tensor:
        return super()._unabsorbed(q, latent, rope_key, cache, replace(prompts, context=()))


class CountsCachedTokensTwice(Healthy):
    def _unabsorbed(
        self, q: Tensor, latent: Tensor, rope_key: Tensor, cache: dict[str, Tensor], prompts: Prompts
    ) -> Tensor:
        return super()._unabsorbed(q, latent, rope_key, cache, replace(prompts, context=prompts.context * 2))


class MergesByBase2(Healthy):
    """Takes sums of exponentials for powers of two."""

    def __init__(self, ctx: Context, args: MLAArgs) -> None:
        super().__init__(ctx, args)
        if args.top_k is None:
            merge = self._merge
            self._merge = lambda out, sums, other, other_sums: merge(out, sums * LN_2, other, other_sums * LN_2)


PLANTED = {
    "absorption transposed": AbsorbsTheTransposed,
    "values of another head": SwapsKeysAndValuesOfHeads,
    "rope part not rotated": RotatesNothing,
    "rope part rotated twice": RotatesKeysTwice,
    "keys rotated in other pairs": RotatesTheOtherWay,
    "scale without YaRN's": ScaleOfTheHead,
    "latents without their norm": CachesLatentsWithoutTheirNorm,
    "cached tokens dropped": DropsCachedTokens,
    "cached tokens counted twice": CountsCachedTokensTwice,
    "merged by base 2": MergesByBase2,
}


def tried(site: Site, layer: type[Healthy], every: int = 1) -> Caught | None:
    made = subject(site, layer, "layer", "mla", "default", requires=[{"dtype": ["float32"]}])
    return first_failure(made, LayerTrials(), "*/tokens-*", every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    caught = tried(site, PLANTED[title])
    assert caught, f"{title} was not caught"
    assert caught.check == "values", str(caught)


@FEWER
def test_a_healthy_layer_passes(site: Site, every: int) -> None:
    caught = tried(site, Healthy, every)
    assert caught is None, str(caught)
