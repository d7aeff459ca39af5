"""Adapters that are bad, gone or changed: nothing else suffers from them, and the way out is named."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, LoRARequest, SamplingParams
from hardpoint.engine.client import CoreClient
from hardpoint.engine.control import LoadAdapter, UnloadAdapter
from hardpoint_plugin_api import CapacityError, CheckpointError, EngineDeadError, EngineError, RequestError
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.lora import write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
(PROMPT,) = random_prompts(1, 60, seed=1, shortest=50)
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "llama")


def lora_llm(folder: Path, **settings: Any) -> LLM:
    return small_llm(folder, **({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} | settings))


def request(folder: Path) -> LoRARequest:
    return LoRARequest(folder.name, 1, str(folder))


def check(llm: LLM, models: list[PreTrainedModel], requests: list[LoRARequest | None]) -> None:
    """One batch, each row judged by its model."""
    outputs = llm.generate([PROMPT] * len(models), GREEDY, lora_request=requests, use_tqdm=False)
    for model, output in zip(models, outputs, strict=True):
        check_tokens_equal(model, PROMPT, output.outputs[0].token_ids)


NOT_FINITE: dict[str, tuple[str, dict[str, Any], str]] = {
    "NaN": ("float32", {"tensors": {B: torch.full((64, 4), torch.nan)}}, r"times the scale 2, holds numbers that are"),
    "too high by its scale": (
        "float32",
        {"lora_alpha": 4e38, "tensors": {B: torch.full((64, 4), 10.0)}},
        r"scale 1e\+38, holds .* not finite in float32",
    ),
    "scale beyond float32": ("float32", {"lora_alpha": 1e300}, r"scale 2.5e\+299, holds .* not finite in float32"),
    "float64": ("float32", {"tensors": {B: torch.full((64, 4), 1e300, dtype=torch.float64)}}, "not finite in float32"),
    "too high for the slot": ("float16", {"tensors": {B: torch.full((64, 4), 4e4)}}, "not finite in float16"),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_that_are_not_finite_reach_no_slot(
    dtype: str, base: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """One in any slot would turn every row of a batch with adapters into NaN: its product with a masked 0."""
    model = base[1]
    write_adapter(tmp_path / "good", model)
    with lora_llm(base[0], dtype=dtype) as llm:
        good = [None, request(tmp_path / "good")]
        before = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 2, GREEDY, lora_request=good)]
        for name, (of, options, message) in NOT_FINITE.items():
            if of == dtype:
                write_adapter(tmp_path / name, model, **options)
                with pytest.raises(CheckpointError, match=message):
                    llm.control(LoadAdapter(name, str(tmp_path / name)))
                llm.reset_prefix_cache()
                after = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 2, GREEDY, lora_request=good)]
                assert after == before, name


def test_an_adapter_that_is_gone_when_the_engine_wakes_up(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    model = base[1]
    gone, kept = tmp_path / "gone", tmp_path / "kept"
    write_adapter(gone, model)
    merged = write_adapter(kept, model, seed=2)
    with lora_llm(base[0]) as llm:
        for folder in (gone, kept):
            llm.control(LoadAdapter(folder.name, str(folder)))
        llm.sleep(level=2)
        shutil.rmtree(gone)
        said = r"adapter 'gone' cannot be read again: .*does not exist.*unload it \(UnloadAdapter.*then wake up again"
        with pytest.raises(CheckpointError, match=said):
            llm.wake_up()
        with pytest.raises(EngineError, match="without its adapters"):
            llm.generate([PROMPT], GREEDY)
        assert [adapter.name for adapter in llm.control(UnloadAdapter("gone"))] == ["kept"]
        llm.wake_up()
        check(llm, [model, merged], [None, request(kept)])
        write_adapter(gone, model, seed=3)
        check(llm, [merged], [request(kept)])


def test_adapters_that_changed_while_it_slept_find_no_cached_prefix(
    base: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    with lora_llm(base[0]) as llm:
        for seed, tags in enumerate((["adapters"], ["weights", "adapters"], None)):
            merged = write_adapter(folder, base[1], seed=seed)
            llm.wake_up()
            (output,) = llm.generate([PROMPT], GREEDY, lora_request=request(folder))
            assert output.num_cached_tokens == 0
            check_tokens_equal(merged, PROMPT, output.outputs[0].token_ids)
            llm.sleep(level=2, tags=tags)


def test_weights_that_changed_while_it_slept_find_no_cached_prefix(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    with small_llm(tmp_path) as llm:
        llm.generate([PROMPT], GREEDY)
        llm.sleep(tags=["weights"])
        model = write_checkpoint(tmp_path, "llama", seed=5)
        llm.wake_up()
        check(llm, [model], [None])


def test_an_adapter_that_is_gone_when_the_engine_is_built_again(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that the start loaded and one that was loaded later; requests of a third, and of none, go on."""
    model = base[1]
    start, later, kept = (tmp_path / name for name in ("start", "later", "kept"))
    models = {folder.name: write_adapter(folder, model, seed=i) for i, folder in enumerate((start, later, kept))}
    settings = {"max_loras": 3, "lora_modules": [f"start={start}", f"kept={kept}"]}
    with lora_llm(base[0], on_engine_failure="restart", **settings) as llm:
        core = llm.client
        core.control(LoadAdapter("later", str(later)))
        shutil.rmtree(start)
        shutil.rmtree(later)
        pid = core.facts.pid
        os.kill(pid, signal.SIGSTOP)  # it serves none of these
        requests = {
            name: core.add_request(PROMPT, GREEDY, frozenset(), adapter=name) for name in ("", "start", "later", "kept")
        }
        os.kill(pid, signal.SIGKILL)
        while any(request.finish_reason is None for request in requests.values()):
            core.step()
        assert core.facts.pid != pid
        for folder in (start, later):
            lost = f"adapter {folder.name!r} is lost: the engine was built again, and could not load it: "
            assert isinstance(error := requests[folder.name].error, EngineError)
            assert str(error).startswith(f"{lost}adapter path {folder} does not exist")
            assert f"bring {folder} back, and load the adapter again" in caplog.text
            with pytest.raises(RequestError, match=rf"no adapter {folder.name!r} is loaded \(loaded are kept\)"):
                core.add_request(PROMPT, GREEDY, frozenset(), adapter=folder.name)
        for name, judge in (("", model), ("kept", models["kept"])):
            check_tokens_equal(judge, PROMPT, requests[name].output_token_ids)
        merged = write_adapter(start, model, seed=4)
        check(llm, [merged, model], [request(start), None])


def test_a_call_while_the_engine_is_built_again_takes_no_slot_of_a_repeated_one(
    base: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    merged = write_adapter(first, base[1])
    write_adapter(second, base[1], seed=1)
    with lora_llm(base[0], on_engine_failure="restart", max_loras=1) as llm:
        core = llm.client
        core.control(LoadAdapter("first", str(first)))
        with ThreadPoolExecutor(1) as pool:
            request = core.add_request(PROMPT, GREEDY, frozenset(), adapter="first")
            os.kill(core.facts.pid, signal.SIGKILL)
            called = pool.submit(load_as_soon_as_possible, core, LoadAdapter("second", str(second)))
            while request.finish_reason is None:
                core.step()
            with pytest.raises(CapacityError, match=r"adapter 'second' finds no slot: first fill all 1"):
                called.result()
        assert request.error is None
        check_tokens_equal(merged, PROMPT, request.output_token_ids)


def load_as_soon_as_possible(core: CoreClient, verb: LoadAdapter) -> None:
    """Have ``verb`` done by the first core that is there to take it."""
    while True:
        try:
            core.control(verb)
        except EngineDeadError:
            time.sleep(0.001)
        else:
            return
