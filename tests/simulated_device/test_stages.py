"""Pipeline stages on two devices: captured steps read the states that arrive from the other device."""

from __future__ import annotations

from pathlib import Path

from hardpoint import SamplingParams
from tests.parallel.ranks import ThreadsExecutor, ranks_in_threads
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def test_two_stages_on_two_devices(tmp_path: Path) -> None:
    """A step is submitted ahead, as is the default here, and prefixes are found the second time."""
    model = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    prompts = random_prompts(5, 40, seed=3)
    with ranks_in_threads(tmp_path, 1, platform="sim", plugin_config={}, pipeline_parallel_size=2) as llm:
        assert isinstance(llm.core.executor, ThreadsExecutor)
        devices = [blueprint.ctx.torch_device.index for blueprint in llm.core.executor.blueprints]
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert llm.stats.cached_tokens > 0
        assert counted(llm)["graph_replays_total"] > 0
    assert devices == [0, 1]
