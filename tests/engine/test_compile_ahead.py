"""Kernels are compiled before the first step needs them, and few graphs are compared where kernels are proven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hardpoint.context import Context
from hardpoint.engine.core import EngineCore
from hardpoint.engine.execution.compile_ahead import AheadCompiler
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.execution.graphs.graphs import Graphs
from hardpoint.engine.execution.graphs.replay_check import ReplayCheck
from hardpoint.engine.execution.memory.step_memory import StepMemory
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_plugin_api import Platform
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm
from tests.support.recorder import RecordableAttention, RecordedCalls

SIZES = (8, 20, 22, 24)
RECORDABLE: dict[str, Any] = {
    "dtype": "float32",
    "custom_ops": ["none"],
    "linear_backend": "torch",
    "attention_backend": "reference",
    "max_num_seqs": 24,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", RecordableAttention)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: RecordedCalls(SIZES, None))
    write_checkpoint(tmp_path, "llama")
    return tmp_path


@pytest.mark.parametrize("is_cold", [True, False])
def test_every_captured_size_is_compiled_ahead_unless_the_largest_needs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_cold: bool
) -> None:
    compiled: list[list[int]] = []
    run_hidden: Callable[..., Any] = Forward.hidden

    def ahead(platform: CpuPlatform, run: Callable[[], None]) -> int:
        sizes: list[int] = []

        def hidden(forward: Forward, inputs: Any, *rest: Any) -> Any:
            sizes.append(inputs.shape[0])
            return run_hidden(forward, inputs, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(Forward, "hidden", hidden)
            run()
        compiled.append(sizes)
        return int(is_cold)

    monkeypatch.setattr(CpuPlatform, "compile_ahead", ahead)
    monkeypatch.setattr(RecordedCalls, "piece_sizes", (64,))
    small_llm(folder, **RECORDABLE).close()
    largest, *others = compiled
    assert set(largest) == {24, 64}
    beside_a_prompt = {64}
    assert [set(sizes) for sizes in others] == ([{8, 20, 22}, beside_a_prompt] if is_cold else [])


@pytest.mark.parametrize("num_compiled", [0, 3])
def test_a_run_that_left_nothing_out_is_not_repeated(num_compiled: int) -> None:
    """Its results count where every kernel was there."""
    platform = SimpleNamespace(compile_ahead=lambda run: run() or num_compiled)
    ctx = SimpleNamespace(kernel_calls=SimpleNamespace(third_party=()))
    runs: list[int] = []

    def run() -> int:
        runs.append(len(runs))
        return runs[-1]

    compiler = AheadCompiler(cast(Context, ctx), cast(Platform, platform))
    assert compiler.run(run) == len(runs) - 1
    assert len(runs) == (2 if num_compiled else 1)
    assert not compiler.has_met_all, "no whole step ran"
    compiler.run_step(run)
    assert compiler.has_met_all == (num_compiled == 0)


@pytest.mark.parametrize("num_compiled", [0, 1])
def test_captured_sizes_are_not_run_ahead_where_the_largest_steps_needed_no_compilation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_compiled: int
) -> None:
    ran: list[str] = []

    def ahead(platform: CpuPlatform, run: Callable[[], None]) -> int:
        run()
        return num_compiled

    budget: Callable[..., int] = StepMemory.cache_budget

    def cache_budget(memory: StepMemory, engine: Any) -> int:
        memory.compiler.run_step(lambda: ran.append("step"))
        return min(budget(memory, engine), 16 << 20)

    monkeypatch.setattr(CpuPlatform, "compile_ahead", ahead)
    monkeypatch.setattr(StepMemory, "cache_budget", cache_budget)
    monkeypatch.setattr(Graphs, "compile_ahead", lambda graphs, compiled: ran.append("captured sizes"))
    small_llm(folder, **RECORDABLE, kv_cache_memory=None).close()
    assert ran == (["step", "step", "captured sizes"] if num_compiled else ["step"])


def test_a_failure_ahead_of_time_is_left_to_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ahead(platform: CpuPlatform, run: Callable[[], None]) -> int:
        raise RuntimeError("the compiler is away")

    monkeypatch.setattr(CpuPlatform, "compile_ahead", ahead)
    caplog.set_level("INFO", "hardpoint")
    with small_llm(folder, **RECORDABLE) as llm:
        assert llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids
    assert "kernels are compiled one by one: RuntimeError: the compiler is away" in caplog.text


def test_of_proven_kernels_few_sizes_are_compared_with_eager_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest, and each from which another kernel serves."""
    compared: set[int] = set()
    prepare: Callable[..., Any] = ReplayCheck.prepare

    def noted(check: ReplayCheck, wanted: Any) -> Any:
        compared.add(wanted.key[0].requests)
        return prepare(check, wanted)

    monkeypatch.setattr(ReplayCheck, "prepare", noted)
    with small_llm(folder, wait_for_graphs=True, **RECORDABLE) as llm:
        assert isinstance(llm.client, EngineCore)
        entries = [entry for plan in llm.client.blueprint.ctx.selector.plans for entry in plan.entries]
        least = {entry.range.min for entry in entries if entry.range.phase != "prefill"}
    begins = {next((size for size in SIZES if size >= tokens), SIZES[-1]) for tokens in least}
    assert compared == {SIZES[-1], *begins}
    assert 22 not in compared
