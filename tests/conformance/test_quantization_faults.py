"""Faults planted in quantization methods: each is caught, by the check that should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.conformance.families.quantization import QuantizationTrials
from hardpoint.conformance.site import Site
from hardpoint.quantization.methods.awq import Awq
from hardpoint.quantization.methods.compressed_tensors import CompressedTensors
from hardpoint.quantization.methods.fp8 import Fp8
from hardpoint.quantization.methods.gptq import Gptq
from hardpoint.quantization.methods.online import Fp8Online, Int4Online, Int8Online
from hardpoint_plugin_api import (
    Dim,
    MethodRequest,
    Module,
    QuantizationMethod,
    QuantSpec,
    Scale,
    Scheme,
    StoredTensor,
)
from tests.conformance.trying import FEWER, Caught, first_failure, subject

Tensor = torch.Tensor
Change = Callable[[Scheme], Scheme]


def changed(kind: type[QuantizationMethod], change: Change) -> type[QuantizationMethod]:
    """``kind`` with its schemes changed."""

    class Changed(kind):  # type: ignore[misc, valid-type]  # a class by any name
        def scheme(self, module: Module) -> Scheme | None:
            made = super().scheme(module)
            return None if made is None else change(made)

    return Changed


def slot(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Fill a slot with something else."""

    def with_read(tensor: StoredTensor) -> StoredTensor:
        def read(stored: Tensor) -> Mapping[str, Tensor]:
            return {key: change(x) if key == name else x for key, x in tensor.read(stored).items()}

        return replace(tensor, read=read)

    return lambda scheme: replace(scheme, stored=tuple(map(with_read, scheme.stored)))


def stored(name: str, **changes: Any) -> Change:
    """Declare a stored tensor otherwise."""
    return lambda scheme: replace(
        scheme, stored=tuple(replace(t, **changes) if t.name == name else t for t in scheme.stored)
    )


def without(name: str) -> Change:
    """Leave a stored tensor out."""
    return lambda scheme: replace(scheme, stored=tuple(t for t in scheme.stored if t.name != name))


def swap_nibbles(x: Tensor) -> Tensor:
    return (x << 4) | (x >> 4)


def other_groups(scheme: Scheme) -> Scheme:
    """Says that rows share a scale, and not columns."""
    (scale,) = scheme.weight.scales
    return replace(scheme, weight=replace(scheme.weight, scales=(Scale(scale.format, scale.block[::-1]),)))


class ScaleDefaultsToOne(Fp8):
    """Takes a missing scale for 1."""

    def scheme(self, module: Module) -> Scheme | None:
        if self._block or f"{module.name}.weight_scale" in self._tensors.names:
            return super().scheme(module)

        def read(weight: Tensor) -> Mapping[str, Tensor]:
            return {"weight": weight, "weight_scale": torch.ones(1, 1)}

        element, one = self._tensors.info(f"{module.name}.weight").dtype, (Scale("float32", (-1, -1)),)
        tensor = StoredTensor("weight", (Dim("out"), Dim("in")), (element,), ("weight", "weight_scale"), read)
        return Scheme(QuantSpec(element, scales=one), QuantSpec("float32"), (tensor,))


class RaisesKeyError(Fp8):
    """Looks a scale up that is not there."""

    def scheme(self, module: Module) -> Scheme | None:
        for name in ("weight_scale_inv",) if self._block else ("weight_scale",):
            self._tensors.info(f"{module.name}.{name}")
        return super().scheme(module)


class KeyOfConfig(Gptq):
    def __init__(self, request: MethodRequest) -> None:
        assert request.config is not None
        self.groups = 128 // request.config["group_size"]  # type: ignore[operator]  # that is the fault
        super().__init__(request)


class ReadsWeights(Gptq):
    """Looks at the whole weight before weights stream."""

    def scheme(self, module: Module) -> Scheme | None:
        name = f"{module.name}.qweight"
        if name in self._tensors.names:
            self._tensors.read(name)
        return super().scheme(module)


