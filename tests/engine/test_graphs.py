"""Decode steps replayed from prepared graphs: the tokens stay, and what runs how is decided and counted."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.execution.graphs.shapes import ShapeRow, StepShape, shape_rows
from hardpoint.engine.scheduling.step import ScheduledRequest, StepInput
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_cpu.native import missing
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_cpu.recorded_list import RecordedList
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionMetadata,
    CaptureGrade,
    ConfigError,
    GraphEngine,
    PlatformError,
    StepLimits,
)
from tests.parallel.ranks import ranks_in_threads
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted, small_llm
from tests.support.graph_contract import RecordingContract
from tests.support.recorder import RecordableAnyAttention, RecordableAttention, RecordedCalls, recordable

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WINDOWS: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
PAGE_BYTES = 2 * 16 * 2 * 16 * 4
"""Keys and values of 16 tokens in one layer: 2 heads of 16 float32."""
# The recorder sees torch's operators alone.
RECORDABLE: dict[str, Any] = {"custom_ops": ["none"], "linear_backend": "torch", "attention_backend": "reference"}


class TestRecordedCalls(RecordingContract):
    """The recorder of these tests keeps to the contract, too."""

    sees_waits = False

    @pytest.fixture
    def graphs(self) -> GraphEngine:
        return RecordedCalls()

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "qwen3-windows"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_checkpoint(folder, "qwen3", **(WINDOWS if request.param == "qwen3-windows" else {}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, write_checkpoint(folder, "llama")


@pytest.fixture(autouse=True)
def recordable_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", RecordableAttention)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
    """The CPU's graph engine from here on."""
    engine = RecordedCalls()
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: engine)
    return engine


def engine(folder: Path, **settings: Any) -> LLM:
    return small_llm(folder, **(RECORDABLE | settings))


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def shape_and_token(key: Hashable) -> tuple[StepShape, Hashable]:
    """The shape that a graph is captured for."""
    assert isinstance(key, tuple)
    shape, token = key
    assert isinstance(shape, StepShape)
    return shape, token


@pytest.mark.parametrize(
    ("sizes", "ahead"),
    [
        (None, True),
        ((1, 2, 4, 8), False),
        pytest.param(None, False, marks=pytest.mark.nightly),
        pytest.param((1, 2, 4, 8), True, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_tokens_stay(
    checkpoint: tuple[Path, PreTrainedModel], recording: RecordedCalls, sizes: tuple[int, ...] | None, ahead: bool
) -> None:
    """Requests of unlike lengths end one after the other, so that batches shrink; a small pool preempts some."""
    folder, model = checkpoint
    recording.batch_sizes = sizes
    prompts = random_prompts(7, 50, seed=3)
    with engine(
        folder, async_scheduling=ahead, max_model_len=96, kv_cache_memory=30 * PAGE_BYTES, max_num_seqs=8
    ) as llm:
        for _ in range(2):  # the second time most of each prompt is in the cache
            for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
                check_tokens_equal(model, prompt, drawn)
        assert llm.stats.num_preemptions
        found = counted(llm)
        assert found["graph_replays_total"] > 50
        assert found["graph_replays_total"] + found["prefill"] == llm.stats.num_steps
        if sizes is None:
            assert found["padding_tokens_total"] == 0
        else:
            assert found["padding_tokens_total"] > 0


def test_what_is_drawn_at_random_or_penalised_is_as_without_graphs(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls
) -> None:
    recording.batch_sizes = (4, 8)
    several = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.4, logprobs=3),
        SamplingParams(temperature=0.7, top_k=9, seed=7, max_tokens=20, ignore_eos=True),
    ]
    prompts = random_prompts(3, 30, seed=1)
    drawn = []
    for eager in (True, False):
        with engine(plain[0], enforce_eager=eager) as llm:
            drawn.append([o.outputs[0].token_ids for o in llm.generate(prompts, several, use_tqdm=False)])
            assert bool(counted(llm)["graph_replays_total"]) is not eager
    assert drawn[0] == drawn[1]


def test_penalties_and_log_probabilities_prepare_no_step_of_their_own(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls
) -> None:
    recording.batch_sizes = (4,)
    scored = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.4, logprobs=3)
    prompts = random_prompts(3, 30, seed=1)
    with engine(plain[0], enforce_eager=True) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, scored, use_tqdm=False)]
    with engine(plain[0]) as llm:
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, scored, use_tqdm=False)]
        assert counted(llm)["graph_replays_total"] == 11
    assert found == expected
    assert {shape.end for shape, _ in map(shape_and_token, recording.keys)} == {"greedy"}


