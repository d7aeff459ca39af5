"""Kernels compiled for devices that are not here, by the compiler that Triton brings along.

The compiler may abort its process, or take minutes, so it runs in a child with a time limit, which never sees the
interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import run_module
from tests.support.simulated import CACHE

TARGETS = ("sm_90", "sm_100", "gfx942", "gfx950")
PAIRS_OF_TARGETS = [
    pytest.param(("sm_90", "gfx942"), id="sm_90-gfx942"),
    pytest.param(("sm_100", "gfx950"), id="sm_100-gfx950", marks=pytest.mark.nightly),
]
"""Parameters for a test: of each maker's targets one by default, the other in the long sweeps."""
READ_FIRST = {
    "decode_attention": {"seq_lens", "block_table"},
    "decode_latent_attention": {"seq_lens", "block_table"},
    "qk_norm_rope_store_kernel": {"positions_ptr", "slots_ptr", "cos_sin_ptr", "q_weight_ptr", "k_weight_ptr"},
    "rms_norm_kernel": {"weight_ptr"},
    "allreduce_add_rms_norm_kernel": {"weight_ptr", "peers_ptr"},
    "_gemm": {"weight_scale_ptr"},
    "_skinny": {"weight_ptr", "weight_scale_ptr"},
}
"""Kernels that read something before they wait for the one before them, and what: all of it stood there when the step's
first layer began."""
_WAIT = "griddepcontrol.wait"
_STEPS = re.compile(r"griddepcontrol\.\w+|(?:ld|st|cp|atom|red)\.(?:async|global|volatile|acquire|relaxed)[\w.]*")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """One variant of a kernel, ``module:function``, for one target.

    ``signature`` says of what type each parameter is that is no constexpr, as Triton writes it ("*bf16", "i64",
    "fp32"), and constexprs by name what they are. Gluon's descriptors are "tensordesc<...>". An argument whose type
    ends in ":16" is a multiple of 16; pointers always are, unless they end in ":1". None as a pointer stands among the
    constexprs. A kernel with a parameter BEGIN is compiled as it is launched on the target: on sm_90 and later while
    what comes before it still ends.
    """

    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    target: str = "sm_90"
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Compiled:
    """The result of a job: vector registers, spilled bytes per thread, bytes of shared memory.

    ``assembly`` is PTX or AMDGCN; ``instructions`` counts its mnemonics.
    """

    job: Job
    registers: int
    spilled: int
    shared: int
    assembly: str = field(repr=False)

    def count(self, mnemonic: str) -> int:
        """How many instructions begin with ``mnemonic``."""
        return len(re.findall(rf"^\s+(?:@!?%p\d+\s+)?{re.escape(mnemonic)}", self.assembly, re.MULTILINE))


def compile_kernels(jobs: Sequence[Job], seconds: float = 120.0) -> list[Compiled]:
    """Compile ``jobs`` one after the other in one child process, which is killed after ``seconds``.

    Triton keeps its results, by the kernels' sources, options and compilers, in a folder that outlives sessions. Raises
    AssertionError with the compiler's own words where one does not compile, or where one that may be launched early
    touches memory before it has waited. Gluon's parts stand in an order of their own, so that this is not seen there.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "jobs.json"
        order.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
        variables = {
            "TRITON_CACHE_DIR": str(CACHE / "triton"),
            "TRITON_DISABLE_LINE_INFO": "1",
            "TRITON_INTERPRET": "0",
        }
        done = run_module("tests.kernels.compiling", [str(order)], _ROOT, seconds, variables)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(jobs), f"{jobs[len(results)]}\n{done.stdout[-6000:]}"
    return [Compiled(job, **result) for job, result in zip(jobs, results, strict=True)]


SHARED_KIB = {
    "sm_80": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1201": 64,
}
"""Most shared memory of one program: CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability"; LDS of a compute unit in AMD's CDNA ISA guides."""


def compile_in_stages_that_fit(jobs: Sequence[Job], seconds: float) -> list[Compiled]:
    """``compile_kernels``, and again with a stage less what takes too much: as ``in_stages_that_fit`` launches it."""
    done, left = list[Compiled](), list(jobs)
    while left:
        found = compile_kernels(left, seconds)
        large = [one for one in found if one.shared > SHARED_KIB[one.job.target] << 10 and one.job.num_stages > 1]
        done += [one for one in found if one not in large]
        left = [_with_a_stage_less(one.job) for one in large]
    return done


def _with_a_stage_less(job: Job) -> Job:
    num_stages = job.num_stages - 1
    named = {"STAGES": num_stages} if "STAGES" in job.constexprs else {}
    return replace(job, num_stages=num_stages, constexprs={**job.constexprs, **named})


def _compile(job: Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, name = job.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    nvidia = job.target.startswith("sm_")
    constexprs, options = dict(job.constexprs), {"num_warps": job.num_warps, "num_stages": job.num_stages}
    begins = "BEGIN" in kernel.arg_names
    early = begins and nvidia and int(job.target[3:]) >= 90
    if begins:
        constexprs["BEGIN"] = None
    if early:
        from hardpoint_cuda.overlapped import OVERLAP

        constexprs["BEGIN"] = OVERLAP.begin
        options |= OVERLAP.options
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    signature, attributes = {}, {}
    for number, parameter in enumerate(kernel.arg_names):
        if parameter in constexprs:
            signature[parameter] = "constexpr"
            continue
        kind, _, divisor = job.signature[parameter].partition(":")
        signature[parameter] = kind
        if divisor == "16" or (kind.startswith("*") and not divisor):
            attributes[(number,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", int(job.target[3:]), 32) if nvidia else GPUTarget("hip", job.target, 64)
    compiled = triton.compile(
        source(kernel, signature, constexprs, attributes),
        target=target,
        options=options,
    )
    assembly = compiled.asm["ptx" if nvidia else "amdgcn"]
    if early:
        before, wait, _ = assembly.partition(_WAIT)
        steps = _STEPS.findall(before)
        reads = job.kernel.partition(":")[2] in READ_FIRST
        assert wait, f"{job.kernel} does not wait"
        waits = kernel.is_gluon() or all(reads and step.startswith("ld.global") for step in steps)
        assert waits, f"{job.kernel} does not wait for {steps}"
    measured = _of_cubin(compiled.asm["cubin"]) if nvidia else _of_amdgcn(assembly)
    return {**measured, "shared": compiled.metadata.shared, "assembly": assembly}


def _of_cubin(cubin: bytes) -> dict[str, int]:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return {"registers": int(numbers["REG"]), "spilled": int(numbers["STACK"])}


def _of_amdgcn(assembly: str) -> dict[str, int]:
    numbers = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return {"registers": int(numbers["vgpr_count"]), "spilled": 4 * int(numbers["vgpr_spill_count"])}


def main() -> None:
    """Read jobs from a file, write a line of JSON for each."""
    jobs = [Job(**job) for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]
    for job in jobs:
        with contextlib.redirect_stdout(sys.stderr):
            result = _compile(job)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
