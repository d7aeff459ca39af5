"""Replicas of several servers that share experts are built again together, where one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.remote import server_starts
from hardpoint.engine.remote.server_starts import join_start, serve_starts
from hardpoint.engine.remote.sharing_replicas import SharingReplicas
from hardpoint.server import run
from hardpoint_plugin_api import EngineDeadError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL, small_llm, until
from tests.support.expert_servers import MIXTURE, of_servers, servers
from tests.support.processes import engine_processes, is_core, is_gone, is_rank, ranks_of

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = random_prompts(4, 30, seed=1)
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, write_checkpoint(folder, "qwen3_moe", max_position_embeddings=16384, **MIXTURE)


def client(llm: LLM) -> SharingReplicas:
    assert isinstance(llm.client, SharingReplicas)
    return llm.client


def core_of(llm: LLM) -> int:
    return client(llm)._cores[0].facts.pid


@pytest.mark.parametrize(
    ("kind", "number"),
    [("core", 1), *(pytest.param(*each, marks=NIGHTLY) for each in [("core", 0), ("rank", 0), ("rank", 1)])],
)
def test_streams_go_on(kind: str, number: int, mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, model = mixture
    before = set(engine_processes(os.getpid()))
    llms = servers(folder, on_engine_failure="restart")
    started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
    streams = [llm.stream(prompt, LONG) for llm in llms for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    core = core_of(llms[number])
    os.kill(core if kind == "core" else ranks_of(core)[0], signal.SIGKILL)
    with ThreadPoolExecutor(len(streams)) as pool:
        for prompt, outputs in zip(PROMPTS[:2] * 2, pool.map(lambda stream: list(stream), streams), strict=True):
            check_tokens_equal(model, prompt, outputs[-1].outputs[0].token_ids)
    for llm in llms:
        recovery = client(llm).recovery
        assert (recovery.num_restarts, recovery.denied, recovery.blames_ops) == (1, (), False)
    for prompt, output in zip(PROMPTS, llms[0].generate(PROMPTS, LONG, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    until(lambda: all(map(is_gone, started)))
    for llm in llms:
        llm.close()


@NIGHTLY
@pytest.mark.parametrize("kind", [is_core, is_rank], ids=["core", "rank"])
def test_one_that_is_killed_while_all_load_again(
    kind: Callable[[int], bool], mixture: tuple[Path, PreTrainedModel]
) -> None:
    """The other server's core may wait for it, and is ended then."""
    folder, model = mixture
    llms = servers(folder, on_engine_failure="restart")
    streams = [llm.stream(prompt, LONG) for llm, prompt in zip(llms, PROMPTS, strict=False)]
    for stream in streams:
        next(stream)
    old = engine_processes(os.getpid())
    with ThreadPoolExecutor(len(streams)) as pool:
        reading = [pool.submit(list, stream) for stream in streams]
        os.kill(core_of(llms[1]), signal.SIGKILL)
        until(lambda: any(kind(pid) for pid in engine_processes(os.getpid()) if pid not in old))
        os.kill(next(pid for pid in engine_processes(os.getpid()) if pid not in old and kind(pid)), signal.SIGKILL)
        for prompt, future in zip(PROMPTS, reading, strict=False):
            check_tokens_equal(model, prompt, future.result(120)[-1].outputs[0].token_ids)
    assert max(client(llm).recovery.num_restarts for llm in llms) >= 2
    assert not any(client(llm).recovery.blames_ops for llm in llms)
    for llm in llms:
        llm.close()


SERVER = """
import json, sys
from hardpoint import LLM, SamplingParams

if __name__ == "__main__":
    with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        for line in sys.stdin:
            for count, output in enumerate(llm.stream(json.loads(line), greedy)):
                if count == 0:
                    print("begun", flush=True)
            print(json.dumps(output.outputs[0].token_ids), flush=True)
"""


