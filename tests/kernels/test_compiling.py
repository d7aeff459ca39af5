"""Cross-compilation itself: what it measures, and what it says of a kernel that does not compile."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import TARGETS, Job, compile_kernels

SUM = "tests.kernels.sample_kernels:add"
POINTERS = {"x": "*bf16", "y": "*bf16", "out": "*bf16", "n": "i64:16"}


def test_every_target_is_measured() -> None:
    jobs = [Job(SUM, POINTERS, {"BLOCK": 1024}, target) for target in TARGETS]
    for compiled in compile_kernels(jobs):
        assert 4 <= compiled.registers < 64
        assert compiled.spilled == compiled.shared == 0
        loads = "ld.global" if compiled.job.target.startswith("sm_") else "global_load"
        assert compiled.count(loads) == 2, compiled.assembly


def test_an_error_holds_the_compilers_words() -> None:
    with pytest.raises(AssertionError, match="arange's range must be a power of 2"):
        compile_kernels([Job(SUM, POINTERS, {"BLOCK": 1000})])
