"""Replicas that share experts, where torchrun started them, and where they belong to several servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.engine.remote.sharing_replicas import SharingReplicas
from hardpoint_plugin_api import EngineDeadError, EngineError, HardpointError
from tests.support import two_hosts
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm, until
from tests.support.expert_servers import MIXTURE, of_servers, servers
from tests.support.processes import engine_processes, is_gone

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
NIGHTLY = pytest.mark.nightly
PROMPTS = random_prompts(4, 30, seed=1)
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import EngineDeadError

if __name__ == "__main__":
    folder, scratch, end = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    settings, prompts = json.loads(sys.argv[4]), json.loads(sys.argv[5])
    if "RANK" in os.environ:
        (scratch / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    with LLM(str(folder), platform="cpu", kv_cache_memory="16MiB", enable_expert_parallel=True, data_parallel_size=2,
             plugin_config={"cpu": {"threads": 1}}, **settings) as llm:
        (number,) = llm.config.local_replicas
        greedy = SamplingParams(temperature=0, max_tokens=10 + 10 * number, ignore_eos=True)
        outputs = llm.generate(prompts[number], greedy, use_tqdm=False)
        print(json.dumps([number, [output.outputs[0].token_ids for output in outputs]]), flush=True)
        if end == "sleep":
            llm.sleep()
            llm.wake_up()
            again = llm.generate(prompts[number], greedy, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
            llm.update_weights(str(folder))
            print("slept", flush=True)
        if end == "kill":
            (scratch / f"done-{number}").touch()
            endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
            try:
                for count, _ in enumerate(llm.stream([1], endless)):
                    if count == 3 and number == 0:
                        while not (scratch / "done-1").exists():
                            time.sleep(0.05)
                        os.kill(int((scratch / "pid-3").read_text()), signal.SIGKILL)
            except EngineDeadError as error:
                print(error, flush=True)
        if end == "together":
            (scratch / f"done-{number}").touch()
            while not all((scratch / f"done-{n}").exists() for n in range(2)):
                time.sleep(0.05)
    print(f"the end of replica {number}", flush=True)
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, write_checkpoint(folder, "qwen3_moe", max_position_embeddings=16384, **MIXTURE)


@pytest.fixture
def hosts() -> None:
    if not two_hosts.can_be_made():
        pytest.skip("this machine lets no user make network namespaces")


def program(folder: Path, scratch: Path, end: str, **settings: Any) -> list[str]:
    script = scratch / "program.py"
    script.write_text(PROGRAM)
    prompts = [PROMPTS[:1], PROMPTS[1:]]
    return [str(script), str(folder), str(scratch), end, json.dumps(settings), json.dumps(prompts)]


def torchrun(*arguments: str, looks_after: int = 10) -> list[str]:
    """``looks_after``: seconds between torchrun's looks after its processes; it ends all once one has ended."""
    return [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", str(looks_after), *arguments]


def check(model: PreTrainedModel, outputs: str) -> None:
    """Each replica's tokens are those of one process, whatever the other had to do."""
    found = dict(json.loads(line) for line in outputs.splitlines() if line.startswith("["))
    assert found.keys() == {0, 1}, outputs
    for number, prompts in enumerate([PROMPTS[:1], PROMPTS[1:]]):
        for prompt, tokens in zip(prompts, found[number], strict=True):
            assert len(tokens) == 10 + 10 * number
            check_tokens_equal(model, prompt, tokens)


def test_torchrun_starts_all_replicas(mixture: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Each script goes on with its replica, sleeps, and closes it when the others have no more steps, either."""
    given = program(mixture[0], tmp_path, "sleep", executor="torchrun")
    command = torchrun("--standalone", "--nproc-per-node", "2", *given)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    check(mixture[1], done.stdout)
    assert done.stdout.count("slept") == 2  # in one line where both print at once
    assert sorted(done.stdout.splitlines()[-2:]) == ["the end of replica 0", "the end of replica 1"]


@NIGHTLY
@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("end", ["", "kill"])
def test_torchrun_on_two_hosts(end: str, mixture: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """A replica of two ranks on each; one of the second's is killed while both make tokens.

    The launcher of the second may end the rest there before they can say why; the first learns it from the replica.
    """
    settings = {"executor": "torchrun", "tensor_parallel_size": 2}
    commands = [
        torchrun(
            *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)),
            *("--master-addr", two_hosts.ADDRESSES[0], "--master-port", "29500"),
            *program(mixture[0], tmp_path, end, **settings),
            looks_after=60 if end else 10,  # rank 0 is to say what it lost before its launcher sees that rank 1 ended
        )
        for node in (0, 1)
    ]
    first, second = two_hosts.run_on_two_hosts(commands, tmp_path, {"OMP_NUM_THREADS": "1"}, 240)
    check(mixture[1], first.stdout + second.stdout)
    if not end:
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        return
    assert first.returncode != 0
    assert second.returncode != 0
    assert "replica 1 is gone, with which this one shares experts" in first.stdout


@NIGHTLY
@pytest.mark.usefixtures("hosts")
def test_servers_of_two_hosts(mixture: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    address = two_hosts.ADDRESSES[0]
    commands = [
        [
            sys.executable,
            *program(mixture[0], tmp_path, "together", data_parallel_rank=n, data_parallel_address=address),
        ]
        for n in (0, 1)
    ]
    first, second = two_hosts.run_on_two_hosts(commands, tmp_path, {"OMP_NUM_THREADS": "1"}, 240)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    check(mixture[1], first.stdout + second.stdout)


def test_two_servers_share_experts(mixture: tuple[Path, PreTrainedModel]) -> None:
    """Each has requests of its own; the other one ends when one is closed."""
    folder, model = mixture
    first, second = servers(folder)
    for number, llm in enumerate((first, second)):
        others = threading.Thread(target=lambda: second.generate(PROMPTS[3:], GREEDY, use_tqdm=False))
        if llm is first:
            others.start()
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        if llm is first:
            others.join()
        assert list(llm.config.local_replicas) == [number]
    first.close()

    client = second.client
    assert isinstance(client, SharingReplicas)
    until(lambda: client._cores[0]._link.lost is not None)
    with pytest.raises(EngineDeadError, match="replica 0 was closed, with which this one shares experts"):
        second.generate(PROMPTS)
    second.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that are made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(60) for each in [pool.submit(call) for call in calls]]


def test_two_servers_sleep_and_get_new_weights(mixture: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    """Each is asked by itself; the first waits for the other, which has requests under way until then."""
    folder, model = mixture
    torch.manual_seed(5)
    other = write_checkpoint(tmp_path, "qwen3_moe", max_position_embeddings=16384, **MIXTURE)
    llms = first, second = servers(folder)

    def check_all(expected: PreTrainedModel) -> None:
        for llm in llms:
            for prompt, output in zip(PROMPTS[:2], llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(expected, prompt, output.outputs[0].token_ids)

    stream = second.stream([1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    with pytest.raises(EngineError, match="requests are under way"):
        second.sleep()
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(first.sleep)
        until(lambda: isinstance(first.client, SharingReplicas) and first.client._waits_for == "Sleep")
        with pytest.raises(EngineError, match="Sleep is under way, which all replicas that share experts do at once"):
            first.client.add_request([1], GREEDY, frozenset())
        assert len(list(stream)) > 100, "the first takes part in steps until the second sleeps, too"
        assert not sleeping.done()
        second.sleep()
        sleeping.result(60)
    with pytest.raises(EngineError, match="the engine sleeps"):
        first.generate(PROMPTS[:1])
    with pytest.raises(EngineError, match="the engine sleeps"):
        second.generate(PROMPTS[:1])
    together(first.wake_up, second.wake_up)
    check_all(model)
    together(*(lambda llm=llm: llm.update_weights(str(tmp_path)) for llm in llms))
    check_all(other)
    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(first.sleep)
        with pytest.raises(EngineError, match="this replica begins UpdateWeights, and replica 0 begins Sleep"):
            second.update_weights(str(folder))
        with pytest.raises(EngineError, match="this replica begins Sleep, and replica 1 begins UpdateWeights"):
            sleeping.result(60)
    check_all(other)
    for llm in llms:
        llm.close()


@NIGHTLY
def test_a_core_of_another_server_that_is_killed(mixture: tuple[Path, PreTrainedModel]) -> None:
    before = set(engine_processes(os.getpid()))
    first, second = servers(mixture[0])
    started = [pid for pid in engine_processes(os.getpid()) if pid not in before]
    stream = first.stream([5], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    next(stream)
    assert isinstance(second.client, SharingReplicas)
    os.kill(second.client._cores[0].facts.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="replica 0: replica 1 is gone, with which this one shares experts"):
        list(stream)
    with pytest.raises(EngineDeadError, match=r"replica 1: the .* was ended by SIGKILL"):
        second.generate(PROMPTS)
    until(lambda: all(map(is_gone, started)))
    for llm in (first, second):
        llm.close()


@NIGHTLY
def test_a_server_that_does_not_come(mixture: tuple[Path, PreTrainedModel]) -> None:
    given = of_servers(core_start_timeout=8)
    missing = [
        "replica 1, with which this one shares experts, did not come within 8 seconds",
        rf"the store at 127\.0\.0\.1:{given['data_parallel_rpc_port']}, where ranks meet, was not reached within 8 s",
    ]
    for number, said in enumerate(missing):
        with pytest.raises(HardpointError, match=said):
            small_llm(mixture[0], data_parallel_rank=number, **given)
