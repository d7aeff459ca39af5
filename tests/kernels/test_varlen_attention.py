"""Attention over keys and values side by side, in Triton."""

from __future__ import annotations

import pytest
import torch

from hardpoint.kernels import varlen_attention
from tests.kernels.judged import failures, variants

_SLOW = {"varlen_attention": ("deepseek", "long")}


@pytest.mark.parametrize(("name", "dtype", "device"), variants("varlen_attention", "merge_attention"))
def test_meets_the_error_model(name: str, dtype: torch.dtype, device: str) -> None:
    failed = failures(name, getattr(varlen_attention, name), dtype, device, _SLOW)
    assert not failed, "\n".join(failed)
