"""The cache leaves the memory that the largest steps take."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import CapacityError
from tests.support.checkpoints import write_checkpoint

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    seed=1,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    logit_bias={5: 1.0},
    logprobs=5,
    max_tokens=2,
    ignore_eos=True,
)
VOCAB = 60_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_checkpoint(folder, "llama", vocab_size=VOCAB, max_position_embeddings=65_536)
    return folder


def engine(folder: Path, memory_mib: int, **settings: int) -> LLM:
    return LLM(str(folder), platform="sim", plugin_config={"sim": {"memory_mib": memory_mib}}, **settings)


def test_the_largest_step_fits_beside_a_cache_that_takes_the_rest(checkpoint: Path) -> None:
    with engine(checkpoint, 420, max_num_seqs=32) as llm:
        kv = llm.core.holdings.memory.report().by_tag["kv"]
        assert kv > 100 << 20
        prompts = [[3 + (i * 7 + j) % 1000 for j in range(8)] for i in range(32)]  # one step's
        outputs = llm.generate(prompts, EVERYTHING, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)


def test_a_step_that_does_not_fit_at_all_names_the_flags(checkpoint: Path) -> None:
    with pytest.raises(CapacityError, match=r"a step of 256 tokens .* --max-num-batched-tokens or --max-num-seqs"):
        engine(checkpoint, 90, max_num_seqs=32)