def test_listed_sizes_are_prepared_ahead_and_padded_to(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls, caplog: pytest.LogCaptureFixture
) -> None:
    recording.batch_sizes, recording.max_graphs = (2, 4, 32, 64), None
    with caplog.at_level(logging.INFO, "hardpoint"), engine(plain[0], max_num_seqs=3, wait_for_graphs=True) as llm:
        # A draw by core's own sampling is not recorded: it asks for a value. Its logits are those of the greedy graph.
        shapes = [(size, "greedy") for size in (4, 2)]
        found = [(shape.requests, shape.end) for shape, _ in map(shape_and_token, recording.keys)]
        assert found == shapes, "nothing larger than what holds all requests"
        assert "preparing decode steps of 4 requests (1 of 2)" in caplog.text
        generate(llm, random_prompts(3, 8, seed=2))
        longer = [(StepShape("full", 4, 4, 1, "greedy"), (2,))]
        assert recording.keys[2:] == longer, "longer sequences ask for another"
        counts = counted(llm)
        # Of three requests, of which one is padding, that are at the same length all the time.
        assert (counts["graph_replays_total"], counts["prefill"], counts["padding_tokens_total"]) == (23, 1, 23)


def test_a_size_that_the_user_lists_and_no_step_has_stops_the_start(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls
) -> None:
    recording.batch_sizes, recording.asked_sizes = (2, 4, 64), {"batch_sizes": "acme.sizes"}
    with pytest.raises(ConfigError, match=r"acme\.sizes: no step has the sizes 64.*the nearest are 3"):
        engine(plain[0], max_num_seqs=3)


def test_steps_larger_than_every_size_are_eager(plain: tuple[Path, PreTrainedModel], recording: RecordedCalls) -> None:
    recording.batch_sizes = (1, 2)
    folder, model = plain
    prompts = random_prompts(3, 8, seed=2)
    with engine(folder) as llm:
        for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
            check_tokens_equal(model, prompt, drawn)
        assert counted(llm)["too_large"] == 23


def test_the_least_recently_used_is_dropped(plain: tuple[Path, PreTrainedModel], recording: RecordedCalls) -> None:
    recording.max_graphs = 2
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with engine(plain[0]) as llm:
        for count in (1, 2, 1, 3, 1, 2):
            generate(llm, [[5, 6]] * count, short)
        assert [shape_and_token(key)[0].requests for key in recording.keys] == [1, 2, 3, 2]
        assert counted(llm)["graphs_kept"] == 2


