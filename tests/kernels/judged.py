"""Kernels held to their op's own cases and error model: interpreted on the host, or on the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch

from hardpoint import ops
from hardpoint.ops.judge import judge

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def variants(*names: str) -> list[Any]:
    """An op's name, a dtype and a device, as parameters; the accelerator's are marked.

    Other dtypes than bfloat16 interpret the same code: they are left to the long sweeps.
    """
    found = []
    for name, dtype in product(names, DTYPES):
        label = f"{name}-{str(dtype).removeprefix('torch.')}"
        slow = [pytest.mark.nightly] if dtype != torch.bfloat16 else []
        found.append(pytest.param(name, dtype, "cpu", id=label, marks=slow))
        found.append(pytest.param(name, dtype, "accelerator", id=f"{label}-device", marks=pytest.mark.accelerator))
    return found


def failures(
    name: str, kernel: Callable[..., Any], dtype: torch.dtype, device: str, without: Mapping[str, tuple[str, ...]] = {}
) -> list[str]:
    """The verdicts that did not pass, as text.

    On the host, ``without`` names for an op the beginnings of cases that the interpreter takes too long for.
    """
    op: Any = ops.get(name)
    where = torch.device("cpu")
    if device != "cpu":
        found = torch.accelerator.current_accelerator()
        assert found is not None
        where, without = found, {}
    cases = op.cases(torch.Generator().manual_seed(0), dtype, where)
    wanted = [case for case in cases if not case.name.startswith(without.get(name, ("\0",)))]
    verdicts = [judge(op, kernel, case, dtype=dtype) for case in wanted]
    assert len(verdicts) > 3
    return [str(v) for v in verdicts if not v.passed]