class HeadsToo(Int8Online):
    def scheme(self, module: Module) -> Scheme | None:
        return super().scheme(replace(module, kind="linear"))


class HeadsInFourBits(Int4Online):
    """By default; the option is obeyed."""

    def scheme(self, module: Module) -> Scheme | None:
        is_asked = "lm_head" in self.request.options or self.options.text("layers") == "experts"
        return super().scheme(module if is_asked else replace(module, kind="linear"))


class HeadsInSpite(Int4Online):
    """``lm_head=false`` counts for nothing."""

    def __init__(self, request: MethodRequest) -> None:
        rest = {key: value for key, value in request.options.items() if (key, value) != ("lm_head", "false")}
        super().__init__(replace(request, options=rest))


def scale_of_int8_inverted(scheme: Scheme) -> Scheme:
    return slot("weight_scale", lambda x: 1 / x)(scheme) if scheme.weight.element == "int8" else scheme


class AnyOption(Int8Online):
    def __init__(self, request: MethodRequest) -> None:
        super().__init__(replace(request, options={}))


def coarse(scheme: Scheme) -> Scheme:
    """Rounds by scales of twice the size."""

    def read(weight: Tensor) -> Mapping[str, Tensor]:
        slots = dict(scheme.stored[0].read(weight))
        numbers = slots["weight"].float() * slots["weight_scale"]
        slots["weight_scale"] = slots["weight_scale"] * 2
        slots["weight"] = (numbers / slots["weight_scale"]).round().to(torch.int8)
        return slots

    return replace(scheme, stored=(replace(scheme.stored[0], read=read),))


def as_if_contiguous(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def read_otherwise(change: Callable[[Tensor], Tensor], name: str) -> Change:
    """Read a stored tensor through ``change``."""

    def with_read(tensor: StoredTensor) -> StoredTensor:
        return replace(tensor, read=lambda x: tensor.read(change(x))) if tensor.name == name else tensor

    return lambda scheme: replace(scheme, stored=tuple(map(with_read, scheme.stored)))


def rows_past_512_turned(x: Tensor) -> Tensor:
    return torch.cat([x[:512], x[512:].flip(0)])


def last_of_odd_groups(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], x[:, -2:-1]], 1) if x.shape[1] % 2 and x.shape[1] > 1 else x


def coarse_for_small_rows(scheme: Scheme) -> Scheme:
    """A row's scale is at least 1e-4 of the largest."""

    def read(weight: Tensor) -> Mapping[str, Tensor]:
        slots = dict(scheme.stored[0].read(weight))
        numbers, scale = slots["weight"].float() * slots["weight_scale"], slots["weight_scale"]
        slots["weight_scale"] = scale.clamp(min=float(scale.max()) * 1e-4)
        slots["weight"] = (numbers / slots["weight_scale"]).round().to(torch.int8)
        return slots

    return replace(scheme, stored=(replace(scheme.stored[0], read=read),))


def whole_groups_alone(scheme: Scheme) -> Scheme:
    """Takes weights of any width, and cannot read those that its groups do not divide."""

    def read(weight: Tensor) -> Mapping[str, Tensor]:
        return scheme.stored[0].read(weight.unflatten(1, (-1, 32)).flatten(1))

    return replace(scheme, stored=(replace(scheme.stored[0], read=read),))


