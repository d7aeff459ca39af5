"""Ranks in processes: the tokens of one, and what becomes of everybody when a process dies or hangs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, AsyncEngine, SamplingParams
from hardpoint.engine.execution.ranks.multiprocess_executor import MultiprocessExecutor
from hardpoint_plugin_api import CheckpointError, ConfigError, EngineDeadError, EngineError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL, small_llm, until
from tests.support.processes import is_gone, ranks_of

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NIGHTLY = pytest.mark.nightly
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
"""Thousands of tokens: nothing in these tests waits for its end."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "qwen3", max_position_embeddings=16384, num_key_value_heads=1)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    """Two ranks for all the tests here that leave them alive; the last one does not."""
    with small_llm(checkpoint[0], tensor_parallel_size=2, step_timeout=5) as engine:
        yield engine


def pids(llm: LLM) -> list[int]:
    assert isinstance(llm.core.executor, MultiprocessExecutor)
    return list(llm.core.executor.pids)


def test_the_same_tokens(llm: LLM, checkpoint: tuple[Path, PreTrainedModel]) -> None:
    assert len({*pids(llm), os.getpid()}) == 3
    prompts = random_prompts(6, 60, seed=1)
    drawn = [SamplingParams(temperature=0.9, seed=i, max_tokens=10, n=2) for i, _ in enumerate(prompts)]
    with small_llm(checkpoint[0]) as here:
        wanted = [[o.token_ids for o in each.outputs] for each in here.generate(prompts, drawn, use_tqdm=False)]
    found = llm.generate(prompts, drawn, use_tqdm=False)
    assert [[o.token_ids for o in each.outputs] for each in found] == wanted
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(checkpoint[1], prompt, output.outputs[0].token_ids)
    assert llm.stats.cached_tokens > 0


def test_every_rank_is_told_what_there_is_to_do(
    llm: LLM, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    held = llm.memory_report().by_tag
    llm.sleep(level=2)
    asleep = llm.memory_report().by_tag
    assert asleep["kv"] == asleep["resources"] == 0
    assert asleep["weights"] < held["weights"]
    with pytest.raises(EngineError, match="the engine sleeps"):
        llm.generate([[1]])
    llm.wake_up()
    assert llm.memory_report().by_tag == held

    other = write_checkpoint(tmp_path, "qwen3", seed=1, max_position_embeddings=16384, num_key_value_heads=1)
    with pytest.raises(ConfigError, match="tensors do not travel to ranks that run elsewhere"):
        llm.update_weights([("model.norm.weight", torch.ones(64))])
    llm.update_weights(str(tmp_path))
    (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    check_tokens_equal(other, [1, 2, 3], output.outputs[0].token_ids)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        llm.update_weights(str(tmp_path))
    llm.update_weights(str(checkpoint[0]))
    (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    check_tokens_equal(checkpoint[1], [1, 2, 3], output.outputs[0].token_ids)
    assert llm.metrics.value("hardpoint_padding_tokens_total") == 0, "what rank 0's runner counts arrives here"


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "layout"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 32}, 4, {"expert_parallel_size": 2}),
        pytest.param("mixtral", {"num_local_experts": 4}, 2, {"enable_expert_parallel": True}, marks=NIGHTLY),
        pytest.param(
            "qwen2_moe",
            {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
            4,
            {"enable_expert_parallel": True, "all2all_backend": "all_to_all"},
            marks=NIGHTLY,
        ),
    ],
    ids=["tp2-ep2", "ep2", "ep4"],
)
def test_experts_in_processes(
    tmp_path: Path, family: str, changes: dict[str, Any], ranks: int, layout: dict[str, Any]
) -> None:
    """The prompts are of few tokens, so that ranks have none of some steps."""
    model = write_checkpoint(tmp_path, family, num_experts_per_tok=2, **changes)
    prompts = [[5], [6, 7, 8], [9] * 30]
    with small_llm(tmp_path, tensor_parallel_size=ranks, **layout) as llm:
        assert len({*pids(llm)}) == ranks
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_stages_in_processes(tmp_path: Path) -> None:
    """The second stage is killed while the first one waits for what it draws."""
    model = write_checkpoint(tmp_path, "qwen3", max_position_embeddings=16384)
    prompts = random_prompts(4, 60, seed=2)
    with small_llm(tmp_path, pipeline_parallel_size=2) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        stream = llm.stream([1], ENDLESS)
        next(stream)
        ranks = pids(llm)
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"the process of rank 1 \({ranks[1]}\) was ended by SIGKILL"):
            list(stream)
        assert all(map(is_gone, ranks))


def test_a_rank_that_hangs(llm: LLM) -> None:
    streams = [llm.stream([number], ENDLESS) for number in range(3)]
    for stream in streams:
        next(stream)
    ranks = pids(llm)
    os.kill(ranks[1], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"a step did not end within 5 seconds \(--step-timeout\)") as raised:
        list(streams[0])
    waits = rf"rank 0 \({ranks[0]}\) waits in \w+, called in \w+ \(hardpoint/\S+:\d+\)"
    assert re.search(rf"{waits}; rank 1 \({ranks[1]}\) does not react; build a new engine", str(raised.value))
    for stream in streams[1:]:
        with pytest.raises(EngineError, match="did not end within 5 seconds"):
            list(stream)
    assert all(map(is_gone, ranks))
    with pytest.raises(EngineDeadError, match="did not end within 5 seconds"):
        llm.generate([[1]])


def test_a_rank_that_hangs_while_nobody_asks(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """An idle engine captures graphs; that takes no longer than a step may."""
    with small_llm(checkpoint[0], tensor_parallel_size=2, step_timeout=1) as llm:
        ranks = pids(llm)
        os.kill(ranks[1], signal.SIGSTOP)
        said = r"CaptureNext did not end within 1 seconds \(--step-timeout\).* rank 1 \(\d+\) does not react"
        with pytest.raises(EngineDeadError, match=said):
            llm.core.use_idle_time()
        assert all(map(is_gone, ranks))


@NIGHTLY
def test_a_rank_that_hangs_while_it_loads(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """The ranks that are not ready are named within --core-start-timeout, and all are ended."""
    before = {child.pid for child in multiprocessing.active_children()}
    stopped: list[int] = []

    def has_stopped_it() -> bool:
        new = [child for child in multiprocessing.active_children() if child.pid not in before]
        stopped.extend(child.pid or 0 for child in new if child.name == "hardpoint-rank-1")
        if stopped:
            os.kill(stopped[0], signal.SIGSTOP)
        return bool(stopped)

    thread = threading.Thread(target=until, args=(has_stopped_it,))
    thread.start()
    with pytest.raises(EngineDeadError, match=r"not ready within 5 seconds: .*rank 1 .*--core-start-timeout") as raised:
        small_llm(checkpoint[0], tensor_parallel_size=2, core_start_timeout=5)
    thread.join()
    assert f"rank 1 ({stopped[0]})" in str(raised.value)
    assert is_gone(stopped[0])


@NIGHTLY
def test_a_rank_that_hangs_among_several(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """It alone is said not to react, though it is waited for before the others are told of."""
    with small_llm(checkpoint[0], tensor_parallel_size=2, pipeline_parallel_size=2, step_timeout=5) as llm:
        stream = llm.stream([1], ENDLESS)
        next(stream)
        os.kill(pids(llm)[1], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="did not end within 5 seconds") as raised:
            list(stream)
    told = dict(re.findall(r"rank (\d) \(\d+\) (does not react|waits in \w+|is in \w+)", str(raised.value)))
    assert told.keys() == {"0", "1", "2", "3"}
    assert [rank for rank, doing in told.items() if doing == "does not react"] == ["1"], told


def test_a_rank_that_is_killed(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Under an AsyncEngine, whose core has a process of its own and starts the ranks from there."""

    async def kill(engine: AsyncEngine) -> None:
        core = engine.client.facts.pid
        ranks = ranks_of(core)
        assert len(ranks) == 2
        streams = [await engine.submit([number], ENDLESS) for number in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(ranks[1], signal.SIGKILL)
        said = rf"the process of rank 1 \({ranks[1]}\) was ended by SIGKILL.*every rank was ended: build a new engine"
        for stream in streams:
            with pytest.raises(EngineDeadError, match=said):
                _ = [output async for output in stream]
        with pytest.raises(EngineDeadError, match=said):
            await engine.submit([1])
        assert not engine.is_running
        until(lambda: all(map(is_gone, [core, *ranks])))
        await engine.close()

    engine = AsyncEngine(str(checkpoint[0]), tensor_parallel_size=2, **SMALL)
    asyncio.run(asyncio.wait_for(kill(engine), 60))


PROGRAM = """
import sys
from hardpoint import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], platform="cpu", kv_cache_memory="16MiB", tensor_parallel_size=2)
    print(*llm.core.executor.pids, flush=True)
    if sys.argv[2] == "stream":
        for _ in llm.stream([1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)):
            pass
"""


@pytest.mark.parametrize("end", ["killed", "forgets to close"])
def test_a_program_that_ends(end: str, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Killed in the middle of a step, or at its end without a word: its ranks end."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(checkpoint[0]), "stream" if end == "killed" else "end"]
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        ranks = [int(pid) for pid in program.stdout.readline().split()]
        assert len(ranks) == 2
        if end == "killed":
            program.kill()
        until(lambda: all(map(is_gone, ranks)))
        assert "Traceback" not in program.stderr.read()
    assert program.returncode == (-signal.SIGKILL if end == "killed" else 0)
