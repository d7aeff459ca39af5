"""Replicas that share experts replay captured graphs, all of one size, and make the tokens of one process.

Steps are recorded as torch's operators, collectives among them, so that a replay of another size than the other
replicas' would hang or mix tokens up.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.engine.control import ReadMetrics, Sleep, WakeUp
from hardpoint.engine.remote.replicas import Replicas
from hardpoint.reference.grouped_experts import GroupedMatmul
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_plugin_api import AttentionBatch, AttentionMetadata, BuildContext, ExpertsWorkload
from tests.parallel.ranks import sharing_replicas
from tests.parallel.test_shared_experts import MIXTURE, add, check, finish
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.recorder import RecordableAnyAttention, RecordableAttention, RecordedCalls, recordable

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PENALISED = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = random_prompts(5, 40, seed=2)
SETTINGS: dict[str, Any] = {
    "custom_ops": ["none"],
    "linear_backend": "torch",
    "attention_backend": "reference",
    "communicator": "torch_distributed",
    "all2all_backend": "allgather_reducescatter",
    "experts_backend": "grouped",
    "max_model_len": 96,
    "max_num_seqs": 8,
}
"""All of it torch's operators, which the recorder sees."""


class RecordableExperts(GroupedMatmul):
    """On the host torch's grouped_mm is one operator for every dtype, whatever it does within."""

    def __init__(self, ctx: BuildContext, workload: ExpertsWorkload) -> None:
        super().__init__(ctx, workload)
        self.capturable = True


class AnyLengthAttention(RecordableAttention):
    """Its decodes look at the longest sequence's pages, so that one graph serves sequences of every length."""

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        if batch.graph_key is None:
            return AttentionMetadata(batch)
        return AttentionMetadata(batch, SETTINGS["max_model_len"] // self.spec.block_size)


class AnyShapeAttention(AnyLengthAttention, RecordableAnyAttention):
    """The same for steps with prompts."""


class Recording(RecordedCalls):
    """Few sizes, so that most steps are padded."""

    def __init__(self, token_sizes: tuple[int, ...] = ()) -> None:
        super().__init__((1, 4, 8), max_graphs=None)
        self.token_sizes = token_sizes


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a platform whose graphs hold collectives."""
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", AnyLengthAttention)
    monkeypatch.setattr("hardpoint.reference.grouped_experts.GroupedMatmul", RecordableExperts)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: Recording())
    monkeypatch.setattr(TorchDistributed, "capturable", True)
    monkeypatch.setattr("hardpoint.layers.moe._MANY_TOKENS", 16)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(TorchDistributed, name, recordable(getattr(TorchDistributed, name)))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, write_checkpoint(folder, "qwen3_moe", **MIXTURE)


def counted(core: Replicas) -> list[Counter[str]]:
    """Of each replica: its steps, on every pipeline stage, by how they ran."""
    found = []
    for each in core._cores:
        samples = [sample for family in each.control(ReadMetrics()).families for sample in family.samples]
        own = Counter[str]()
        for sample in samples:
            if sample.name in ("hardpoint_eager_steps_total", "hardpoint_graph_replays_total"):
                own[sample.labels.get("reason", "replays")] += int(sample.value)
        found.append(own)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.nightly),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.nightly),
        pytest.param({"enable_eplb": True, "eplb_step_interval": 4, "eplb_window_size": 3}, marks=pytest.mark.nightly),
        pytest.param({"async_scheduling": True, "data_parallel_size": 4}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_decode_steps_are_replayed_on_all_replicas(
    settings: dict[str, Any], mixture: tuple[Path, PreTrainedModel]
) -> None:
    """Other numbers of requests on each replica, and none on one of them; some need logits behind the graph."""
    folder, model = mixture
    replicas, stages = settings.get("data_parallel_size", 2), settings.get("pipeline_parallel_size", 1)
    with sharing_replicas(folder, replicas, **(SETTINGS | settings)) as core:
        alone = add(core, PROMPTS[0], GREEDY, data_parallel_rank=1)
        finish(core, alone)
        check(model, [alone], PROMPTS[:1])
        idle, busy, *_ = counted(core)
        assert busy == {"prefill": stages, "replays": 11 * stages}
        assert idle == {"unlike_replicas": stages, "replays": 11 * stages}, "of empty steps"
        requests = [
            add(core, prompt, PENALISED if n == 3 else GREEDY, data_parallel_rank=int(n == 4))
            for n, prompt in enumerate(PROMPTS)
        ]
        finish(core, *requests)
        check(model, requests, PROMPTS)
        assert all(own["replays"] >= 20 * stages for own in counted(core))


@pytest.fixture
def capturing_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts are captured, too."""
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", AnyShapeAttention)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: Recording((16, 48)))


@pytest.mark.usefixtures("capturing_prompts")
def test_a_prompt_beside_another_replicas_decodes(mixture: tuple[Path, PreTrainedModel]) -> None:
    """The decodes are padded to its size. Steps with prompt log-probabilities have no graph, and run eagerly so."""
    folder, model = mixture
    with sharing_replicas(folder, **SETTINGS) as core:
        decoding = add(core, PROMPTS[0], GREEDY, data_parallel_rank=0)
        core.step()
        reading = add(core, PROMPTS[1], GREEDY, data_parallel_rank=1)
        scored = add(core, PROMPTS[2], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1))
        finish(core, decoding, reading, scored)
        check(model, [decoding, reading, scored], PROMPTS[:3])
        assert len(scored.prompt_logprobs) == len(PROMPTS[2])
        for own in counted(core):
            assert own["unlike_replicas"] == 0
            assert own["replays"] >= 12


def test_graphs_are_captured_again_when_all_wake_up(mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, model = mixture
    with sharing_replicas(folder, **SETTINGS) as core:
        core.control(Sleep(("kv", "weights")))
        core.control(WakeUp(("kv", "weights")))
        request = add(core, PROMPTS[0], GREEDY, data_parallel_rank=0)
        finish(core, request)
        check(model, [request], PROMPTS[:1])
        assert [own["replays"] for own in counted(core)] == [11, 11]
