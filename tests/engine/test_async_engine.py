"""AsyncEngine: many streams in an event loop, on a core in its own process and on one in a thread of this."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hardpoint import LLM, AsyncEngine, RequestOutput, RequestOutputKind, SamplingParams
from hardpoint.engine.execution.runner import Runner
from hardpoint.tokenizer import Tokenizer
from hardpoint_plugin_api import EngineError, RequestError
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import SMALL, small_llm, until
from tests.support.traces import trace_events

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
"""Thousands of tokens: nothing in these tests waits for its end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "qwen3", max_position_embeddings=16384)
    (path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with small_llm(folder, max_num_seqs=4) as engine:
        yield engine


@pytest.fixture(scope="module", params=[True, False], ids=["process", "thread"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(str(folder), **SMALL | {"max_num_seqs": 4, "core_process": request.param})
    yield engine
    run(engine.close())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """In an event loop of its own: an engine serves one after the other. A hang fails."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def outputs_of(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


async def last_of(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    return (await outputs_of(stream))[-1]


async def all_of(engine: AsyncEngine, prompts: Sequence[Any], params: SamplingParams) -> list[RequestOutput]:
    return await asyncio.gather(*(last_of(engine.generate(prompt, params)) for prompt in prompts))


def is_empty(engine: AsyncEngine) -> bool:
    stats = engine.stats
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages > 0


async def eventually(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


def test_tokens_are_those_of_llm(engine: AsyncEngine, llm: LLM) -> None:
    prompts = random_prompts(10, 60, seed=1)
    wanted = llm.generate(prompts, GREEDY, use_tqdm=False)
    found = run(all_of(engine, prompts, GREEDY))
    assert [o.outputs for o in found] == [o.outputs for o in wanted]
    assert [o.prompt_token_ids for o in found] == prompts
    assert all(o.finished for o in found)
    until(lambda: is_empty(engine))


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"stop": ["XYZ", "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"]},
        {"stop": "a", "include_stop_str_in_output": True, "max_tokens": 200},
        {"temperature": 1.0, "seed": 3, "min_tokens": 4, "logit_bias": {65: 3.0}, "bad_words": ["AA"]},
    ],
    ids=str,
)
def test_parameters_mean_the_same(engine: AsyncEngine, llm: LLM, changes: dict[str, Any]) -> None:
    params = replace(GREEDY, **changes)
    (wanted,) = llm.generate(["abc"], params, use_tqdm=False)
    found = run(last_of(engine.generate("abc", params)))
    assert (found.prompt, found.outputs) == (wanted.prompt, wanted.outputs)
    for output in found.outputs:
        assert len(output.text_ends) == len(output.token_ids)
        assert output.text_ends == sorted(output.text_ends)
        assert 0 < output.text_ends[-1] <= len(output.text)


@pytest.mark.parametrize("changes", [{}, {"n": 2, "temperature": 0.9, "seed": 5, "logprobs": 1}], ids=str)
def test_the_parts_of_a_stream_are_its_output(engine: AsyncEngine, llm: LLM, changes: dict[str, Any]) -> None:
    params = replace(GREEDY, stop="a", **changes)
    (wanted,) = llm.generate(["abc"], params, use_tqdm=False)
    parts = replace(params, output_kind=RequestOutputKind.DELTA)

    async def slowly() -> list[RequestOutput]:
        found = []
        async for output in engine.generate("abc", parts):
            found.append(output)
            await asyncio.sleep(0.02)  # several parts come meanwhile, and are joined
        return found

    for found in (run(outputs_of(engine.generate("abc", parts))), run(slowly()), list(llm.stream("abc", parts))):
        assert sum(len(part.token_ids) for output in found for part in output.outputs) == sum(
            len(whole.token_ids) for whole in wanted.outputs
        )
        first, *rest = found
        for output in rest:
            for part in output.outputs:
                known = next((each for each in first.outputs if each.index == part.index), None)
                assert part.start == (0 if known is None else len(known.text))
            first.extend(output)
        assert first.finished
        assert first.outputs == wanted.outputs


def test_a_stream_may_hold_its_end_alone(engine: AsyncEngine, llm: LLM) -> None:
    params = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    (wanted,) = llm.generate(["abc"], GREEDY, use_tqdm=False)
    for found in (run(outputs_of(engine.generate("abc", params))), list(llm.stream("abc", params))):
        assert [output.outputs for output in found] == [wanted.outputs]


def test_logprobs(engine: AsyncEngine, llm: LLM) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    (wanted,) = llm.generate(["abc"], params, use_tqdm=False)
    found = run(last_of(engine.generate("abc", params)))
    assert found.prompt_logprobs == wanted.prompt_logprobs
    assert found.outputs == wanted.outputs
    assert found.outputs[0].logprobs is not None
    assert len(found.outputs[0].logprobs) == 24


def test_chats_and_defaults(engine: AsyncEngine, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (wanted,) = llm.chat(messages, GREEDY, use_tqdm=False)
    found = run(last_of(engine.chat(messages, GREEDY)))
    assert found.prompt == "<user>hello:"
    assert found.outputs == wanted.outputs
    assert engine.default_sampling_params() == llm.default_sampling_params()
    assert engine.table.digest == llm.table.digest
    assert engine.max_model_len == llm.core.max_model_len


def test_each_output_holds_what_there_was_and_stays_so(engine: AsyncEngine) -> None:
    outputs = run(outputs_of(engine.generate([9, 8, 7], replace(GREEDY, logprobs=0))))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    whole, count = outputs[-1].outputs[0], 0
    for output in outputs:
        each = output.outputs[0]
        assert whole.text.startswith(each.text)
        assert each.token_ids == whole.token_ids[: len(each.token_ids)]
        assert each.logprobs == (whole.logprobs or [])[: len(each.token_ids)]
        assert len(each.token_ids) > count
        count = len(each.token_ids)
    assert count == 24


def test_a_slow_reader_gets_one_long_step(engine: AsyncEngine) -> None:
    async def read() -> list[RequestOutput]:
        stream = engine.generate([1, 2, 3], GREEDY)
        outputs = [await anext(stream)]
        await eventually(lambda: is_empty(engine))
        return outputs + await outputs_of(stream)

    outputs = run(read())
    assert [len(output.outputs[0].token_ids) for output in outputs][-1] == 24
    assert len(outputs) <= 3, "one that had arrived, and the last one"


def test_a_common_prefix_is_reported(engine: AsyncEngine) -> None:
    prompt = random_prompts(1, 70, seed=31, shortest=70)[0]
    before = engine.stats.cached_tokens
    first, second = (run(last_of(engine.generate(prompt, GREEDY))) for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert engine.stats.cached_tokens - before == 64


@pytest.mark.parametrize("way", ["cancel", "aclose", "break", "close"])
def test_who_leaves_frees_the_pages(engine: AsyncEngine, way: str) -> None:
    async def leave() -> None:
        other = asyncio.create_task(last_of(engine.generate([4, 5], GREEDY)))
        if way == "cancel":
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in engine.generate([1, 2, 3], replace(ENDLESS, n=2)):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "aclose":
            stream = engine.generate([1, 2, 3], ENDLESS)
            await anext(stream)
            await stream.aclose()
        elif way == "break":
            async for _ in engine.generate([1, 2, 3], ENDLESS):
                break
        else:
            async with await engine.submit([1, 2, 3], ENDLESS) as opened:
                await anext(opened)
            assert [output async for output in opened if output.finished] == []
        assert len((await other).outputs[0].token_ids) == 24
        await eventually(lambda: is_empty(engine))

    run(leave())


def test_cancelled_before_it_was_queued(engine: AsyncEngine) -> None:
    entered, leave = threading.Event(), threading.Event()

    def prompt() -> str:
        entered.set()
        leave.wait()
        return "abc"

    async def cancel() -> None:
        task = asyncio.create_task(engine.submit(prompt, ENDLESS, request_id="early"))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        leave.set()
        await last_of(engine.generate([1, 2], GREEDY, request_id="early"))
        await eventually(lambda: is_empty(engine))

    before = engine.stats.prefill_tokens
    run(cancel())
    assert engine.stats.prefill_tokens == before + 2, "the cancelled prompt was never run"


def test_abort_by_id(engine: AsyncEngine) -> None:
    async def abort() -> tuple[RequestOutput, bool]:
        stream = engine.generate([1, 2, 3], replace(ENDLESS, n=2), request_id="mine")
        assert (await anext(stream)).request_id == "mine"
        with pytest.raises(RequestError, match="request_id 'mine' is that of an open request"):
            await last_of(engine.generate([1], request_id="mine"))
        assert await engine.abort("mine")
        last = await last_of(stream)
        await eventually(lambda: is_empty(engine))
        return last, await engine.abort("mine")

    last, again = run(abort())
    assert last.finished
    assert [output.finish_reason for output in last.outputs] == ["abort", "abort"]
    assert not again


def test_a_timeout(engine: AsyncEngine) -> None:
    last = run(last_of(engine.generate([1, 2, 3], ENDLESS, timeout=0.05)))
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("abort", "deadline")


def test_priorities(engine: AsyncEngine) -> None:
    async def ends() -> list[str]:
        order: list[str] = []

        async def note(name: str, priority: int) -> None:
            async with await engine.submit([1, 2], GREEDY, priority=priority) as stream:
                queued.release()
                order.extend([name async for output in stream if output.finished])

        queued = asyncio.Semaphore(0)
        running = [await engine.submit([number], ENDLESS) for number in range(4)]
        for stream in running:
            await anext(stream)  # all slots are taken
        tasks = []
        for name, priority in (("last", 2), ("first", 0), ("second", 1)):
            tasks.append(asyncio.create_task(note(name, priority)))
            await queued.acquire()
        running[0].close()
        await asyncio.gather(*tasks)
        for stream in running:
            stream.close()
        return order

    assert run(ends()) == ["first", "second", "last"]
    until(lambda: is_empty(engine))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([258], {}, "token id 258 is outside the model's vocabulary of 258"),
        ([2**40, 5], {}, "token id 1099511627776 is outside the model's vocabulary of 258"),
        ([5, -(2**40)], {}, "token id -1099511627776 is outside the model's vocabulary of 258"),
        ([1] * 16384, {}, "the prompt has 16384 tokens"),
        ("\ud800", {}, "lone surrogate"),
        (3, {}, "a prompt is a text"),
        ("a", {"sampling_params": {"temperature": 0}}, "sampling_params must be a SamplingParams"),
        ("a", {"sampling_params": replace(GREEDY, logit_bias={300: 1.0})}, "logit_bias names token 300"),
        ("a", {"priority": "high"}, "priority must be a whole number, got 'high'"),
        ("a", {"timeout": -1}, "timeout must be seconds"),
    ],
)
def test_bad_requests(engine: AsyncEngine, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(last_of(engine.generate(prompt, **options)))
    with pytest.raises(RequestError, match=message):
        run(engine.submit(prompt, **options))
    assert is_empty(engine)
    assert not engine._streams


def test_nothing_that_takes_its_time_runs_in_the_event_loop(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[threading.Thread]] = {}

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(threading.current_thread())
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, spied)

    for owner, name in (
        (Tokenizer, "encode"),
        (Tokenizer, "decode"),
        (engine._frontend, "render_chat"),
        (engine.client, "add_request"),
        (engine.client, "step"),
    ):
        spy(owner, name)
    run(last_of(engine.chat([{"role": "user", "content": "hello"}], replace(GREEDY, stop="XYZ", bad_words=["b"]))))
    assert set(seen) >= {"encode", "decode", "render_chat", "add_request"}
    assert not any(threading.main_thread() in threads for threads in seen.values())


def test_many_event_loops_share_an_engine(engine: AsyncEngine) -> None:
    prompts = random_prompts(6, 30, seed=8)
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = run(last_of(engine.generate(prompts[number], GREEDY))).outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(6)] == [o.outputs[0].token_ids for o in run(all_of(engine, prompts, GREEDY))]


def test_churn(engine: AsyncEngine, llm: LLM) -> None:
    """Requests that are read, left, aborted, cancelled and timed out, all at once."""
    prompts, generator = random_prompts(80, 40, seed=17), random.Random(3)
    wanted = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    async def one(number: int, fate: str) -> None:
        params = replace(GREEDY, stop="q" if fate == "stop" else None)
        timeout = 0.01 if fate == "timeout" else None
        name, count = f"churn {number}", 0
        async for output in engine.generate(prompts[number], params, request_id=name, timeout=timeout):
            tokens = output.outputs[0].token_ids
            assert tokens == wanted[number][: len(tokens)]
            count += 1
            if fate == "leave" and count == 2:
                return
            if fate == "abort" and count == 2:
                await engine.abort(name)
        assert output.finished
        if fate == "read":
            assert tokens == wanted[number]

    async def churn() -> None:
        fates = [generator.choice(["read", "leave", "abort", "cancel", "timeout", "stop"]) for _ in prompts]
        tasks = [asyncio.create_task(one(number, fate)) for number, fate in enumerate(fates)]
        for task, fate in zip(tasks, fates, strict=True):
            await asyncio.sleep(generator.random() * 0.003)
            if fate == "cancel":
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
        await eventually(lambda: is_empty(engine))

    run(churn())
    assert not engine._streams
    assert not engine._by_request


def test_an_event_loop_that_is_gone_ends_its_requests(engine: AsyncEngine) -> None:
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(engine.submit([1, 2, 3], ENDLESS))
    loop.run_until_complete(anext(stream))
    loop.close()
    until(lambda: is_empty(engine))
    assert not engine._streams


def test_a_step_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = iter(range(1000)), Runner.submit

    def submit(self: Runner, step: Any) -> Any:
        if next(calls) == 5:
            raise RuntimeError("the kernel broke")
        return real(self, step)

    monkeypatch.setattr(Runner, "submit", submit)
    engine = AsyncEngine(str(folder), **SMALL, core_process=False)

    async def fail_and_go_on() -> RequestOutput:
        async with engine:
            open_ones = [last_of(engine.generate([number], ENDLESS)) for number in range(3)]
            for error in await asyncio.gather(*open_ones, return_exceptions=True):
                assert isinstance(error, EngineError)
                assert "the engine failed while it served this request: RuntimeError: the kernel broke" in str(error)
            assert engine.is_running
            last = await last_of(engine.generate([1, 2], GREEDY))
            await eventually(lambda: is_empty(engine))
            return last

    assert len(run(fail_and_go_on()).outputs[0].token_ids) == 24


def test_what_an_owner_does_to_it(folder: Path, tmp_path: Path) -> None:
    engine = AsyncEngine(str(folder), **SMALL)

    async def operate() -> None:
        first = await last_of(engine.generate([1, 2], GREEDY))
        assert (await engine.metrics()).value("hardpoint_generated_tokens_total") == 24
        held = (await engine.memory_report()).by_tag
        async with await engine.submit([2], ENDLESS) as stream:
            await anext(stream)
            with pytest.raises(EngineError, match="requests are under way"):
                await engine.sleep()
        await eventually(lambda: is_empty(engine))
        await engine.sleep(level=2)
        with pytest.raises(EngineError, match="the engine sleeps"):
            await last_of(engine.generate([1, 2], GREEDY))
        await engine.wake_up()
        assert (await engine.memory_report()).by_tag == held | {"graphs": 0}, "they are prepared when they are needed"
        await engine.update_weights(folder)
        await engine.start_profile(tmp_path / "profile")
        assert (await last_of(engine.generate([1, 2], GREEDY))).outputs == first.outputs
        await engine.stop_profile()
        assert "hardpoint.step" in {event["name"] for event in trace_events(tmp_path / "profile")}
        await engine.close()
        with pytest.raises(RequestError, match="this AsyncEngine is closed"):
            await engine.metrics()

    run(operate())


def test_closing_with_open_streams(folder: Path) -> None:
    engine = AsyncEngine(str(folder), **SMALL, core_process=False)

    async def close() -> None:
        short, endless = await engine.submit([1], GREEDY), await engine.submit([2], ENDLESS)
        draining = asyncio.create_task(engine.close(drain=600))
        await eventually(lambda: not engine.is_running)
        with pytest.raises(RequestError, match="this AsyncEngine is closed; make a new one"):
            await last_of(engine.generate([1], GREEDY))
        assert [output async for output in short][-1].outputs[0].finish_reason == "length"
        assert not draining.done()
        await engine.close()  # a second call cuts the first one's time short
        await draining
        last = [output async for output in endless][-1]
        assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
        with pytest.raises(RequestError, match="closed"):
            engine.check_health()

    run(close())
