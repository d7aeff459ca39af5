"""The kernels of the exchange over peer memory as they are compiled; ``tests/cuda/test_peer_all2all.py`` runs them."""

from __future__ import annotations

import re

import pytest

from tests.kernels.compiling import Job, compile_kernels

_COUNTS = ("num_tokens", "most", "words", "scale_words", "hidden", "top_k", "own", "rank", "world")
_INTEGERS = dict.fromkeys([*_COUNTS, "flags_at", "meetings_at", "left_at", "ids_at", "weights_at"], "i32")
_OFFSETS = {"rows_at": "i32", "scales_at": "i64", "sums_at": "i64"}
_POINTERS = {"scales_ptr": "*fp32", "ids_ptr": "*i32", "weights_ptr": "*fp32", "peers_ptr": "*i64"}
_CONSTEXPRS = {"TOP_K": 8, "PROGRAMS": 432}


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("sm_80", "sm_120"))]
)
def test_vectors_and_flags(target: str) -> None:
    """Rows go in vectors of 16 bytes, straight from load to store; flags are released and acquired by the system."""
    known = _INTEGERS | _OFFSETS | _POINTERS
    jobs = [
        Job(
            f"hardpoint_cuda.kernels.peer_exchange:{name}",
            known | dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), kind),
            _CONSTEXPRS | more | {"VECTOR": vector, "BLOCK": 256 * vector},
            target,
            num_warps=8,
            num_stages=1,
        )
        for name, kind, vector, more in (
            ("dispatch_kernel", "*i32", 4, {}),
            ("combine_kernel", "*bf16", 8, {"WORLD": 2}),
            ("combine_kernel", "*bf16", 8, {"WORLD": 8}),
        )
    ]
    for compiled in compile_kernels(jobs):
        assert compiled.count("st.global.v4.b32") >= 1
        assert compiled.count("atom.global.sys.release.exch") == 1
        assert re.search(r"ld\.global\.sys\.acquire|atom\.global\.sys\.acquire", compiled.assembly)
        assert compiled.count("ldmatrix") == 0, "rows go through shared memory"
        assert compiled.spilled <= (8 if target == "sm_120" else 0)
        assert compiled.registers <= 64, "all programs of a launch must run at once"
