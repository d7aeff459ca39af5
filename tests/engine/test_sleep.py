"""Sleep, waking up and new weights: what is given back, and that what comes after is as if nothing had been."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution import weights as weights_module
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.layers.loading import load_weights
from hardpoint_cpu.platform import CpuMemory
from hardpoint_plugin_api import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    MemoryTag,
    PlatformError,
    UnknownNameError,
)
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, allowed_token_ids=list(range(65, 91))
)
PROMPTS = random_prompts(4, 60, seed=1, shortest=40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Other weights of the same shapes."""
    folder = tmp_path_factory.mktemp("other")
    return folder, write_checkpoint(folder, "qwen3", seed=9)


@pytest.fixture
def llm(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[LLM]:
    with small_llm(checkpoint[0]) as engine:
        yield engine


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def check_model(llm: LLM, model: PreTrainedModel) -> None:
    for prompt, drawn in zip(PROMPTS, tokens(llm), strict=True):
        check_tokens_equal(model, prompt, drawn)


@pytest.mark.parametrize(
    ("options", "asleep"),
    [
        ({}, {"kv", "resources"}),
        ({"level": 2}, {"kv", "resources", "weights"}),
        ({"tags": ["weights"]}, {"weights"}),
        ({"tags": ["kv"]}, {"kv"}),
    ],
)
def test_outputs_after_sleep_are_those_before(llm: LLM, options: dict[str, Any], asleep: set[str]) -> None:
    before = tokens(llm), tokens(llm, PENALISED)
    held = llm.memory_report().by_tag
    assert all(held[tag] > 1000 for tag in ("weights", "kv", "resources"))
    llm.sleep(**options)
    for tag, nbytes in llm.memory_report().by_tag.items():
        if tag in asleep | {"graphs"}:  # graphs hold addresses of what sleeps, so they go with any of it
            assert nbytes <= held[tag] // 4, f"{tag} is still held"
        else:
            assert nbytes == held[tag]
    with pytest.raises(EngineError, match="sleeps, without its " + ", ".join(sorted(asleep))):
        llm.generate(PROMPTS[0], GREEDY)
    llm.wake_up()
    assert (tokens(llm), tokens(llm, PENALISED)) == before
    assert llm.memory_report().by_tag == held


def test_cached_prefixes_are_forgotten_with_the_cache(llm: LLM) -> None:
    tokens(llm)
    cached = llm.stats.cached_tokens
    tokens(llm)
    assert llm.stats.cached_tokens > cached
    cached = llm.stats.cached_tokens
    llm.sleep(tags=["resources"])
    llm.wake_up()
    tokens(llm)
    assert llm.stats.cached_tokens > cached, "scratch memory holds no prefixes"
    cached = llm.stats.cached_tokens
    llm.sleep()
    llm.wake_up()
    tokens(llm)
    assert llm.stats.cached_tokens == cached


def test_waking_up_in_parts(checkpoint: tuple[Path, PreTrainedModel], llm: LLM) -> None:
    llm.sleep(level=2)
    llm.sleep(level=1)
    llm.wake_up(["weights"])
    with pytest.raises(EngineError, match="without its kv, resources"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.wake_up(["kv", "resources"])
    llm.wake_up()
    check_model(llm, checkpoint[1])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"level": 3}, "sleep level 3 is invalid: 1 gives back kv, resources; 2"),
        ({"tags": ["weight"]}, "'weight'; did you mean 'weights'?"),
        ({"tags": ["graphs"]}, "'graphs'"),
    ],
)
def test_levels_and_tags_that_are_none(llm: LLM, options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("?", r"\?")):
        llm.sleep(**options)
    with pytest.raises(UnknownNameError, match="'caches'"):
        llm.wake_up(["caches"])
    assert len(tokens(llm)) == 4


def test_an_engine_with_requests_does_not_sleep(llm: LLM, other: tuple[Path, PreTrainedModel]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="requests are under way; an engine is put to sleep when"):
        llm.sleep()
    with pytest.raises(EngineError, match="requests are under way; an engine is given other weights when"):
        llm.update_weights(other[0])
    *_, last = stream
    assert last.outputs[0].token_ids == tokens(llm)[0]
    llm.sleep()


@pytest.mark.parametrize("ended_by", ["stop text", "closed stream", "abort"])
def test_steps_that_ended_requests_leave_behind_do_not_keep_it_awake(
    checkpoint: tuple[Path, PreTrainedModel], ended_by: str
) -> None:
    with small_llm(checkpoint[0], async_scheduling=True) as llm:
        core, before = llm.core, tokens(llm)
        for change in ("sleep", "update"):
            if ended_by == "stop text":
                text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
                stopping = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[text[3]])
                assert llm.generate(PROMPTS[0], stopping, use_tqdm=False)[0].outputs[0].finish_reason == "stop"
            elif ended_by == "closed stream":
                for _ in llm.stream(PROMPTS[0], GREEDY):
                    break  # which closes it
            else:
                request = core.add_request([1, 2, 3], GREEDY, frozenset())
                core.step()
                core.abort(request)
            assert core._submitted, "a step is on its way whose token nobody wants"
            if change == "sleep":
                llm.sleep(level=2)
                llm.wake_up()
            else:
                llm.update_weights(checkpoint[0])
            assert core.is_idle
            assert llm.stats.num_free_pages == llm.stats.num_pages
            assert tokens(llm) == before


