"""Recorded lists against the contract of graph engines, and beyond it up to a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.scheduling.paged_cache import Prefix
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    CapturedGraph,
    ForwardStep,
    GraphEngine,
    PlatformError,
)
from hardpoint_sim import instruments
from hardpoint_sim.graphs import RecordedLists
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import small_llm
from tests.support.graph_contract import RecordingContract


@pytest.fixture
def device() -> torch.device:
    return torch.device("sim", 1)


@pytest.fixture
def graphs(device: torch.device) -> GraphEngine:
    return RecordedLists(device.index)


class TestRecordedLists(RecordingContract):
    """The contract."""


def test_a_replay_is_one_launch_and_allocates_nothing(graphs: GraphEngine, device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)
    prepared = graphs.prepare("deep", lambda x: torch.linalg.vector_norm(torch.softmax(x @ x, -1) * 3), {"x": x})
    before = instruments.num_operations(), instruments.num_allocations(1)
    with instruments.waits_forbidden():
        prepared.run()
    assert (instruments.num_operations(), instruments.num_allocations(1)) == (before[0] + 1, before[1])


def test_results_hold_nothing_before_the_first_run(graphs: GraphEngine, device: torch.device) -> None:
    results = []
    graphs.prepare("square", lambda x: results.append(x * x), {"x": torch.ones(3, device=device)})
    assert results[0].isnan().all()


def test_a_recording_is_memory_of_graphs_and_frees_it(graphs: GraphEngine, device: torch.device) -> None:
    x = torch.ones(1024, device=device)
    prepared = graphs.prepare("chain", lambda x: (x + 1) * 2, {"x": x})
    assert instruments.bytes_by_tag(1)["graphs"] == 2 * 4096
    del prepared
    assert "graphs" not in instruments.bytes_by_tag(1)


def test_pinned_memory_is_read_when_the_list_runs(graphs: GraphEngine, device: torch.device) -> None:
    pinned, x, back = torch.zeros(4).pin_memory(), torch.zeros(4, device=device), torch.zeros(4).pin_memory()

    def step(x: torch.Tensor) -> None:
        x.copy_(pinned, non_blocking=True)
        back.copy_(x * 2, non_blocking=True)

    prepared = graphs.prepare("staged", step, {"x": x})
    pinned.fill_(3.0)
    prepared.run()
    torch.accelerator.synchronize(device)
    assert back.tolist() == [6.0] * 4


@pytest.mark.parametrize("update", [{"x": torch.ones(3)}, {"y": 1}, {"scale": "much"}, {"unused": 5}], ids=str)
def test_what_cannot_be_rebound(graphs: GraphEngine, device: torch.device, update: dict[str, object]) -> None:
    inputs = {"x": torch.ones(3, device=device), "scale": 2.0, "unused": 1}
    prepared = graphs.prepare("scaled", lambda x, scale, unused: x * scale, inputs)
    with pytest.raises(PlatformError, match=r"fixed buffer|no input|must be a number|reaches no operator"):
        prepared.run(update)
    assert prepared.run({"unused": 1}).tolist() == [2.0] * 3


def test_numbers_that_shape_the_step_are_refused(graphs: GraphEngine, device: torch.device) -> None:
    x = torch.ones(8, device=device)
    with pytest.raises(PlatformError, match=r"'sliced'.* follows from a host parameter \(n\)"):
        graphs.prepare("sliced", lambda x, n: x[:n] + 1, {"x": x, "n": 3})
    with pytest.raises(PlatformError, match="n decide which operators run"):
        graphs.prepare("branching", lambda x, n: x + 1 if n == 3 else x * 2 + 1, {"x": x, "n": 3})
    with pytest.raises(PlatformError, match="follows from a host parameter"):
        graphs.prepare("computed", lambda x, n: x * (n * n), {"x": x, "n": 3})


def test_a_model_decodes_from_recorded_lists(tmp_path: Path, device: torch.device) -> None:
    """The whole forward pass, prepared once per compatibility token of its attention, gives Transformers' logits."""
    reference = write_checkpoint(tmp_path, "qwen3")
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(reference, tokens)
    with small_llm(tmp_path, device_index=device.index) as llm:
        core = llm.core
        assert isinstance(core.executor, InProcessExecutor)
        runner, model = core.executor._runner, core.blueprint.model
        assert runner is not None
        graphs = core.blueprint.platform.graph_engine()
        backend = core.blueprint.ctx.cache_users.users[0].planner
        assert isinstance(backend, AttentionBackend)
        cache = core.scheduler.cache
        grown = cache.grow(cache.start(Prefix()), 0, len(tokens))
        assert grown is not None
        ((*pages,),) = grown.pages
        long = {"ids": torch.zeros(8, dtype=torch.int64, device=device)}
        long["positions"] = torch.zeros(8, dtype=torch.int64, device=device)
        starts, length = (torch.zeros(n, dtype=torch.int32, device=device) for n in (2, 1))
        table, slots = (torch.zeros(*shape, dtype=torch.int32, device=device) for shape in ((1, len(pages)), (8,)))
        starts[1:].fill_(1)
        table.copy_(torch.tensor([pages]))
        prepared: dict[object, CapturedGraph] = {}
        for position, token in enumerate(tokens):
            long["ids"][:1].fill_(token)
            long["positions"][:1].fill_(position)
            length.fill_(position + 1)
            slots[:1].fill_(pages[position // 16] * 16 + position % 16)
            batch = AttentionBatch(starts, length, table[:, : position // 16 + 1], slots, (0, 1), (position + 1,), 1)
            metadata = backend.plan(batch)

            def step(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                forward = ForwardStep(positions, positions, runner._forward.caches, [metadata] * 3)  # noqa: B023  # it runs in prepare
                return model.logits(model.hidden(ids, forward)[:1])

            with torch.inference_mode():
                if metadata.token not in prepared:
                    prepared[metadata.token] = graphs.prepare(metadata.token, step, long)
                logits = prepared[metadata.token].run()
            assert (logits.cpu() - expected[position]).abs().max() < 1e-4, f"position {position}"
        assert len(prepared) == 3, "one for each number of pages, rounded up"


@pytest.mark.parametrize("sizes", [None, (1, 8, 20, 400)], ids=str)
def test_an_engine_decodes_from_recorded_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] | None
) -> None:
    """Sizes are those of the platform's steps; 16 requests need two of them, and each some recordings by length."""
    monkeypatch.setattr(RecordedLists, "batch_sizes", sizes)
    model = write_checkpoint(tmp_path, "qwen3")
    prompts = random_prompts(16, 100, seed=1)
    params = [SamplingParams(temperature=0, max_tokens=8 + 3 * i, ignore_eos=True) for i in range(16)]
    with small_llm(tmp_path, wait_for_graphs=True) as llm:
        prepared = llm.metrics.value("hardpoint_graphs_kept")
        assert prepared == (0 if sizes is None else 2), "two sizes, greedy"
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        replays = llm.metrics.value("hardpoint_graph_replays_total")
        eager = llm.metrics.value("hardpoint_eager_steps_total", reason="prefill")
        assert replays + eager == llm.stats.num_steps
        assert replays > 40
        assert llm.metrics.value("hardpoint_graphs_kept") <= 16
        assert llm.memory_report().by_tag["graphs"] > 0
