"""Faults planted in elements: each is caught, by the check that should; and specs of any element can be tried."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hardpoint.conformance.families.element import ElementTrials
from hardpoint.conformance.site import Site
from hardpoint_plugin_api import Element, PluginLoadError, TableElement
from tests.conformance.trying import EveryCheck, first_failure, subject

TABLE = (-1.0, -0.5, -0.25, 0.0, 0.125, 0.25, 0.5, 1.0)
HEALTHY = TableElement("int4", 3, table=TABLE)


@dataclass(frozen=True)
class Faulty(TableElement):
    """``HEALTHY`` with a fault of the name ``fault``."""

    fault: str = ""

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.fault == "half precision" and dtype == torch.float32:
            return super().decode(codes, torch.bfloat16).float() * (1 + 2**-9)
        if self.fault == "always float32":
            return super().decode(codes, torch.float32)
        if self.fault == "one row":
            return super().decode(codes, dtype).flatten(1) if codes.dim() > 1 else super().decode(codes, dtype)
        if self.fault == "strides of codes ignored":
            return super().decode(codes.as_strided(codes.shape, codes.new_empty(codes.shape).stride()), dtype)
        if self.fault == "clears codes":
            values = super().decode(codes, dtype)
            codes.zero_()
            return values
        return super().decode(codes, dtype)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "truncates":
            return super().encode(x.trunc())
        if self.fault == "no last code":
            return super().encode(x).clamp(max=len(TABLE) - 2)
        if self.fault == "wraps":
            return super().encode(torch.where(x.abs() > 4 * self.largest, -x, x))
        if self.fault == "int64":
            return super().encode(x).long()
        if self.fault == "strides ignored":
            return super().encode(x.as_strided(x.shape, torch.empty(x.shape).stride()))
        if self.fault == "zero below zero":
            return super().encode(torch.where((x == 0) & x.signbit(), -0.25, x))
        if self.fault == "clamps in place":
            return super().encode(x.clamp_(-1, 1))
        return super().encode(x)


def test_the_healthy_one_passes(site: Site) -> None:
    tried = subject(site, HEALTHY, "element", name="int4")
    assert first_failure(tried, ElementTrials()) is None


@pytest.mark.parametrize(
    ("fault", "check", "code"),
    [
        ("half precision", "values", "values"),
        ("always float32", "values", "form"),
        ("one row", "values", "form"),
        ("clears codes", "inputs", "mutated"),
        ("truncates", "nearest", "nearest"),
        ("no last code", "nearest", "nearest"),
        ("wraps", "ends", "ends"),
        ("int64", "nearest", "form"),
        ("clamps in place", "inputs", "mutated"),
        ("strides of codes ignored", "values", "values"),
        ("strides ignored", "nearest", "strided"),
        ("zero below zero", "nearest", "nearest"),
    ],
)
def test_a_faulty_one_is_caught(site: Site, fault: str, check: str, code: str) -> None:
    tried = subject(site, Faulty("int4", 3, table=TABLE, fault=fault), "element", name="int4")
    caught = first_failure(tried, ElementTrials())
    assert caught is not None
    assert (caught.check, caught.codes) == (check, {code}), caught


@pytest.mark.parametrize(
    ("target", "message"),
    [(TableElement, "must be an instance of"), (TableElement("int3", 3, table=TABLE), "is the element 'int3'")],
)
def test_a_target_that_is_none_is_refused(site: Site, target: Element, message: str) -> None:
    with pytest.raises(PluginLoadError, match=message):
        list(ElementTrials().trials(subject(site, target, "element", name="int4"), EveryCheck()))