def test_what_cannot_be_prepared_runs_eagerly(
    plain: tuple[Path, PreTrainedModel],
    recording: RecordedCalls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise PlatformError("it waits for the device")

    monkeypatch.setattr(recording, "prepare", refuse)
    folder, model = plain
    prompts = random_prompts(2, 30, seed=2)
    with engine(folder) as llm:
        for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
            check_tokens_equal(model, prompt, drawn)
        found = counted(llm)
        assert (found["unrecordable"], found["graph_replays_total"]) == (23, 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["decode steps of 2 requests are not captured: it waits for the device"]


def test_a_backend_that_cannot_be_captured(
    plain: tuple[Path, PreTrainedModel],
    recording: RecordedCalls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(RecordableAttention, "capture", CaptureGrade.NEVER)
    with caplog.at_level(logging.INFO, "hardpoint"), engine(plain[0]) as llm:
        generate(llm, [[1, 2, 3]])
        assert counted(llm)["not_capturable"] == llm.stats.num_steps
    assert "steps run eagerly: attention backend RecordableAttention cannot be captured" in caplog.text
    assert not recording.keys


@pytest.mark.parametrize(("settings", "reason"), [({"enforce_eager": True}, "enforce_eager"), ({}, "no_graph_engine")])
def test_engines_without_graphs(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls, settings: dict[str, Any], reason: str
) -> None:
    if not settings:
        recording.max_graphs = 0
    with engine(plain[0], **settings) as llm:
        generate(llm, [[1, 2, 3]])
        assert counted(llm)[reason] == llm.stats.num_steps


@pytest.mark.parametrize("sizes", [None, (2, 4)], ids=str)
def test_other_addresses_other_recordings(
    plain: tuple[Path, PreTrainedModel],
    recording: RecordedCalls,
    tmp_path: Path,
    sizes: tuple[int, ...] | None,
) -> None:
    """After sleep the cache and the weights lie elsewhere, after an update the weights are others."""
    recording.batch_sizes = sizes
    folder, model = plain
    other = write_checkpoint(tmp_path, "llama", seed=9)
    prompts = random_prompts(2, 30, seed=2)

    def check(llm: LLM, model: PreTrainedModel) -> None:
        for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
            check_tokens_equal(model, prompt, drawn)

    with engine(folder) as llm:
        check(llm, model)
        assert llm.memory_report().by_tag["graphs"]
        for level in (1, 2):
            llm.sleep(level)
            assert llm.memory_report().by_tag["graphs"] == 0
            assert counted(llm)["graphs_kept"] == 0
            llm.wake_up()
            check(llm, model)
        llm.update_weights(tmp_path)
        check(llm, other)
        assert counted(llm)["graph_replays_total"] == 4 * 23


def test_ranks_replay_together(plain: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has graphs of its own; were one to run something else, its collectives would meet the wrong ones."""
    engines: list[RecordedCalls] = []

    def graph_engine(platform: CpuPlatform) -> RecordedCalls:
        engines.append(RecordedCalls((2, 4)))
        return engines[-1]

    monkeypatch.setattr(CpuPlatform, "graph_engine", graph_engine)
    monkeypatch.setattr(TorchDistributed, "capturable", True)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(TorchDistributed, name, recordable(getattr(TorchDistributed, name)))
    folder, model = plain
    prompts = random_prompts(3, 30, seed=2)
    gloo = {"communicator": "torch_distributed"}
    with ranks_in_threads(folder, 2, wait_for_graphs=True, **gloo, **RECORDABLE) as llm:
        for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
            check_tokens_equal(model, prompt, drawn)
        assert counted(llm)["graph_replays_total"] == 23
    first, second = (graphs.keys for graphs in engines if graphs.keys)
    assert first == second
    assert len(first) == 4


def test_communicators_that_cannot_be_captured(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls, caplog: pytest.LogCaptureFixture
) -> None:
    recording.collectives_allowed = False
    with caplog.at_level(logging.INFO, "hardpoint"), ranks_in_threads(plain[0], 2, **RECORDABLE) as llm:
        generate(llm, [[1, 2, 3]])
        assert counted(llm)["not_capturable"] == llm.stats.num_steps
    assert "allows no collectives between ranks; communicator cpu_shared_memory cannot be captured" in caplog.text


def test_the_cache_leaves_room_for_graphs(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.batch_sizes, recording.bytes_per_graph = (1, 2, 4), PAGE_BYTES
    monkeypatch.setattr(CpuPlatform, "kv_cache_budget", lambda platform: 3 * 20 * PAGE_BYTES)
    for eager, pages in ((True, 20), (False, 18)):
        with engine(plain[0], kv_cache_memory=None, enforce_eager=eager) as llm:
            assert llm.core.executor.facts.num_pages == pages, (
                "three sizes, greedy and at random, take as much as two pages"
            )


@pytest.mark.parametrize(
    ("changes", "quantization"),
    [({}, None), ({"tie_word_embeddings": True}, None), (WINDOWS, None), ({}, "int8")],
    ids=["plain", "tied", "windows", "int8"],
)
def test_a_dense_decode_step_is_nothing_but_kernels(
    tmp_path: Path, changes: dict[str, Any], quantization: str | None
) -> None:
    """From ids to logits every layer calls ops and kernels, so that a plugin which has them all records one list."""
    if missing() is not None:
        pytest.skip("no compiled kernels were built")
    write_checkpoint(tmp_path, "qwen3", **changes)
    with small_llm(tmp_path, quantization=quantization) as llm:
        generate(llm, random_prompts(3, 20, seed=4))
        assert isinstance(llm.core.executor, InProcessExecutor)
        graphs = llm.core.executor.worker.graphs
        kept, reported = graphs.kept, llm.memory_report().by_tag["graphs"]
        assert reported == graphs.nbytes > sum(x.nbytes for x in kept if isinstance(x, RecordedList)) > 0
    assert kept
    for graph in kept:
        assert isinstance(graph, RecordedList)
        assert (graph.num_lists, graph.num_operators) == (1, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_code_records_the_kernels_that_our_own_code_records(tmp_path: Path, family: str) -> None:
    """Its decode step is one list, too, which leaves no operator to Python and no second wake of the threads."""
    if missing() is not None:
        pytest.skip("no compiled kernels were built")
    write_checkpoint(tmp_path, family)
    found: list[list[tuple[int, int, int]]] = []
    for impl in ("auto", "transformers"):
        with small_llm(tmp_path, model_impl=impl) as llm:
            generate(llm, random_prompts(3, 20, seed=4))
            assert isinstance(llm.core.executor, InProcessExecutor)
            graphs = [each for each in llm.core.executor.worker.graphs.kept if isinstance(each, RecordedList)]
            found.append([(each.num_lists, each.num_operators, each.num_kernels) for each in graphs])
    own, by_transformers = found
    assert own == by_transformers
    assert own
    assert {numbers[:2] for numbers in own} == {(1, 0)}


def test_sizes_that_contradict_the_engines_own_limit(
    plain: tuple[Path, PreTrainedModel], recording: RecordedCalls
) -> None:
    recording.batch_sizes = (1, 2, 4)
    recording.max_graphs = 5
    with pytest.raises(PlatformError, match=r"keeps 5 graphs asks for 3 sizes, .*: \(1, 2, 4\)"), engine(plain[0]):
        pass


class TestPrompts:
    """Steps with prompts, too, where the engine lists numbers of tokens and attention can."""

    @pytest.fixture
    def any_shape(self, recording: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
        monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", RecordableAnyAttention)
        recording.token_sizes, recording.max_graphs = (8, 48, 64), None
        return recording

    @pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.nightly), True])
    def test_the_tokens_stay(
        self, checkpoint: tuple[Path, PreTrainedModel], any_shape: RecordedCalls, ahead: bool
    ) -> None:
        """Prompts come in chunks, beside decodes, and some begin in the cache."""
        folder, model = checkpoint
        prompts = random_prompts(6, 60, seed=3)
        with engine(
            folder, async_scheduling=ahead, max_num_batched_tokens=48, max_num_seqs=4, wait_for_graphs=True
        ) as llm:
            for _ in range(2):
                for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
                    check_tokens_equal(model, prompt, drawn)
            found = counted(llm)
            assert found["graph_replays_total"] == llm.stats.num_steps
            assert "prefill" not in found
        shapes = [shape for shape, _ in map(shape_and_token, any_shape.keys) if shape.queries is None]
        assert [shape.tokens for shape in shapes] == [48, 8], "no more than a step's tokens"

    def test_larger_steps_and_scored_prompts_are_eager(
        self, plain: tuple[Path, PreTrainedModel], any_shape: RecordedCalls
    ) -> None:
        with engine(plain[0], enable_prefix_caching=False) as llm:
            generate(llm, random_prompts(1, 65, seed=1, shortest=65))
            assert counted(llm)["prefill"] == 1
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
            generate(llm, [[5, 6, 7]], params)
            assert counted(llm)["prefill"] == 2

    def test_no_size_is_larger_than_what_all_requests_can_have(
        self, plain: tuple[Path, PreTrainedModel], any_shape: RecordedCalls
    ) -> None:
        """A step is captured on requests as long as they may be, which hold all its tokens."""
        folder, model = plain
        prompts = random_prompts(1, 30, seed=4, shortest=30)
        with engine(folder, max_num_seqs=1, max_model_len=32, wait_for_graphs=True) as llm:
            shapes = [shape for shape, _ in map(shape_and_token, any_shape.keys) if shape.queries is None]
            assert [shape.tokens for shape in shapes] == [32, 8]
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            check_tokens_equal(model, prompts[0], generate(llm, prompts, params)[0])
            assert "prefill" not in counted(llm)

    def test_more_requests_than_a_step_holds_are_eager(
        self, plain: tuple[Path, PreTrainedModel], any_shape: RecordedCalls
    ) -> None:
        any_shape.requests_per_token_size = 2
        folder, model = plain
        prompts = random_prompts(3, 6, seed=4, shortest=4)
        with engine(folder) as llm:
            for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
                check_tokens_equal(model, prompt, drawn)
            assert counted(llm)["prefill"] == 1

    def test_attention_that_needs_the_host_takes_no_part(
        self, plain: tuple[Path, PreTrainedModel], recording: RecordedCalls
    ) -> None:
        recording.token_sizes = (8, 64)
        with engine(plain[0]) as llm:
            generate(llm, [[5, 6, 7]])
            assert counted(llm)["prefill"] == 1


class EveryShapeAttention(RecordableAnyAttention):
    """Steps of equally many queries for each request, too, are read as those of any shape."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        planned = super().plan(batch)
        if batch.graph_key is not None and batch.num_tokens > batch.num_requests:
            return AttentionMetadata(replace(batch, any_shape=True), planned.token)
        return planned


class TestRows:
    """Shapes are data: what a row lists is found, captured ahead and replayed."""

    @pytest.fixture
    def pairs(self, recording: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
        """Steps of two tokens for each request, all of which draw, padded to four requests."""

        def with_pairs(engine: GraphEngine, limits: StepLimits, num_drafts: int) -> tuple[ShapeRow, ...]:
            return (ShapeRow("full", (4,), ("logits",), queries=2), *shape_rows(engine, limits, num_drafts))

        monkeypatch.setattr("hardpoint.engine.execution.graphs.graphs.shape_rows", with_pairs)
        return recording

    def test_another_kind_of_step_is_another_row(
        self, plain: tuple[Path, PreTrainedModel], pairs: RecordedCalls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", EveryShapeAttention)
        folder, model = plain
        prompts = random_prompts(3, 2, seed=6, shortest=2)
        with engine(folder) as llm:
            assert pairs.keys == [(StepShape("full", 8, 4, 2, "logits"), (1,))]
            for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
                check_tokens_equal(model, prompt, drawn)
            found = counted(llm)
            assert (found["graph_replays_total"], found["padding_tokens_total"]) == (24, 2)
            assert "prefill" not in found

    def test_attention_must_have_the_rows_grade(
        self, plain: tuple[Path, PreTrainedModel], pairs: RecordedCalls
    ) -> None:
        with engine(plain[0]) as llm:
            assert not pairs.keys
            generate(llm, random_prompts(3, 2, seed=6, shortest=2))
            assert counted(llm)["prefill"] == 1

    def test_a_size_that_is_refused_is_passed_over(
        self,
        plain: tuple[Path, PreTrainedModel],
        recording: RecordedCalls,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        prepare = recording.prepare

        def refuse(key: Hashable, *arguments: Any) -> Any:
            if shape_and_token(key)[0].requests == 2:
                raise PlatformError("it waits for the device")
            return prepare(key, *arguments)

        monkeypatch.setattr(recording, "prepare", refuse)
        recording.batch_sizes, recording.max_graphs = (2, 4), None
        folder, model = plain
        prompts = random_prompts(2, 30, seed=2)
        with engine(folder, wait_for_graphs=True) as llm:
            for prompt, drawn in zip(prompts, generate(llm, prompts), strict=True):
                check_tokens_equal(model, prompt, drawn)
            found = counted(llm)
            assert (found["graph_replays_total"], found["padding_tokens_total"]) == (23, 46)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert warnings == ["decode steps of 2 requests are not captured: it waits for the device"]

    def test_finding_a_shape_changes_nothing(
        self, plain: tuple[Path, PreTrainedModel], recording: RecordedCalls
    ) -> None:
        recording.batch_sizes = (2, 4)
        with engine(plain[0]) as llm:
            assert isinstance(llm.core.executor, InProcessExecutor)
            graphs, before, prepared = llm.core.executor.worker.graphs, counted(llm), len(recording.keys)
            for count, shape in ((3, (4, 4, 1)), (5, (5, None, None))):
                shares = tuple(ScheduledRequest(slot, 40, 1, ((),), samples=True) for slot in range(count))
                found = {graphs.find(StepInput(0, (), (), shares), hidden=False) for _ in range(2)}
                assert [shape.layout for shape in found] == [shape]
            assert (counted(llm), len(recording.keys)) == (before, prepared)

    def test_rows_of_an_engine(self) -> None:
        graphs = RecordedCalls((1, 3, 8, 64), max_graphs=None)
        graphs.token_sizes, graphs.piece_sizes = (64, 16, 512), (512, 32, 2048)
        decodes, mixed, pieces = shape_rows(graphs, StepLimits(max_tokens=512, max_requests=6))
        assert (decodes.sizes, decodes.grade) == ((1, 3, 8), CaptureGrade.SINGLE_TOKEN)
        assert (mixed.sizes, mixed.requests, mixed.grade) == ((16, 64, 512), 6, CaptureGrade.ANY)
        assert (pieces.sizes, pieces.requests, pieces.grade) == ((32, 512), None, CaptureGrade.NEVER)
        assert [row.num_ahead for row in (decodes, mixed, pieces)] == [6, 3, 2]
        assert [decodes.sizes_for(count) for count in (2, 8, 9)] == [(3, 8), (8,), ()]

    def test_buckets_pad_decodes_and_leave_no_other_sizes(self) -> None:
        graphs = RecordedCalls((1, 3), max_graphs=None)
        graphs.token_sizes = graphs.piece_sizes = (16,)
        limits = StepLimits(max_tokens=16, max_requests=6, token_buckets=(4, 8, 16))
        assert [row.sizes for row in shape_rows(graphs, limits)] == [(4,), (), ()]
        graphs.batch_sizes = None
        row = shape_rows(graphs, limits)[0]
        assert (row.sizes, row.num_ahead, row.sizes_for(3)) == ((4, 8), 0, (4,))

    @pytest.mark.parametrize(
        ("name", "sizes", "buckets", "said"),
        [
            ("batch_sizes", (4, 8, 64), (), "sizes 64: steps have at most 6 requests; the nearest are 6"),
            ("token_sizes", (16, 64, 512), (), "sizes 64, 512: steps have at most 32 tokens; the nearest are 32"),
            ("piece_sizes", (33,), (), "sizes 33: steps have at most 32 tokens; the nearest are 32"),
            ("batch_sizes", (3, 4), (2, 4, 32), "sizes 3: steps are padded to 2, 4, 32 tokens; the nearest are 2, 4"),
            ("token_sizes", (16,), (4, 32), "sizes 16: steps are padded to 4, 32 tokens; set it to none"),
        ],
        ids=str,
    )
    def test_sizes_that_the_user_lists_are_never_padded_or_left_out(
        self, name: str, sizes: tuple[int, ...], buckets: tuple[int, ...], said: str
    ) -> None:
        graphs, limits = RecordedCalls(max_graphs=None), StepLimits(32, 6, token_buckets=buckets)
        setattr(graphs, name, sizes)
        assert shape_rows(graphs, limits), "sizes of the platform's own are"
        graphs.asked_sizes = {name: "acme.sizes"}
        with pytest.raises(ConfigError, match=f"^acme.sizes: no step has the {said}$"):
            shape_rows(graphs, limits)
        setattr(graphs, name, ())
        graphs.batch_sizes = (2, 4)
        assert shape_rows(graphs, limits)

    @pytest.mark.parametrize("name", ["batch_sizes", "token_sizes", "piece_sizes"])
    def test_sizes_that_are_none(self, name: str) -> None:
        graphs = RecordedCalls((1,), max_graphs=None)
        setattr(graphs, name, (0, 4))
        with pytest.raises(PlatformError, match=rf"{name} must be positive numbers, got \(0, 4\)"):
            shape_rows(graphs, StepLimits(max_tokens=16, max_requests=6))
