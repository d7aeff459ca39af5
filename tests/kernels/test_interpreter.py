"""The interpreter computes what devices do, in the dtypes that it alone gets wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from tests.kernels.sample_kernels import cast, multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).to(dtype)
    out = torch.empty(16, 16)
    multiply[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *product([torch.float32, torch.bfloat16], [torch.float16, torch.bfloat16, torch.float8_e4m3fn]),
        (torch.float32, torch.float8_e5m2),
        (torch.int32, torch.bfloat16),
    ],
)
def test_casts_round_to_the_nearest(source: torch.dtype, target: torch.dtype) -> None:
    x = (torch.randn(256) * 30).to(source)
    there, back = torch.empty(256, dtype=target), torch.empty(256)
    cast[(1,)](x, there, 256)
    assert torch.equal(there.float(), x.float().to(target).float())
    cast[(1,)](there, back, 256)
    assert torch.equal(back, there.float())


def test_it_is_switched_on_in_this_process_alone() -> None:
    assert "TRITON_INTERPRET" not in os.environ
    code = "import triton; print(triton.knobs.runtime.interpret)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
