"""Attention over keys side by side through torch's kernel for CPUs."""

from __future__ import annotations

import pytest
import torch

from hardpoint.ops.varlen_attention import varlen_attention as op
from hardpoint_cpu.ops.varlen_attention import varlen_attention
from tests.ops.judging import DTYPES, failures


@pytest.mark.parametrize("dtype", DTYPES)
def test_meets_the_error_model(dtype: torch.dtype) -> None:
    assert not failures(op, varlen_attention, dtype)
