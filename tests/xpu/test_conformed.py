"""The conformance kit on the kernels of vllm-xpu-kernels, through the stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.conformed import faults

SOME = pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])


@SOME
@pytest.mark.parametrize("name", ["xpu_flash", "xpu_fp8_weight", "xpu_fp8", "xpu_int4", "xpu_grouped"])
def test_nothing_is_found(xpu_kernels: Path, b580: None, name: str, every: int) -> None:
    assert not list(faults("xpu", name, every))
