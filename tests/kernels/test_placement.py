"""Inputs at odd addresses, with gaps between rows, amid poison: nothing beside them is read or written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint import ops
from hardpoint.conformance.memory import Placement, PoisonedAllocations
from hardpoint.ops.judge import judge
from tests.kernels.op_kernels import KERNELS, placed

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("placement", [Placement.OFFSET, Placement.APART])
@pytest.mark.parametrize(("name", "kernel"), KERNELS, ids=[name for name, _ in KERNELS])
def test_inputs_may_lie_anywhere(name: str, kernel: Any, placement: Placement) -> None:
    op: Any = ops.get(name)
    cases = op.cases(torch.Generator().manual_seed(1), torch.bfloat16, torch.device("cpu"))
    chosen = [case for case in cases if not case.name.startswith("many") and "empty" not in case.name]
    with PoisonedAllocations():  # type: ignore[no-untyped-call]  # torch
        verdicts = [judge(op, kernel, placed(op, case, placement), dtype=torch.bfloat16) for case in chosen]
    assert verdicts
    failed = [str(v) for v in verdicts if not v.passed]
    assert not failed, "\n".join(failed)
