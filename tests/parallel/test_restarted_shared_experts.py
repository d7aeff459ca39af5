"""Replicas that share experts are built again together where one fails, and requests go on on each of them."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, RequestOutput, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.processes.calls import Answers
from hardpoint.engine.remote import muster as muster_module
from hardpoint.engine.remote.messages import Report
from hardpoint.engine.remote.muster import Muster
from hardpoint.engine.remote.remote_core import Link
from hardpoint.engine.remote.sharing_replicas import SharingReplicas
from hardpoint_plugin_api import EngineDeadError, EngineError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm, until
from tests.support.processes import engine_processes, is_gone, is_rank

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = random_prompts(4, 30, seed=1)
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    changes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return folder, write_checkpoint(folder, "qwen3_moe", max_position_embeddings=16384, **changes)


def restarting(folder: Path, **settings: Any) -> LLM:
    fixed: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True, "on_engine_failure": "restart"}
    return small_llm(folder, **fixed, **settings)


def client(llm: LLM) -> SharingReplicas:
    assert isinstance(llm.client, SharingReplicas)
    return llm.client


def living_ranks() -> list[int]:
    return [pid for pid in engine_processes(os.getpid()) if is_rank(pid) and not is_gone(pid)]


def kill(llm: LLM, kind: str) -> None:
    """Replica 1's core, or the rank that was started last."""
    os.kill(client(llm)._cores[1].facts.pid if kind == "core" else max(living_ranks()), signal.SIGKILL)


@pytest.mark.parametrize("kinds", [["rank"], pytest.param(["core", "rank", "core"], marks=NIGHTLY)], ids="-".join)
def test_streams_go_on(kinds: list[str], mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, model = mixture
    before = set(engine_processes(os.getpid()))
    with restarting(folder) as llm:
        started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
        for number, kind in enumerate(kinds, 1):
            streams = [llm.stream(prompt, LONG) for prompt in PROMPTS]
            first = [next(stream) for stream in streams]
            assert all(output.outputs[0].token_ids for output in first)
            kill(llm, kind)
            for prompt, stream in zip(PROMPTS, streams, strict=True):
                check_tokens_equal(model, prompt, list(stream)[-1].outputs[0].token_ids)
            assert client(llm).recovery.num_restarts == number
        assert client(llm).recovery.denied == ()
        assert not client(llm).recovery.blames_ops, "who is killed is not to blame"
        until(lambda: all(map(is_gone, started)))


@NIGHTLY
def test_one_that_fails_while_all_load_again(
    mixture: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other waits for it, and is ended soon after."""
    monkeypatch.setattr(muster_module, "_GRACE_SECONDS", 1.0)
    folder, model = mixture
    with restarting(folder) as llm:
        done: Future[list[RequestOutput]] = Future()
        reader = threading.Thread(target=lambda: done.set_result(llm.generate(PROMPTS, LONG, use_tqdm=False)))
        old = living_ranks()
        reader.start()
        kill(llm, "core")
        until(lambda: any(pid not in old for pid in living_ranks()))
        os.kill(next(pid for pid in living_ranks() if pid not in old), signal.SIGKILL)
        for prompt, output in zip(PROMPTS, done.result(120), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        reader.join()
        assert client(llm).recovery.num_restarts >= 2


@NIGHTLY
def test_they_are_given_up_after_so_many(mixture: tuple[Path, PreTrainedModel]) -> None:
    before = set(engine_processes(os.getpid()))
    with restarting(mixture[0], max_engine_restarts=1) as llm:
        for _ in range(2):
            stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
            next(stream)
            kill(llm, "rank")
            if not client(llm).recovery.num_restarts:
                next(stream)
                until(lambda: client(llm).recovery.restarting is None and client(llm).recovery.num_restarts == 1)
        with pytest.raises(EngineDeadError, match=r"is given up; its last failure: .*SIGKILL"):
            list(stream)
    until(lambda: all(is_gone(pid) for pid in engine_processes(os.getpid()) if pid not in before))


class StartedCore:
    """A Link of which nothing but its config and its end is asked."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.lost: EngineDeadError | None = None
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.answers = Answers()

    def send(self, command: object) -> None: ...

    def give_up(self, reason: str) -> None: ...

    def close(self, deadline: float = 0.0) -> None:
        self.lost = EngineDeadError("closed")


def test_all_start_again_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that one has denied is denied to all. A replica that has not failed is ended when the others waited."""
    monkeypatch.setattr(muster_module, "_GRACE_SECONDS", 0.05)
    whole = EngineConfig.create(model="demo", data_parallel_size=3, enable_expert_parallel=True)
    own = [whole.of_replica(number) for number in range(3)]
    started: list[Any] = []

    def start(config: EngineConfig) -> Link:
        started.append(StartedCore(config))
        link: Link = started[-1]
        return link

    muster = Muster(start, 3)
    for config in own:
        muster.start(config)
    assert len({core.config.meeting for core in started}) == 1
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(muster.start, own[0]), pool.submit(muster.start, own[1].denying("linear=acme"))]
        until(lambda: started[2].lost is not None)
        assert not any(future.done() for future in waiting)
        assert started[0].lost is started[1].lost is None
        muster.start(own[2].blaming_ops())
        for future in waiting:
            future.result()
        again = [core.config for core in started[3:]]
        assert [(config.deny, config.blame_ops) for config in again] == [(("linear=acme",), True)] * 3
        assert {config.meeting for config in again}.isdisjoint(core.config.meeting for core in started[:3])
        last = pool.submit(muster.start, own[1])
        muster.end()
        with pytest.raises(EngineError, match="the engine is closed"):
            last.result()
    muster.clean_up()
    assert not Path(started[0].config.meeting).exists()
