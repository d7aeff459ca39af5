"""Running all cases of an op past ``judge``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch

from hardpoint.ops.base import Case, CustomOp
from hardpoint.ops.judge import Expected, Verdict, judge, op_expected

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = [pytest.param(dtype, marks=[pytest.mark.nightly] * (dtype != torch.bfloat16)) for dtype in DTYPES]
"""Parameters of tests in Triton's interpreter, which runs the same code for every dtype."""
CPU = torch.device("cpu")


def cases(op: CustomOp[..., Any], dtype: torch.dtype, seed: int = 0) -> Iterator[Case]:
    """Fresh cases."""
    return op.cases(torch.Generator().manual_seed(seed), dtype, CPU)


@lru_cache(maxsize=8)
def expected_cases(op: CustomOp[..., Any], dtype: torch.dtype, seed: int = 0) -> list[tuple[Case, Expected]]:
    """Cases and their expected results, kept for tests of one op that follow each other; ``judge`` changes neither."""
    with torch.inference_mode():
        return [(case, op_expected(op, case)) for case in cases(op, dtype, seed)]


def verdicts(
    op: CustomOp[..., Any], implementation: Callable[..., Any], dtype: torch.dtype, seed: int = 0
) -> list[Verdict]:
    """One verdict per case."""
    given = expected_cases(op, dtype, seed)
    return [judge(op, implementation, case, dtype=dtype, expected=expected) for case, expected in given]


def failures(op: CustomOp[..., Any], implementation: Callable[..., Any], dtype: torch.dtype) -> list[str]:
    """The verdicts that did not pass, as text."""
    return [str(v) for v in verdicts(op, implementation, dtype) if not v.passed]