class Server:
    """A server of another process, which makes tokens for one prompt at a time."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        script = folder / "server.py"
        script.write_text(SERVER)
        command = [sys.executable, str(script), str(folder), json.dumps(SMALL | settings)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, prompt: list[int]) -> None:
        """Have tokens made; returns when the first is there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(prompt), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "begun\n"

    def tokens(self) -> list[int]:
        """All tokens."""
        assert self.process.stdout is not None
        found: list[int] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> int:
        """Close it in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@pytest.fixture
def others() -> Iterator[list[Server]]:
    """Servers of other processes, which end with the test."""
    started: list[Server] = []
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()
        for pipe in (server.process.stdin, server.process.stdout):
            assert pipe is not None
            pipe.close()


@NIGHTLY
@pytest.mark.parametrize("number", [0, 1], ids=["the one with the store", "another"])
@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["killed", "closed"])
def test_a_server_that_ends_and_comes_again(
    how: signal.Signals | None, number: int, others: list[Server], mixture: tuple[Path, PreTrainedModel]
) -> None:
    """The other server's request waits for it and goes on; requests of the one that was killed are lost with it."""
    folder, model = mixture
    given = of_servers(on_engine_failure="restart")
    others.append(Server(folder, given | {"data_parallel_rank": number}))
    with small_llm(folder, data_parallel_rank=1 - number, **given) as llm:
        others[0].begin(PROMPTS[0])
        assert others[0].tokens() == list(llm.stream(PROMPTS[0], LONG))[-1].outputs[0].token_ids
        stream = llm.stream(PROMPTS[1], LONG)
        next(stream)
        if how is None:
            assert others[0].end() == 0
        else:
            others[0].begin(PROMPTS[2])
            os.kill(others[0].process.pid, how)
        until(lambda: client(llm).recovery.restarting is not None)
        others.append(Server(folder, given | {"data_parallel_rank": number}))
        check_tokens_equal(model, PROMPTS[1], list(stream)[-1].outputs[0].token_ids)
        assert client(llm).recovery.num_restarts == 1
        others[1].begin(PROMPTS[3])
        check_tokens_equal(model, PROMPTS[3], others[1].tokens())
        assert others[1].end() == 0


@NIGHTLY
def test_a_server_that_does_not_come_again(others: list[Server], mixture: tuple[Path, PreTrainedModel]) -> None:
    given = of_servers(on_engine_failure="restart", core_start_timeout=6, max_engine_restarts=1)
    before = set(engine_processes(os.getpid()))
    others.append(Server(mixture[0], given | {"data_parallel_rank": 0}))
    with small_llm(mixture[0], data_parallel_rank=1, **given) as llm:
        stream = llm.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        next(stream)
        os.kill(others[0].process.pid, signal.SIGKILL)
        with pytest.raises(
            EngineDeadError, match=r"is given up; its last failure: .*where ranks meet, was not reached"
        ):
            list(stream)
    until(lambda: all(is_gone(pid) for pid in engine_processes(os.getpid()) if pid not in before))


def test_all_servers_start_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each core learns what the others' failures have taught, and is missed where it is left behind."""
    monkeypatch.setattr(server_starts, "_GRACE_SECONDS", 0.05)
    whole = EngineConfig.create(model="demo", **of_servers(data_parallel_size=3, data_parallel_size_local=2))
    first = [whole.of_replica(number) for number in range(2)]
    (port,) = {whole.data_parallel_rpc_port}
    third = EngineConfig.create(
        model="demo", **of_servers(data_parallel_size=3, data_parallel_rank=2, data_parallel_rpc_port=port)
    ).of_replica(2)
    lost: list[SimpleQueue[EngineDeadError]] = [SimpleQueue() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(join_start, third, lost[2].put)  # it comes before the store
        served = serve_starts(whole)
        assert serve_starts(third) is None
        starting = [pool.submit(join_start, config, told.put) for config, told in zip(first, lost, strict=False)]
        configs = [future.result(30) for future in (*starting, waiting)]
        assert {(config.meeting, config.deny, config.blame_ops) for config in configs} == {("0", (), False)}
        again = [
            pool.submit(join_start, config, lambda error: None)
            for config in (first[0].denying("linear=acme"), first[1].denying("op.acme=acme").blaming_ops())
        ]
        for told in lost:  # one of them has begun, and nobody has ended
            assert told.get(timeout=10).args[0].endswith("starts again, with which this one shares experts")
        configs = [config.result(30) for config in (pool.submit(join_start, third, lambda error: None), *again)]
    assert {(config.meeting, config.deny, config.blame_ops) for config in configs} == {
        ("1", ("linear=acme", "op.acme=acme"), True)
    }
    del served


def test_servers_build_their_engine_again_unless_told_otherwise() -> None:
    given = of_servers(data_parallel_rank=1)
    assert run._with_restarts(EngineConfig.create(model="demo", **given)).restarts_engine
    assert not run._with_restarts(EngineConfig.create(model="demo", **given, on_engine_failure="fail")).restarts_engine
