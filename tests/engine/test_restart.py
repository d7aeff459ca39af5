"""An engine that fails, and what becomes of its requests: a new one goes on with each from its tokens so far."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint import AsyncEngine, SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.outputs import RequestOutput
from hardpoint.plugin_host.culprits import Suspect, call_name, code_spans, find_culprit
from hardpoint_plugin_api import ConfigError, EngineDeadError, EngineError, StructuredOutput, UnknownNameError
from tests.support.breaking import POISON, install_breaking, install_deadly
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import SMALL, small_llm, until
from tests.support.processes import is_gone, ranks_of

EXACT = {**SMALL, "batch_invariant": True}
"""Recomputing rounds as computing did, whatever ran together: answers can be compared to the bit."""
LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **LONG),
    SamplingParams(temperature=0.9, seed=3, logprobs=2, prompt_logprobs=1, repetition_penalty=1.2, **LONG),
    SamplingParams(temperature=0.8, seed=4, n=2, min_tokens=20, frequency_penalty=0.3, **LONG),
    SamplingParams(temperature=0.7, seed=5, max_tokens=120, structured=StructuredOutput("regex", "[a-f]{110}")),
]
PROMPTS: list[Any] = random_prompts(len(PARAMS), 40, seed=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "qwen3", max_position_embeddings=16384)
    return path


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Iterator[list[Any]]:
    with small_llm(folder, **EXACT) as llm:
        yield [told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def told(output: RequestOutput) -> Any:
    """Everything that a client is told."""
    return output.prompt_logprobs, [(o.text, o.token_ids, o.logprobs, o.finish_reason) for o in output.outputs]


async def read(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> Any:
    """An answer, which grew and never took anything back."""
    last: RequestOutput | None = None
    async for output in engine.generate(prompt, params):
        for old, new in zip(last.outputs if last else (), output.outputs, strict=bool(last)):
            assert new.text.startswith(old.text)
            assert list(new.token_ids[: len(old.token_ids)]) == list(old.token_ids)
        last = output
    assert last is not None
    return told(last)


async def killed_again_and_again(engine: AsyncEngine, kills: int) -> tuple[list[Any], list[int]]:
    answers = [asyncio.create_task(read(engine, *each)) for each in zip(PROMPTS, PARAMS, strict=True)]
    pids = []
    for number in range(kills):
        before = engine.stats.decode_tokens
        while engine.stats.decode_tokens < before + 30 * (number + 1):  # well into the answers
            await asyncio.sleep(0.001)
        pids.append(engine.client.facts.pid)
        os.kill(pids[-1], signal.SIGKILL)
        while engine.recovery.num_restarts <= number:
            await asyncio.sleep(0.001)
        assert engine.is_running
        if number == 0:  # asked while there is no engine: waits for the next
            answers.append(asyncio.create_task(read(engine, PROMPTS[0], PARAMS[0])))
            async with await engine.submit(PROMPTS[1], SamplingParams(**LONG)) as left:
                await engine.abort(left.request_id)
                assert [output.outputs[0].finish_reason async for output in left] == ["abort"]
        while engine.recovery.restarting:
            await asyncio.sleep(0.01)
    return await asyncio.gather(*answers), pids


def test_streams_go_on_when_it_is_killed_again_and_again(folder: Path, undisturbed: list[Any]) -> None:
    async def run() -> None:
        engine = await asyncio.to_thread(AsyncEngine, str(folder), on_engine_failure="restart", **EXACT)
        async with engine:
            answers, pids = await killed_again_and_again(engine, 2)
            assert answers == [*undisturbed, undisturbed[0]]
            assert engine.client.facts.pid not in pids
            assert (engine.recovery.num_restarts, engine.recovery.denied) == (2, ())
            assert not engine.recovery.blames_ops, "who is killed is not to blame"

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.nightly
def test_streams_go_on_however_often_it_is_killed(folder: Path, undisturbed: list[Any]) -> None:
    async def run() -> None:
        for _ in range(5):
            settings = EXACT | {"on_engine_failure": "restart", "max_engine_restarts": 4}
            async with await asyncio.to_thread(AsyncEngine, str(folder), **settings) as engine:
                answers, _ = await killed_again_and_again(engine, 4)
                assert answers == [*undisturbed, undisturbed[0]]

    asyncio.run(run())


def test_it_is_given_up_after_so_many(folder: Path) -> None:
    with small_llm(folder, on_engine_failure="restart", max_engine_restarts=1) as llm:
        assert llm.client.facts.pid != os.getpid(), "it needs a process of its own"
        first = llm.client.facts.pid
        os.kill(first, signal.SIGKILL)
        assert len(llm.generate([[1]], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids) == 120
        os.kill(llm.client.facts.pid, signal.SIGKILL)
        given_up = r"built again 1 times within 600 seconds \(--max-engine-restarts 1\) and is given up.*SIGKILL"
        with pytest.raises(EngineDeadError, match=given_up):
            llm.generate([[1]], PARAMS[0], use_tqdm=False)
        with pytest.raises(EngineDeadError, match="is given up"):
            llm.client.check()


@pytest.mark.parametrize(
    ("way", "opaque"),
    [
        pytest.param("raises", False, marks=pytest.mark.nightly),
        ("aborts", True),
        pytest.param("crashes", False, marks=pytest.mark.nightly),
        pytest.param("hangs", False, marks=pytest.mark.nightly),
    ],
)
def test_a_kernel_that_fails_is_denied(
    way: str, opaque: bool, folder: Path, undisturbed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_breaking(tmp_path, way, opaque=opaque)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings = {**EXACT, "plugins": ["cpu", "breaking"], "on_engine_failure": "restart"}

    async def run() -> None:
        async with await asyncio.to_thread(AsyncEngine, str(folder), step_timeout=3, **settings) as engine:
            assert chosen(engine) == "breaking"
            answers = await asyncio.gather(*(read(engine, *each) for each in zip(PROMPTS, PARAMS, strict=True)))
            assert answers == undisturbed
            assert chosen(engine) == "cpu_native"
            (culprit,) = engine.recovery.denied
            assert (culprit.plugin, culprit.choice) == ("breaking", "op.rms_norm=breaking")
            assert "dtype=float32" in culprit.where
            assert opaque or "hp_breaking/__init__.py, line " in culprit.where
            assert way != "raises" or "Tensors there: x float32[" in culprit.where
            assert (engine.recovery.num_restarts, engine.recovery.blames_ops) == (2, True) if opaque else (1, False)

    asyncio.run(asyncio.wait_for(run(), 120))


def chosen(engine: AsyncEngine) -> str:
    (row,) = (row for row in engine.table.rows if row.of == "rms_norm")
    return row.chosen


def test_a_kernel_that_was_asked_for_is_not_passed_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_breaking(tmp_path, "crashes")))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings: dict[str, Any] = {"plugins": ["cpu", "breaking"], "use": {"op.rms_norm": "breaking"}}
    settings["on_engine_failure"] = "restart"
    settings["enforce_eager"] = True  # else what it calls of the plugin cpu is recorded, and replayed without it
    said = r"cannot be built again.*--use op.rms_norm breaking.*\n.*on the deny list \(--deny op.rms_norm=breaking\)"
    with small_llm(folder, **settings) as llm, pytest.raises(EngineDeadError, match=said):
        llm.generate([[1]], PARAMS[0], use_tqdm=False)


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_request_that_engines_die_of_ends_alone(
    place: int, folder: Path, undisturbed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it came first or in the midst of others, which have no token before the engine dies."""
    monkeypatch.setenv("PYTHONPATH", str(install_deadly(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings = {**EXACT, "plugins": ["cpu", "breaking"], "on_engine_failure": "restart"}

    async def run() -> None:
        async with await asyncio.to_thread(AsyncEngine, str(folder), **settings) as engine:
            requests = list(zip(PROMPTS, PARAMS, strict=True))
            requests.insert(place, ([*POISON, 8], SamplingParams()))
            answers = await asyncio.gather(*(read(engine, *each) for each in requests), return_exceptions=True)
            poisoned = answers.pop(place)
            assert answers == undisturbed
            assert isinstance(poisoned, EngineError)
            assert not isinstance(poisoned, EngineDeadError)
            assert "again and again, the last time while no other was in doubt" in str(poisoned)
            assert "SIGKILL" in str(poisoned)
            assert (engine.recovery.num_restarts, engine.recovery.denied) == (3, ())
            assert await read(engine, PROMPTS[0], PARAMS[0]) == undisturbed[0]

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_rank_that_is_killed(folder: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "batch_invariant": True}
    with small_llm(folder, on_engine_failure="restart", **settings) as llm:
        expected = llm.generate([PROMPTS[0]], greedy, use_tqdm=False)[0].outputs[0].text
        stream = llm.stream(PROMPTS[0], greedy)
        for _ in range(10):
            next(stream)
        core = llm.client.facts.pid
        os.kill(ranks_of(core)[1], signal.SIGKILL)
        assert list(stream)[-1].outputs[0].text == expected
        assert llm.client.facts.pid != core


def test_weights_that_were_given_later_are_given_again(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=16384, seed=7)
    with small_llm(folder, on_engine_failure="restart") as llm:
        old = llm.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids
        llm.update_weights(tmp_path)
        new = llm.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids
        pid = llm.client.facts.pid
        llm.sleep()
        with pytest.raises(EngineError, match="the engine sleeps"):  # no failure that another engine would mend
            llm.generate([[1]], use_tqdm=False)
        llm.wake_up()
        assert llm.client.facts.pid == pid
        os.kill(pid, signal.SIGKILL)
        assert llm.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids == new != old


def test_one_that_hangs_without_restarts(folder: Path) -> None:
    with small_llm(folder, core_process=True, step_timeout=1) as llm:
        pid = llm.client.facts.pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"a step .* did not end within 1 seconds \(--step-timeout\)"):
            llm.generate([[1]], PARAMS[0], use_tqdm=False)
        assert time.monotonic() - began >= 1
        until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_engine_failure": "restart", "core_process": False}, "needs a core in a process of its own"),
        ({"on_engine_failure": "restart", "executor": "torchrun"}, "to torchrun"),
        ({"on_engine_failure": "retry"}, "on_engine_failure"),
        ({"blame_ops": True}, "add --enforce-eager"),
        ({"deny": "rms_norm=x"}, "write op.rms_norm|op.rms_norm"),
        ({"deny": "op.rms_norm"}, "takes FAMILY=NAME"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(model="demo", **settings)


def test_what_is_denied_must_exist(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"cpu_natve.*--deny"):
        small_llm(folder, deny="op.rms_norm=cpu_natve")
    with small_llm(folder, deny="op.rms_norm=cpu_native,linear=cpu_native") as llm:
        rejected = {r.offer.contribution.name: r.reasons[0] for row in llm.table.rows for r in row.rejected}
        assert rejected["cpu_native"].code == "denied"
        chosen_now = {
            (row.family, row.chosen) for row in llm.table.rows if row.of == "rms_norm" or row.family == "linear"
        }
        assert not chosen_now & {("op", "cpu_native"), ("linear", "cpu_native")}


class Kernels:
    """Code that can be found."""

    def apply(self) -> str:
        def inner() -> str:
            raise ValueError

        return inner()


def test_who_is_named() -> None:
    suspects = [Suspect("acme", "linear", "fast", code_spans(Kernels))]
    file, first, last = suspects[0].spans[0]
    raised = (
        f'Traceback (most recent call last):\n  File "core.py", line 3, in step\n  File "{file}", line %d, in inner\n'
    )
    found = find_culprit(raised % (first + 2), suspects)
    assert found is not None
    assert (found.plugin, found.choice, found.where) == ("acme", "linear=fast", f"{file}, line {first + 2}")
    assert find_culprit(raised % (last + 1), suspects) is None
    assert find_culprit(raised % first, suspects, named_alone=True) is None
    name = call_name("op.silu", "hot", "acme", "dtype=é")
    crashed = (
        'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "a.py", line 1 in listen\n\n'
        'Current thread 0x2 (most recent call first):\n  File "call_names.py", line 9 in %s\n'
        f'  File "{file}", line {first} in apply\n'
    )
    hot = find_culprit(crashed % name, suspects)
    assert hot is not None
    assert (hot.choice, hot.where) == ("op.silu=hot", "dtype=?")
    assert find_culprit(crashed % call_name("op.silu", "reference", "core", ""), suspects) is None


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["crashes", "raises"])
def test_a_kernel_that_fails_on_a_rank_is_denied(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_breaking(tmp_path, way)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings: dict[str, Any] = {"plugins": ["cpu", "breaking"], "tensor_parallel_size": 2, "enforce_eager": True}
    with small_llm(folder, on_engine_failure="restart", **settings) as llm:
        assert llm.generate([[1]], PARAMS[0], use_tqdm=False)[0].outputs[0].finish_reason == "length"
        assert llm.config.deny == ("op.rms_norm=breaking",)
