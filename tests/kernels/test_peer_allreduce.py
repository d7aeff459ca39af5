"""The all-reduce over peer memory as it is compiled; ``tests/cuda/test_peer_allreduce.py`` runs it."""

from __future__ import annotations

import pytest

from tests.kernels.compiling import Job, compile_kernels

_INTEGERS = dict.fromkeys(["num_rows", "most", "rank", "turns_at"], "i32") | {"n": "i32:16"}
_POINTERS = dict.fromkeys(["x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr"], "*bf16")


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("sm_80", "sm_120"))]
)
def test_rows_go_in_vectors(target: str) -> None:
    """Straight from load to store, 16 bytes at a time; what comes in is read from memory, not from a cache."""
    jobs = [
        Job(
            "hardpoint_cuda.kernels.peer_allreduce:allreduce_add_rms_norm_kernel",
            _INTEGERS | _POINTERS | {"peers_ptr": "*i64", "eps": "fp32"},
            {"WORLD": world, "BLOCK": block},
            target,
            num_warps=warps,
            num_stages=1,
        )
        for world, block, warps in ((2, 4096, 16), (8, 4096, 16), (2, 64, 2))
    ]
    *wide, narrow = compile_kernels(jobs)
    assert narrow.count("bar.sync") > 2, "warps wait for one another before a row is given back"
    for compiled in wide:
        assert compiled.count("ld.volatile.global.v4") >= 2
        assert compiled.count("st.global.v4.b32") >= 2
        assert compiled.spilled == 0
        assert compiled.registers <= 64, "all programs of a launch must run at once"
