"""The all-to-all over peer memory in an engine, and under the conformance kit: ranks in threads, on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.conformance.families.all2all import All2AllTrials
from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Site, Subject
from hardpoint.engine.requests import RequestProgress
from hardpoint.plugin_host import discover
from hardpoint_cuda.peer_all2all import PeerAll2All
from hardpoint_cuda.platform import CudaPlatform, describe_arch
from hardpoint_plugin_api import All2AllWorkload, DeviceInfo
from tests.parallel.ranks import ranks_in_threads, sharing_replicas
from tests.support.checkpoints import check_tokens_equal, write_checkpoint
from tests.support.on_host_settings import WITHOUT_PEERS, without_triton
from tests.support.peer_threads import interpret_in_threads
from tests.support.two_gpus import two_gpus

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5], [6, 7, 8], [9, 3, 200, 17, 4, 4, 8, 1, 90]]


NIGHTLY = pytest.mark.nightly


@pytest.fixture
def h100s(monkeypatch: pytest.MonkeyPatch) -> DeviceInfo:
    """Eight, of which a test uses what it asks for."""
    if torch.accelerator.is_available():
        pytest.skip("kernels are compiled on this machine, and this test interprets them on the host")
    interpret_in_threads(monkeypatch)
    return two_gpus(monkeypatch, CudaPlatform, describe_arch("NVIDIA H100 80GB HBM3", (9, 0)), count=8)


def settings_of(all2all: str, **more: Any) -> dict[str, Any]:
    settings = without_triton("cuda", all2all_backend=all2all, **more)
    settings["deny"] += ("attention.causal=flashinfer", *WITHOUT_PEERS)
    return settings


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=NIGHTLY), pytest.param(8, marks=NIGHTLY)])
def test_an_engine(h100s: DeviceInfo, tmp_path: Path, ranks: int) -> None:
    """Ranks with whole experts: tokens are those of core's exchange."""
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
    sizes: dict[str, Any] = {"num_experts": 2 * ranks, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_checkpoint(tmp_path, "qwen3_moe", **heads | sizes)

    def run(all2all: str) -> tuple[list[Any], set[str]]:
        settings = settings_of(all2all, dtype="bfloat16")
        with ranks_in_threads(tmp_path, ranks, enable_expert_parallel=True, **settings) as llm:
            chosen = {row.chosen for row in llm.table.rows if row.family == "all2all"}
            return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)], chosen

    wanted, _ = run("all_to_all")
    found, chosen = run("cuda_peer_memory")
    assert chosen == {"cuda_peer_memory"}
    assert found == wanted


@pytest.mark.parametrize(
    ("replicas", "ranks"), [(2, 1), pytest.param(3, 1, marks=NIGHTLY), pytest.param(2, 2, marks=NIGHTLY)]
)
def test_replicas_of_unlike_numbers_of_tokens(h100s: DeviceInfo, tmp_path: Path, replicas: int, ranks: int) -> None:
    """One replica idle, then the other; then one with a decode and another with a prompt, which ends earlier."""
    sizes: dict[str, Any] = {"num_experts": 6 * ranks, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = write_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2, **sizes)
    settings = settings_of("cuda_peer_memory", dtype="float32", max_num_batched_tokens=16)
    with sharing_replicas(tmp_path, replicas, tensor_parallel_size=ranks, **settings) as core:
        assert {row.chosen for row in core.facts.table.rows if row.family == "all2all"} == {"cuda_peer_memory"}

        def add(prompt: list[int], replica: int, tokens: int) -> tuple[list[int], RequestProgress]:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            return prompt, core.add_request(prompt, params, frozenset(), data_parallel_rank=replica)

        for together in ([(1, 0, 2)], [(0, 1, 2)], [(0, 0, 6), (2, 1, 1)]):
            requests = [add(PROMPTS[number], replica, tokens) for number, replica, tokens in together]
            while any(request.finish_reason is None for _, request in requests):
                core.step()
            for prompt, request in requests:
                assert request.error is None
                check_tokens_equal(model, prompt, request.output_token_ids)


class Small(PeerAll2All):
    """With room for a few tokens of each rank: where nobody says what to expect, the kernels go through all of it."""

    def __init__(self, ctx: Any, workload: All2AllWorkload) -> None:
        super().__init__(replace(ctx, limits=replace(ctx.limits, max_tokens=7 * (workload.ranks or 1))), workload)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.nightly)], ids=["part", "whole"])
def test_the_kit_finds_nothing(h100s: DeviceInfo, every: int) -> None:
    """In steps of few tokens."""
    site = replace(Site.open(discover(), "cuda"), device=torch.device("cpu"))
    (offer,) = (one for one in site.plugins.offers("all2all") if one.contribution.name == "cuda_peer_memory")
    subject, compared = replace(Subject.load(offer, site), target=Small), 0
    trials = (trial for trial in All2AllTrials().trials(subject, Plan()) if "/many/" not in trial.case)
    for trial in islice(trials, 0, None, every):
        for check, finding in trial.run():
            assert not finding.faults, f"{trial.case}, {check}: {finding.faults[0]}"
            compared += check == "values" and finding.outcome == "passed"
    assert compared > 5


def test_replicas_have_as_many_tokens_each() -> None:
    """Of two replicas of two ranks, a rank has half of a replica's tokens."""
    resources = SimpleNamespace(declare=lambda key, nbytes, scope: None)
    parallel = SimpleNamespace(tp=SimpleNamespace(size=2), ep=SimpleNamespace(size=4))
    ctx: Any = SimpleNamespace(limits=SimpleNamespace(max_tokens=9), parallel=parallel, resources=resources)
    workload = All2AllWorkload(dtype="float32", parallel="ep", ranks=4, num_experts=8, top_k=3, hidden_size=24)
    assert PeerAll2All(ctx, workload).most_rows(1) == 4 * 5
