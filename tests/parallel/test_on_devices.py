"""Two ranks on two real devices, through the collectives that their platform prefers."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.ranks.multiprocess_executor import MultiprocessExecutor
from hardpoint_plugin_api import EngineDeadError
from tests.parallel.teacher_forced import check_alike, scores, true_scores
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint

pytestmark = pytest.mark.accelerator

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PEER_MEMORY: dict[str, Any] = {"enable_expert_parallel": True, "all2all_backend": "cuda_peer_memory"}


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("qwen3", {"vocab_size": 261}, {}),
        ("qwen3", {"num_key_value_heads": 1}, {"communicator": "gather_and_sum"}),
        ("qwen3_moe", MIXTURE, {"enable_expert_parallel": True}),
        ("qwen3_moe", MIXTURE, {"enable_expert_parallel": True, "all2all_backend": "all_to_all"}),
        ("qwen3_moe", MIXTURE, PEER_MEMORY),
    ],
)
def test_two_devices(family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    if (settings is PEER_MEMORY or "communicator" in settings) and torch.version.cuda is None:
        pytest.skip("needs NVIDIA's devices")
    model = write_checkpoint(tmp_path, family, **changes)
    prompts = random_prompts(8, 40, seed=1)
    with LLM(str(tmp_path), tensor_parallel_size=2, kv_cache_memory="64MiB", max_num_seqs=16, **settings) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("all2all", ["allgather_reducescatter", "cuda_peer_memory"])
def test_replicas_that_share_experts(all2all: str, tmp_path: Path) -> None:
    """Both replay their decode steps, whichever has requests."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    if all2all == "cuda_peer_memory" and torch.version.cuda is None:
        pytest.skip("needs NVIDIA's devices")
    model, prompts = write_checkpoint(tmp_path, "qwen3_moe", **MIXTURE), random_prompts(5, 40, seed=1)
    settings: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": all2all}
    with LLM(str(tmp_path), kv_cache_memory="64MiB", max_num_seqs=16, **settings) as llm:
        for several in (prompts[:1], prompts):
            for prompt, output in zip(several, llm.generate(several, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert llm.metrics.value("hardpoint_graph_replays_total") >= 4 * (GREEDY.max_tokens or 0) - 8


def test_engines_of_two_devices_take_turns(tmp_path: Path) -> None:
    """In one process and thread: each on its own device, whichever is current."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    model, (prompt,) = write_checkpoint(tmp_path, "qwen3"), random_prompts(1, 40, seed=1)
    settings: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_num_seqs": 4}
    with LLM(str(tmp_path), device_index=0, **settings) as a, LLM(str(tmp_path), device_index=1, **settings) as b:
        for llm in (a, b, a):
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert torch.accelerator.current_device_index() == 1, "as it was after the second was built"


WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
EVERY_EXPERT: dict[str, Any] = WIDE | {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 128}
"""Each token goes through all: where a choice is close, rounding would decide it."""


@pytest.mark.parametrize("kernel", ["composed", "cuda_flashinfer_allreduce", "cuda_peer_allreduce"])
@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("qwen3", WIDE, {}),
        ("qwen3", WIDE, {"communicator": "cuda_peer"}),
        ("qwen3_moe", EVERY_EXPERT, {"enable_expert_parallel": True}),
        ("qwen3_moe", EVERY_EXPERT, {"enable_expert_parallel": True, "all2all_backend": "all_to_all"}),
        ("qwen3_moe", EVERY_EXPERT, PEER_MEMORY),
    ],
    ids=["tp2", "tp2-peer", "ep2", "ep2-all_to_all", "ep2-peer_memory"],
)
def test_logits_of_two_devices_are_those_of_one(
    family: str, changes: dict[str, Any], settings: dict[str, Any], kernel: str, tmp_path: Path
) -> None:
    """Teacher-forced, in bfloat16; both replay captured steps, but where tokens go to the ranks of their experts."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    if (settings is PEER_MEMORY or "communicator" in settings) and torch.version.cuda is None:
        pytest.skip("needs NVIDIA's devices")
    if "flashinfer" in kernel and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    model = write_checkpoint(tmp_path, family, **changes)
    common: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory": "64MiB", "max_num_seqs": 16}
    with LLM(str(tmp_path), **common) as llm:
        one = scores(llm)
        assert llm.metrics.value("hardpoint_graph_replays_total") > 0
    use = {"op.allreduce_add_rms_norm": kernel}
    with LLM(str(tmp_path), tensor_parallel_size=2, use=use, **common, **settings) as llm:
        two = scores(llm)
        (plan,) = [p for p in llm.core.blueprint.ctx.selector.plans if p.workload.of == "allreduce_add_rms_norm"]
        assert plan.entries[0].offer.contribution.name == kernel
        replays = llm.metrics.value("hardpoint_graph_replays_total")
        assert replays == 0 if settings.get("all2all_backend") == "all_to_all" else replays > 0
    check_alike(two, one, true_scores(model, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_on_a_device_that_is_gone(how: signal.Signals, tmp_path: Path) -> None:
    """The other waits in a collective on its device, and is ended all the same."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=16384)
    with LLM(str(tmp_path), tensor_parallel_size=2, kv_cache_memory="64MiB", step_timeout=3) as llm:
        executor = llm.core.executor
        assert isinstance(executor, MultiprocessExecutor)
        stream = llm.stream([1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        next(stream)
        os.kill(executor.pids[1], how)
        said = "rank 1 .* was ended by SIGKILL" if how == signal.SIGKILL else "a step did not end within 3 seconds"
        with pytest.raises(EngineDeadError, match=said):
            list(stream)
        assert not any(rank.process.is_alive() for rank in executor.processes)