PLANTED: dict[str, tuple[str, type[QuantizationMethod], str]] = {
    "scale inverted": ("fp8", changed(Fp8, slot("weight_scale", lambda x: 1 / x)), "values"),
    "scales of another row": (
        "compressed-tensors",
        changed(CompressedTensors, slot("weight_scale", lambda x: x.roll(1, 0))),
        "values",
    ),
    "sign of the zero point": ("awq", changed(Awq, slot("weight_zero_point", lambda x: 0 - x)), "values"),
    "zero point one less": ("gptq", changed(Gptq, slot("weight_zero_point", lambda x: x - 1)), "values"),
    "zero point left out": ("awq", changed(Awq, without("qzeros")), "scheme"),
    "nibbles swapped": ("awq", changed(Awq, slot("weight", swap_nibbles)), "values"),
    "groups along the wrong axis": ("awq", changed(Awq, other_groups), "slots"),
    "groups in another order": ("gptq", changed(Gptq, slot("weight_group_index", lambda x: x.flip(-1))), "values"),
    "weight not turned": ("awq", changed(Awq, slot("weight", lambda x: x.view(x.shape[::-1]))), "slots"),
    "slot of another dtype": ("awq", changed(Awq, slot("weight", lambda x: x.view(torch.int8))), "slots"),
    "slot misnamed": ("awq", changed(Awq, stored("scales", fills=("weight_scales",))), "slots"),
    "stored scale written": ("gptq", changed(Gptq, slot("weight_scale", lambda x: x.mul_(2))), "values"),
    "shape of a tensor misdeclared": ("awq", changed(Awq, stored("qweight", dims=(Dim("in"), Dim("out")))), "scheme"),
    "any dtype of a scale": (
        "awq",
        changed(Awq, stored("scales", dtypes=("float16", "bfloat16", "float32", "int64"))),
        "dtype",
    ),
    "missing scale is one": ("fp8", ScaleDefaultsToOne, "missing"),
    "missing scale is a KeyError": ("fp8", RaisesKeyError, "missing"),
    "bad config is a KeyError": ("gptq", KeyOfConfig, "config"),
    "weights read early": ("gptq", ReadsWeights, "scheme"),
    "scales too coarse": ("int8_online", changed(Int8Online, coarse), "values"),
    "rounded down": ("int8_online", changed(Int8Online, slot("weight", lambda x: x - 1)), "values"),
    "online scale inverted": ("fp8_online", changed(Fp8Online, slot("weight_scale", lambda x: 1 / x)), "values"),
    "online nibbles swapped": ("int4_online", changed(Int4Online, slot("weight", swap_nibbles)), "values"),
    "small rows too coarse": ("int8_online", changed(Int8Online, coarse_for_small_rows), "values"),
    "strides ignored": ("int8_online", changed(Int8Online, read_otherwise(as_if_contiguous, "weight")), "strided"),
    "stored strides ignored": ("awq", changed(Awq, read_otherwise(as_if_contiguous, "qweight")), "strided"),
    "rows past 512": ("fp8", changed(Fp8, slot("weight", rows_past_512_turned)), "values"),
    "last of three groups": ("int4_online", changed(Int4Online, slot("weight_scale", last_of_odd_groups)), "values"),
    "whole groups alone": ("int8_online", changed(Int8Online, whole_groups_alone), "slots"),
    "heads quantized": ("int8_online", HeadsToo, "kinds"),
    "heads in four bits": ("int4_online", HeadsInFourBits, "kinds"),
    "heads in spite of the option": ("int4_online", HeadsInSpite, "kinds"),
    "scale of heads inverted": ("int4_online", changed(Int4Online, scale_of_int8_inverted), "values"),
    "any option taken": ("int8_online", AnyOption, "options"),
}
NAMES = {"compressed-tensors": "compressed_tensors"}


def tried(site: Site, of: str, kind: type[QuantizationMethod], every: int = 1) -> Caught | None:
    made = subject(site, kind, "quantization", of, NAMES.get(of, of))
    return first_failure(made, QuantizationTrials(), every=every)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    of, kind, check = PLANTED[title]
    caught = tried(site, of, kind)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


HEALTHY: dict[str, type[QuantizationMethod]] = {
    "fp8": Fp8,
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8_online": Fp8Online,
    "int8_online": Int8Online,
    "int4_online": Int4Online,
}


@FEWER
@pytest.mark.parametrize("of", HEALTHY)
def test_a_healthy_method_passes(site: Site, of: str, every: int) -> None:
    caught = tried(site, of, HEALTHY[of], every)
    assert caught is None, str(caught)
