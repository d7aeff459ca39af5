"""The collectives over peer memory as they are compiled; ``tests/cuda/test_peer_communicator.py`` runs them."""

from __future__ import annotations

import re

import pytest

from hardpoint_cuda.peer_communicator import PROGRAMS, WARPS
from tests.kernels.compiling import Job, compile_kernels

_INTEGERS = dict.fromkeys(
    ["num_rows", "words", "rank", "world", "slot", "flags_at", "meetings_at", "left_at"], "i32"
) | {"peers_ptr": "*i64"}


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("sm_80", "sm_120"))]
)
def test_vectors_and_flags(target: str) -> None:
    """Words go in vectors of 16 bytes, straight from load to store; flags are released and acquired by the system."""
    jobs = [
        Job(
            f"hardpoint_cuda.kernels.peer_collectives:{name}",
            _INTEGERS | {"x_ptr": kind, "out_ptr": kind},
            more | {"VECTOR": vector, "PROGRAMS": PROGRAMS, "BLOCK": vector * 32 * WARPS},
            target,
            num_warps=WARPS,
            num_stages=1,
        )
        for name, kind, vector, more in (
            ("gather_columns_kernel", "*i32", 4, {}),
            ("sum_kernel", "*bf16", 8, {"WORLD": 2}),
            ("sum_kernel", "*fp32", 4, {"WORLD": 8}),
        )
    ]
    for job, compiled in zip(jobs, compile_kernels(jobs), strict=True):
        assert compiled.count("st.global.v4.b32") >= (1 if "sum" in job.kernel else 3)
        assert re.search(r"ld\.global\.cg\.v4\.b32", compiled.assembly)
        assert compiled.count("atom.global.sys.release.exch") == 1
        assert re.search(r"ld\.global\.sys\.acquire|atom\.global\.sys\.acquire", compiled.assembly)
        assert compiled.count("ldmatrix") == 0, "words go through shared memory"
        assert compiled.spilled == 0
        assert compiled.registers <= 128, "all programs of a launch must run at once"
