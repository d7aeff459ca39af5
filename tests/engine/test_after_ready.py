"""An engine that is ready imports nothing more: the first request of any kind pays for no module."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint_cpu import compiled

SCRIPT = """
import sys
from hardpoint import LLM, SamplingParams

KINDS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 1},
    "truncated": {"temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"presence_penalty": 1.0, "repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "bad_words": ["the"]},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
    "several": {"n": 3, "stop": ["zzz"]},
}
with LLM(model="demo", platform="cpu", max_num_seqs=8, kv_cache_memory=2**24) as llm:
    known = set(sys.modules)
    for length in (1, 40):
        for kind, settings in KINDS.items():
            llm.generate(["whale " * length], SamplingParams(max_tokens=3, **settings), use_tqdm=False)
            new = set(sys.modules) - known
            assert not new, f"{kind}, prompt of {length} words: {sorted(new)[:20]}"
"""


@pytest.mark.skipif(compiled.missing() is not None, reason="recorded steps need the compiled kernels")
def test_nothing_is_imported_after_the_start() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
