"""Replicas that share experts, over processes: the same tokens, and one that fails ends all."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.remote.sharing_replicas import SharingReplicas
from hardpoint_plugin_api import EngineDeadError, RequestError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm, until
from tests.support.processes import engine_processes, is_gone, is_rank

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    changes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return folder, write_checkpoint(folder, "qwen3_moe", max_position_embeddings=16384, **changes)


def sharing(folder: Path, **settings: Any) -> LLM:
    return small_llm(folder, data_parallel_size=2, enable_expert_parallel=True, **settings)


def meeting_places() -> set[Path]:
    return set(Path(gettempdir()).glob("hardpoint-replicas-*"))


def test_tokens_and_a_rank_that_is_killed(mixture: tuple[Path, PreTrainedModel]) -> None:
    before, places = set(engine_processes(os.getpid())), meeting_places()
    llm = sharing(mixture[0])
    started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
    ranks = [pid for pid in started if is_rank(pid)]
    assert (len(started), len(ranks)) == (4, 2)
    prompts = random_prompts(3, 60, seed=1)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(mixture[1], prompt, output.outputs[0].token_ids)
    streams = [llm.stream([number], ENDLESS) for number in range(3)]
    for stream in streams:
        next(stream)
    os.kill(ranks[1], signal.SIGKILL)
    said = rf"replica \d: the process of rank 0 \({ranks[1]}\) was ended by SIGKILL"
    for stream in streams:
        with pytest.raises(EngineDeadError, match=said):
            list(stream)
    until(lambda: all(map(is_gone, started)))
    with pytest.raises(EngineDeadError, match=said):
        llm.generate([[1]])
    llm.close()
    assert meeting_places() <= places


@NIGHTLY
@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize("kind", ["core", "rank"])
@pytest.mark.parametrize("victim", [0, 1])
def test_each_process_that_is_killed(
    victim: int, kind: str, is_idle: bool, mixture: tuple[Path, PreTrainedModel]
) -> None:
    """One replica alone has requests; or none has, and all end nevertheless."""
    before = set(engine_processes(os.getpid()))
    llm = sharing(mixture[0], tensor_parallel_size=2)
    started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
    assert isinstance(llm.client, SharingReplicas)
    streams = [] if is_idle else [llm.stream([5], ENDLESS)]
    for stream in streams:
        next(stream)
    ranks = [pid for pid in started if is_rank(pid)]
    pid = ranks[3 * victim] if kind == "rank" else llm.client._cores[victim].facts.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: all(map(is_gone, started)))
    for stream in streams:
        with pytest.raises(EngineDeadError, match=rf"replica \d: the .* \({pid}\) was ended by SIGKILL"):
            list(stream)
    with pytest.raises(EngineDeadError, match=rf"\({pid}\) was ended by SIGKILL"):
        llm.generate([[1]])
    llm.close()


@NIGHTLY
def test_a_rank_that_is_killed_while_it_loads(mixture: tuple[Path, PreTrainedModel]) -> None:
    """The others wait for it in vain, and the start ends at once."""
    before = set(engine_processes(os.getpid()))
    seen: set[int] = set()

    def has_killed_one() -> bool:
        seen.update(pid for pid in engine_processes(os.getpid()) if pid not in before)
        ranks = [pid for pid in seen if is_rank(pid)]
        if ranks:
            os.kill(ranks[0], signal.SIGKILL)
        return bool(ranks)

    thread = threading.Thread(target=until, args=(has_killed_one,))
    thread.start()
    with pytest.raises(EngineDeadError, match=r"the process of rank 0 .* was ended by SIGKILL"):
        sharing(mixture[0])
    thread.join()
    until(lambda: all(map(is_gone, seen)))


@NIGHTLY
def test_a_core_that_hangs(mixture: tuple[Path, PreTrainedModel]) -> None:
    """It has no requests, so that nobody waits for it but the other replica."""
    before = set(engine_processes(os.getpid()))
    llm = sharing(mixture[0], step_timeout=2)
    started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
    assert isinstance(llm.client, SharingReplicas)
    stream = llm.stream([5], ENDLESS)  # of replica 0, as both have nothing to do
    next(stream)
    os.kill(llm.client._cores[1].facts.pid, signal.SIGSTOP)
    said = r"replica 0: replica 1, .*, did not take part in a step within 2 seconds \(--step-timeout\)"
    with pytest.raises(EngineDeadError, match=said):
        list(stream)
    llm.close()
    until(lambda: all(map(is_gone, started)))


@NIGHTLY
def test_replicas_that_are_closed_while_they_serve(mixture: tuple[Path, PreTrainedModel]) -> None:
    before = set(engine_processes(os.getpid()))
    llm = sharing(mixture[0])
    started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
    streams = [llm.stream([number], ENDLESS) for number in range(3)]
    for stream in streams:
        next(stream)
    llm.close()
    assert all(map(is_gone, started))
    for stream in streams:
        with pytest.raises(RequestError, match="this LLM is closed"):
            list(stream)