def test_a_step_left_behind_that_fails_leaves_a_usable_engine(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_llm(checkpoint[0], async_scheduling=True) as llm:
        before = tokens(llm)
        for _ in llm.stream(PROMPTS[0], GREEDY):
            break

        def lost(ticket: object) -> None:
            raise RuntimeError("lost")

        with monkeypatch.context() as patched:
            assert isinstance(llm.core.executor, InProcessExecutor)
            patched.setattr(llm.core.executor._runner, "collect", lost)
            with pytest.raises(RuntimeError, match="lost"):
                llm.sleep()
        llm.sleep()
        llm.wake_up()
        assert tokens(llm) == before


@pytest.mark.parametrize("where", ["drop", "trim"])
def test_an_interrupted_sleep_is_known(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    before, cached = tokens(llm), llm.stats.cached_tokens
    if where == "drop" and "kv" in llm.core.holdings.memory.memory.suspendable:
        pytest.skip("the platform suspends it")
    owner: Any = llm.core.holdings._in_place["kv"] if where == "drop" else llm.core.holdings.memory.memory
    real = getattr(owner, where)

    def interrupted() -> None:
        real()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.sleep(tags=["kv"])
    with pytest.raises(EngineError, match="without its kv;"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.wake_up()
    assert tokens(llm) == before
    assert llm.stats.cached_tokens == cached, "the pages that held the prefixes were given back"


@pytest.mark.parametrize(
    ("form", "asleep"),
    [
        ("folder", True),
        ("tensors", False),
        pytest.param("folder", False, marks=pytest.mark.nightly),
        pytest.param("shards", False, marks=pytest.mark.nightly),
        pytest.param("shards", True, marks=pytest.mark.nightly),
        pytest.param("tensors", True, marks=pytest.mark.nightly),
    ],
)
def test_other_weights(
    llm: LLM,
    checkpoint: tuple[Path, PreTrainedModel],
    other: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    form: str,
    asleep: bool,
) -> None:
    check_model(llm, checkpoint[1])
    held = llm.memory_report().by_tag
    if asleep:
        llm.sleep(level=2)
    if form == "shards":
        write_checkpoint(tmp_path, "qwen3", seed=9, shards=True)
        llm.update_weights(str(tmp_path))
    elif form == "folder":
        llm.update_weights(other[0])
    else:
        llm.update_weights(iter(load_file(other[0] / "model.safetensors").items()))
    llm.wake_up()
    check_model(llm, other[1])
    assert llm.memory_report().by_tag == held
    if form == "tensors":
        llm.sleep(level=2)
        with pytest.raises(EngineError, match="last updated from tensors, which cannot be read again"):
            llm.wake_up()
        llm.update_weights(checkpoint[0])
        llm.wake_up()
        check_model(llm, checkpoint[1])
    else:
        llm.sleep(level=2)
        llm.wake_up()
        check_model(llm, other[1])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hidden_size": 32}, "hidden_size is 32 and not 64"),
        ({"rope_theta": 777.0}, "777"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2 and not 3"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(
    llm: LLM, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    write_checkpoint(tmp_path, "qwen3", **changes)
    with pytest.raises(CheckpointError, match=error):
        llm.update_weights(tmp_path)
    check_model(llm, checkpoint[1])


@pytest.mark.parametrize("damage", ["shape", "missing", "extra"])
def test_a_damaged_checkpoint(llm: LLM, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, damage: str) -> None:
    """A folder is looked at first; tensors come one by one, so that the weights are gone when a wrong one comes."""
    write_checkpoint(tmp_path, "qwen3", seed=9)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    if damage == "missing":
        del stored[name]
    else:
        stored["extra.weight" if damage == "extra" else name] = torch.zeros(3, 3)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    culprit = "extra.weight" if damage == "extra" else r"(layers\.2\.mlp|blocks\.2\.feed_forward)\.down"
    with pytest.raises(CheckpointError, match=culprit):
        llm.update_weights(tmp_path)
    check_model(llm, checkpoint[1])
    with pytest.raises(CheckpointError, match=culprit + ".*holds no weights now"):
        llm.update_weights(stored.items())
    with pytest.raises(EngineError, match="without its weights"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.wake_up()
    check_model(llm, checkpoint[1])
    llm.update_weights(checkpoint[0])
    check_model(llm, checkpoint[1])


def test_wrong_tensors_after_tensors_cannot_be_woken_from(llm: LLM, other: tuple[Path, PreTrainedModel]) -> None:
    stored = load_file(other[0] / "model.safetensors")
    llm.update_weights(stored.items())
    with pytest.raises(CheckpointError, match=r"holds no weights now: update them again$"):
        llm.update_weights({"extra.weight": torch.zeros(3)}.items())
    with pytest.raises(EngineError, match="last updated from tensors"):
        llm.wake_up()
    llm.update_weights(stored.items())
    check_model(llm, other[1])


@pytest.mark.parametrize("error", [RuntimeError("the trainer is gone"), KeyboardInterrupt()], ids=repr)
def test_what_the_givers_of_tensors_raise_arrives_as_it_is(
    llm: LLM, checkpoint: tuple[Path, PreTrainedModel], error: BaseException
) -> None:
    def give() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(load_file(checkpoint[0] / "model.safetensors").items())[:3]
        raise error

    llm.sleep(tags=["weights"])
    kept = llm.memory_report().by_tag["weights"]
    llm.wake_up()
    with pytest.raises(type(error)) as caught:
        llm.update_weights(give())
    assert caught.value is error
    assert llm.memory_report().by_tag["weights"] == kept
    llm.wake_up()
    check_model(llm, checkpoint[1])


def test_weights_whose_reading_is_interrupted_are_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tokens(llm)

    def half(*args: Any) -> None:
        load_weights(*args)
        raise KeyboardInterrupt

    llm.sleep(level=2)
    kept = llm.memory_report().by_tag["weights"]
    with monkeypatch.context() as patched:
        patched.setattr(weights_module, "load_weights", half)
        with pytest.raises(KeyboardInterrupt):
            llm.wake_up()
    assert llm.memory_report().by_tag["weights"] == kept
    with pytest.raises(EngineError, match="without its kv, resources, weights"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.wake_up()
    assert tokens(llm) == before


def test_tensors_that_are_none(llm: LLM, checkpoint: tuple[Path, PreTrainedModel]) -> None:
    stored = list(load_file(checkpoint[0] / "model.safetensors").items())
    wrong: Sequence[tuple[Any, str]] = [(["lm_head.weight"], "expected pairs"), ([*stored, stored[3]], "there twice")]
    for tensors, error in wrong:
        with pytest.raises(CheckpointError, match=error):
            llm.update_weights(tensors)
    llm.update_weights(itertools.chain(reversed(stored)))
    check_model(llm, checkpoint[1])


def test_memory_that_is_gone_is_an_error_and_can_be_tried_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tokens(llm)
    llm.sleep()
    cache = llm.core.holdings._in_place["kv"]
    with monkeypatch.context() as patched:
        patched.setattr(cache, "_buffers", [torch.empty(1, dtype=torch.uint8).expand(2**60)])
        with pytest.raises(CapacityError, match=r"the memory of kv cannot be taken again.*then wake up again"):
            llm.wake_up()
    with pytest.raises(EngineError, match="without its kv;"):
        llm.generate(PROMPTS[0], GREEDY)
    llm.wake_up()
    assert tokens(llm) == before


class SuspendingMemory(CpuMemory):
    """Main memory that takes the cache away itself, as a platform with virtual addresses does: overwritten here."""

    suspendable: frozenset[MemoryTag] = frozenset({"kv"})

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[torch.Tensor] = []
        self.calls: list[tuple[str, list[MemoryTag]]] = []

    def suspend(self, tags: Sequence[MemoryTag]) -> None:
        self.calls.append(("suspend", list(tags)))

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        self.calls.append(("resume", list(tags)))
        for buffer in self.buffers:
            buffer.fill_(0xFF)  # undefined: NaN, in any floating-point type


def test_a_sleep_that_fails_halfway_is_known(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, memory = tokens(llm), SuspendingMemory()
    llm.core.holdings.memory.memory = memory

    def refuse(self: SuspendingMemory, tags: Sequence[MemoryTag]) -> None:
        if "resources" in tags:
            raise PlatformError("the driver will not")

    with monkeypatch.context() as patched:
        patched.setattr(SuspendingMemory, "suspendable", frozenset({"kv", "resources"}))
        patched.setattr(SuspendingMemory, "suspend", refuse)
        with pytest.raises(PlatformError, match="will not"):
            llm.sleep(tags=["kv", "resources"])
        with pytest.raises(EngineError, match="without its kv;"):
            llm.generate(PROMPTS[0], GREEDY)
        llm.wake_up()
    assert tokens(llm) == before


def test_a_platform_that_suspends_keeps_addresses(llm: LLM) -> None:
    before = tokens(llm)
    memory = SuspendingMemory()
    llm.core.holdings.memory.memory = memory
    cache: Any = llm.core.holdings._in_place["kv"]
    memory.buffers = cache._buffers
    addresses = [buffer.data_ptr() for buffer in cache._buffers]
    llm.sleep()
    assert memory.calls == [("suspend", ["kv"])]
    assert llm.memory_report().by_tag["kv"] == 0
    llm.wake_up()
    assert memory.calls[1:] == [("resume", ["kv"])]
    assert [buffer.data_ptr() for buffer in cache._buffers] == addresses
    assert tokens(llm) == before
