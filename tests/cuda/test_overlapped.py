"""Kernels that are launched before the one before has ended, on a device: they wait, and what does not is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
from triton.language.extra.cuda import gdc_launch_dependents

from hardpoint import LLM, SamplingParams
from hardpoint.conformance.families.linear import LinearTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site
from hardpoint.kernels.gemv import TritonGemv
from hardpoint.kernels.launch import overlap_launches
from hardpoint.plugin_host import discover
from hardpoint_cuda.overlapped import OVERLAP
from tests.conformance.trying import subject
from tests.support.checkpoints import random_prompts, write_checkpoint

pytestmark = pytest.mark.accelerator

SHAPE: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "head_dim": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _no_wait() -> None:
    gdc_launch_dependents()


@pytest.fixture
def site() -> Iterator[Site]:
    yield Site.open(discover(), "cuda")
    overlap_launches("cuda", OVERLAP)


@pytest.mark.parametrize("waits", [True, False])
def test_chains(site: Site, waits: bool) -> None:
    if not waits:
        overlap_launches("cuda", replace(OVERLAP, begin=_no_wait))
    claims = [{"spec": ["float32/float32", "bfloat16/bfloat16"]}]
    trials = LinearTrials().trials(subject(site, TritonGemv, "linear", name="triton_gemv", requires=claims), Plan())
    found = [check.run() for trial in trials for check in trial.checks if check.name == "chain"]
    assert any(not finding.unsupported for finding in found)
    assert {fault.code for finding in found for fault in finding.faults} == (set() if waits else {"too-early"})


@pytest.mark.parametrize("method", [None, "fp8", "int4"])
@pytest.mark.parametrize("count", [1, 8])
def test_engines_decode_the_same_tokens(method: str | None, count: int, tmp_path: Path) -> None:
    """To the bit: each layer's kernels begin early, and read what the ones before have written."""
    write_checkpoint(tmp_path, "qwen3", **SHAPE)
    decoded = []
    for overlaps in (True, False):
        with LLM(
            str(tmp_path),
            quantization=method,
            kv_cache_memory="256MiB",
            max_num_seqs=8,
            dtype="bfloat16",
            plugin_config={"cuda": {"overlap_launches": overlaps}},
        ) as llm:
            outputs = llm.generate(random_prompts(count, 40, seed=2), GREEDY, use_tqdm=False)
            decoded.append([output.outputs[0].token_ids for output in outputs])
    assert decoded[0] == decoded[1]
