"""A core in a process of its own: the same answers, and what becomes of everybody when a process dies."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, AsyncEngine, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.control import ResetPrefixCache
from hardpoint.engine.processes.calls import Failure
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint_plugin_api import (
    CapacityError,
    EngineDeadError,
    EngineError,
    RequestError,
    SelectionError,
)
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import SMALL, small_llm, until
from tests.support.processes import is_gone

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
"""Thousands of tokens: nothing in these tests waits for its end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "qwen3", max_position_embeddings=16384)
    return path


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[LLM]:
    with small_llm(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with small_llm(folder, core_process=True) as engine:
        yield engine


def test_threads_of_a_core_wait_briefly_for_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """GNU's OpenMP runtime prints the settings that it has read; a user's own stay."""
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    with small_llm(folder, core_process=True):
        pass
    assert "GOMP_SPINCOUNT = '1000'" in capfd.readouterr().err
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with small_llm(folder, core_process=True):
        pass
    assert "GOMP_SPINCOUNT = '1000'" not in capfd.readouterr().err


def test_the_same_answers(llm: LLM, here: LLM) -> None:
    assert llm.client.facts.pid != os.getpid() == here.client.facts.pid
    prompts: list[Any] = [*random_prompts(8, 60, seed=1), "abc", {"prompt": "abc", "cache_salt": "mine"}]
    params = [SamplingParams(temperature=0.9, max_tokens=12, logprobs=1, n=2, stop="q") for _ in prompts]
    found, wanted = (each.generate(prompts, params, use_tqdm=False) for each in (llm, here))
    for ours, other in zip(found, wanted, strict=True):
        assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in other.outputs]
        assert [(o.text, o.finish_reason, o.stop_reason) for o in ours.outputs] == [
            (o.text, o.finish_reason, o.stop_reason) for o in other.outputs
        ]
    assert llm.table.to_json() == here.table.to_json()
    assert llm.config.plugin_config == here.config.plugin_config
    assert llm.stats.prefill_tokens > 0
    assert llm.stats.load_seconds > 0


def test_streams_and_threads_share_it(llm: LLM, here: LLM) -> None:
    prompts = random_prompts(8, 20, seed=12)
    wanted = [output.outputs[0] for output in here.generate(prompts, GREEDY, use_tqdm=False)]
    first, second = llm.stream(prompts[0], GREEDY), llm.stream(prompts[1], GREEDY)
    next(first), next(second)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: llm.generate([prompt], GREEDY, use_tqdm=False), prompts[2:]))
    found = [list(stream)[-1].outputs[0] for stream in (first, second)] + [each[0].outputs[0] for each in together]
    assert found == wanted


def test_a_stream_that_is_left_ends(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], ENDLESS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    llm.generate([[1]], GREEDY, use_tqdm=False)
    assert (llm.stats.num_running, llm.stats.num_free_pages) == (0, llm.stats.num_pages)


def test_bad_requests_are_refused_here(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        llm.generate([[1], []], ENDLESS)
    with pytest.raises(RequestError, match="the prompt has 16384 tokens"):
        llm.generate([[1] * 16384])

    class Unsendable(dict[int, float]):
        def __reduce__(self) -> str:
            raise TypeError("not this")

    with pytest.raises(RequestError, match="the request cannot be sent to the engine: not this"):
        llm.generate([[1]], SamplingParams(logit_bias=Unsendable()))
    llm.generate([[1]], GREEDY, use_tqdm=False)
    assert llm.stats.num_running == 0


def test_an_interrupt_leaves_it_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, real = iter(range(100)), llm.client.step

    def step() -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(llm.client, "step", step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], ENDLESS, use_tqdm=False)
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_nobody_waits_for_a_core_that_does_not_read(llm: LLM) -> None:
    """More than a pipe holds goes to a process that is stopped."""
    pid = llm.client.facts.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        requests = [llm.client.add_request([number] * 16000, ENDLESS, frozenset()) for number in range(16)]
        for request in requests:
            llm.client.abort(request)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24
    assert [request.finish_reason for request in requests] == ["abort"] * 16


def test_an_error_at_the_start_arrives_as_itself_and_so_does_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        caplog.at_level(logging.INFO, "hardpoint.engine.core"),
        pytest.raises(CapacityError, match="a cache of 1,000 bytes"),
    ):
        small_llm(folder, core_process=True, kv_cache_memory=1000)
    theirs = [record.getMessage() for record in caplog.records if record.process != os.getpid()]
    assert len(theirs) == 1, "what this process logs: one logger says more than a warning"
    assert theirs[0].startswith("selection digest")


def test_two_at_once_of_which_one_is_killed_and_one_hangs(folder: Path) -> None:
    async def kill(engine: AsyncEngine) -> None:
        pid = engine.client.facts.pid
        streams = [await engine.submit([number], ENDLESS) for number in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=rf"the engine's process \({pid}\) was ended by SIGKILL"):
                _ = [output async for output in stream]
        with pytest.raises(EngineDeadError, match=r"was ended by SIGKILL.*build a new engine"):
            await engine.submit([1])
        with pytest.raises(EngineDeadError, match="was ended by SIGKILL"):
            engine.check_health()
        assert not engine.is_running
        await engine.close()

    with ThreadPoolExecutor(2) as pool:
        starting = pool.submit(AsyncEngine, str(folder), **SMALL)
        llm = small_llm(folder, core_process=True)
        engine = starting.result()
    asyncio.run(asyncio.wait_for(kill(engine), 60))
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24
    pid = llm.client.facts.pid
    os.kill(pid, signal.SIGSTOP)
    assert isinstance(llm.client, RemoteCore)
    llm.client.close(deadline=0.1)
    assert is_gone(pid)
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        llm.generate([[1]])
    llm.close()


def test_a_core_that_does_not_answer_a_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is open, so that nobody waits for a step."""
    llm = small_llm(folder, core_process=True)
    monkeypatch.setattr(RemoteCore, "_answer_seconds", 0.5)
    pid = llm.client.facts.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"ResetPrefixCache was not answered within 0\.5 seconds \(--core-start"):
        llm.client.control(ResetPrefixCache())
    assert is_gone(pid)
    llm.close()


def test_a_core_that_does_not_get_ready(folder: Path) -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    stopped: list[int] = []

    def stop() -> None:
        until(lambda: bool({child.pid for child in multiprocessing.active_children()} - before))
        (pid,) = {child.pid for child in multiprocessing.active_children()} - before
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(EngineDeadError, match=r"not ready within 1 seconds .* raise --core-start-timeout") as raised:
        small_llm(folder, core_process=True, core_start_timeout=1)
    thread.join()
    assert f"its process ({stopped[0]}) was ended" in str(raised.value)
    assert is_gone(stopped[0])


PROGRAM = """
import os, sys
from hardpoint import LLM, SamplingParams
from hardpoint_plugin_api import EngineError

def break_the_third_step():  # in the engine's process, which imports this file as well
    from hardpoint.engine.execution.runner import Runner
    steps, real = iter(range(10**6)), Runner.submit
    def submit(self, step):
        if next(steps) == 3:
            raise RuntimeError("the kernel broke")
        return real(self, step)
    Runner.submit = submit

if __name__ == "__mp_main__":
    break_the_third_step()

if __name__ == "__main__":
    llm = LLM(sys.argv[1], platform="cpu", kv_cache_memory="16MiB", core_process=True)
    assert "torch" not in sys.modules, "a front end needs no torch"
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    try:
        llm.generate([[1], [2]], endless, use_tqdm=False)
    except EngineError as error:
        print("failed:", error, error.__notes__[0].count("Traceback"), flush=True)
    print("generated", len(llm.generate([[1]], short)[0].outputs[0].token_ids), flush=True)
    try:
        for count, _ in enumerate(llm.stream([1], endless)):
            if count == 0:
                print("streaming", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print("generated", len(llm.generate([[1]], short)[0].outputs[0].token_ids), flush=True)
    for count, _ in enumerate(llm.stream([1], endless)):
        if count == 0:
            print("process", llm.client.facts.pid, flush=True)
"""


def test_a_program_and_its_core(folder: Path, tmp_path: Path) -> None:
    """A step fails in the core; then comes Ctrl-C, to the whole group; then the program is killed."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    with program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            failed = "failed: the engine failed while it served this request: RuntimeError: the kernel broke 1\n"
            assert program.stdout.readline() == failed
            assert program.stdout.readline() == "generated 4\n"
            assert program.stdout.readline() == "streaming\n"
            os.killpg(program.pid, signal.SIGINT)
            assert program.stdout.readline() == "interrupted\n"
            assert program.stdout.readline() == "generated 4\n"
            word, _, pid = program.stdout.readline().partition(" ")
            assert word == "process"
        finally:
            os.killpg(program.pid, 0)
            program.kill()
        until(lambda: is_gone(int(pid)))
        heard = program.stderr.read()
    assert "KeyboardInterrupt" not in heard
    assert "a step failed; the 2 requests that were open are ended" in heard


def test_a_script_without_a_guard(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"from hardpoint import LLM\nLLM({str(folder)!r}, platform='cpu', core_process=True)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "HardpointError: this script starts an engine with a process of its own while it is imported" in done.stderr
    assert "ended with exit code 1: what it wrote to stderr says why; a script that builds an engine" in done.stderr


def test_a_program_that_forgets_to_close_ends(folder: Path) -> None:
    program = (
        "import sys; from hardpoint import AsyncEngine\n"
        "engine = AsyncEngine(sys.argv[1], platform='cpu', kv_cache_memory='16MiB')\n"
        "print(engine.client.facts.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert is_gone(int(done.stdout))


def test_errors_on_their_way() -> None:
    def sent(error: Exception) -> Failure:
        found = pickle.loads(pickle.dumps(Failure.of(error)))
        assert isinstance(found, Failure)
        return found

    class LocalError(Exception):
        """One that pickle cannot find."""

    original = sent(SelectionError("nothing can serve")).original()
    assert (type(original), str(original)) == (SelectionError, "nothing can serve")
    assert not hasattr(original, "__notes__"), "its message says it all"
    try:
        raise KeyError("x") from ValueError("y")
    except KeyError as error:
        again = sent(error).original()
    assert (type(again), str(again)) == (KeyError, "'x'")
    assert "ValueError: y" in again.__notes__[0]
    assert isinstance(sent(LocalError("here")).original(), EngineError)
    assert str(sent(LocalError("here")).original()) == "LocalError: here"
    assert str(sent(LocalError("here")).as_engine_error("it failed")) == "it failed: LocalError: here"


def test_the_config_travels_whole() -> None:
    config = EngineConfig.create(model="demo", use={"op.rms_norm": "reference"}, plugin_config={"cpu": {"threads": 1}})
    copy = pickle.loads(pickle.dumps(config))
    assert (copy, copy.explicit) == (config, config.explicit)
