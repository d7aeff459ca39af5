"""Replays compute the same as eager steps: plugins' kernels that no recorder sees, and faults in replays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.remote.remote_core import RemoteCore
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_cpu.arena import Arena, Block
from hardpoint_cpu.native import missing
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_cpu.recorded_list import RecordedList
from tests.out_of_tree.build import Dist, importable, install
from tests.parallel.ranks import ranks_in_threads
from tests.support import raw_kernels
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted, small_llm
from tests.support.recorder import RecordableAttention, RecordedCall, RecordedCalls, recordable

pytestmark = pytest.mark.skipif(missing() is not None, reason="no compiled kernels were built")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32"}
UNSEEN = "op.rms_norm=cpu_native"
_SLOTS = {"norm": "op.rms_norm", "Linear": "linear", "Experts": "experts", "Attention": "attention.causal"}

Plugin = Callable[[str], str]
"""Installs one kernel of raw_kernels.py, which comes before all others; returns it as --deny writes it."""


def contribution(kernel: str) -> tuple[str, str]:
    """A kernel's entry in a manifest, and what users type."""
    slot = next(slot for ending, slot in _SLOTS.items() if kernel.endswith(ending))
    family, _, of = slot.partition(".")
    name = f"raw_{kernel.lower()}"
    requires = '{ spec = ["float32/float32"] }' if family in ("linear", "experts") else '{ dtype = ["float32"] }'
    text = (
        f'[[contribution]]\nfamily = "{family}"\nname = "{name}"\ntarget = "hp_raw.kernels:{kernel}"\n'
        f"priority = 1000\nrequires = [{requires}]\n" + (f'of = "{of}"\n' if of else "")
    )
    return text, f"{slot}={name}"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    site.mkdir()
    wheels.mkdir()

    def put(kernel: str) -> str:
        entry, choice = contribution(kernel)
        source = Path(raw_kernels.__file__).read_text()
        manifest = f'schema = 1\napi = "0.2"\n[plugin]\nname = "raw"\n{entry}'
        files = {"__init__.py": "", "plugin.py": "", "kernels.py": source, "hardpoint.toml": manifest}
        dist = Dist("raw-hardpoint", {f"hp_raw/{n}": text for n, text in files.items()}, {"raw": "hp_raw.plugin"})
        install([dist], site, wheels)
        monkeypatch.setenv("PYTHONPATH", str(site))
        return choice

    with importable(site):
        yield put


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("dense")
    return folder, write_checkpoint(folder, "llama")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixture")
    changes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return folder, write_checkpoint(folder, "qwen3_moe", **changes)


def check(llm: LLM, model: PreTrainedModel) -> None:
    """Greedy tokens are the reference model's, and decodes were replayed."""
    prompts = random_prompts(3, 20, seed=4)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    found = counted(llm)
    assert found["graph_replays_total"] >= 10
    assert "unrecordable" not in found


def chosen(llm: LLM, choice: str) -> bool:
    """Whether anything is served by it."""
    return choice.partition("=")[2] in {row.chosen for row in llm.table.rows}


def graphs(llm: LLM) -> list[RecordedList]:
    assert isinstance(llm.core.executor, InProcessExecutor)
    kept = llm.core.executor.worker.graphs.kept
    return [graph for graph in kept if isinstance(graph, RecordedList)]


@pytest.mark.parametrize("kernel", ["rms_norm", "RawLinear", "RawExperts", "UncapturableExperts"])
def test_what_no_recorder_sees_is_called_again(
    kernel: str, dense: tuple[Path, PreTrainedModel], mixture: tuple[Path, PreTrainedModel], plugin: Plugin
) -> None:
    choice = plugin(kernel)
    folder, model = mixture if kernel.endswith("Experts") else dense
    with small_llm(folder, **SETTINGS) as llm:
        check(llm, model)
        assert chosen(llm, choice)
        assert graphs(llm)
        assert all(graph.num_opaque_calls for graph in graphs(llm))


def test_what_is_made_of_torchs_operators_is_recorded_one_by_one(
    dense: tuple[Path, PreTrainedModel], plugin: Plugin
) -> None:
    choice = plugin("traced_norm")
    with small_llm(dense[0], **SETTINGS) as llm:
        check(llm, dense[1])
        assert chosen(llm, choice)
        for graph in graphs(llm):
            assert graph.num_opaque_calls == 0
            assert graph.num_operators > 0


def test_what_an_earlier_engine_left_in_memory_hides_no_fault(
    dense: tuple[Path, PreTrainedModel], plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was refused leaves the right values of the very step that the next one is judged by."""
    choice, left = plugin("baking_norm"), list[torch.Tensor]()
    take = Arena._take

    def takes_what_was_left(arena: Arena, size: int) -> Block:
        is_new = not arena._segments
        block = take(arena, size)
        if is_new:
            segment = arena._segments[0]
            if left:
                segment.copy_(left[-1])
            left.append(segment)
        return block

    monkeypatch.setattr(Arena, "_take", takes_what_was_left)
    for _ in range(2):
        with small_llm(dense[0], **SETTINGS) as llm:
            assert not chosen(llm, choice)
        left[:] = [left[0].clone()]  # of the engine that was refused, as it was at its end


FAULTY = ["lying_norm", "baking_norm", "last_column_norm", "LyingLinear", "LastColumnLinear", "KeepingLinear"]


@pytest.mark.parametrize("kernel", [*FAULTY, "LyingExperts"])
def test_a_kernel_whose_replay_is_wrong_gives_way_to_the_next(
    kernel: str,
    dense: tuple[Path, PreTrainedModel],
    mixture: tuple[Path, PreTrainedModel],
    plugin: Plugin,
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice = plugin(kernel)
    folder, model = mixture if kernel.endswith("Experts") else dense
    with small_llm(folder, **SETTINGS) as llm:
        check(llm, model)
        assert not chosen(llm, choice)
        assert llm.config.deny == (choice,)
        assert [culprit.choice for culprit in llm.client.facts.denied] == [choice]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said.startswith(f"{choice} of plugin raw (replay of step (<decode steps of 1 request, greedy>,")
    assert f"start with --deny {choice}" in said


@pytest.mark.parametrize("kernel", ["FrozenAttention", "FrozenPagesAttention", "WidestAttention"])
def test_what_a_recording_keeps_of_its_first_lengths_shows_at_others(
    kernel: str, dense: tuple[Path, PreTrainedModel], plugin: Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are prepared with sequences of one token. A backend that bounds its loop by that one is found, and another
    serves; one that always takes the longest bound is left in peace."""
    choice = plugin(kernel)
    with small_llm(dense[0], **SETTINGS) as llm:
        check(llm, dense[1])
        assert chosen(llm, choice) == (kernel == "WidestAttention")
        assert llm.config.deny == (() if kernel == "WidestAttention" else (choice,))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    if kernel == "WidestAttention":
        assert not said
    else:
        (line,) = said
        assert line.startswith(f"{choice} of plugin raw (replay of step (<decode steps of 1 request, greedy>,")
        assert "where sequences are longer than those it was prepared with" in line


def test_a_fault_that_shows_later_is_worked_around(
    dense: tuple[Path, PreTrainedModel], plugin: Plugin, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are under way then: the kernel stays, and is called by each run from there on."""
    choice = plugin("many_rows_norm")
    with small_llm(dense[0], **SETTINGS) as llm:
        check(llm, dense[1])
        assert chosen(llm, choice)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith(
        f"{choice} of plugin raw does something else in a replay of step (<decode steps of 3 requests, greedy>,"
    )
    assert "steps run in pieces around it" in said


def test_a_core_in_another_process_finds_it_too(dense: tuple[Path, PreTrainedModel], plugin: Plugin) -> None:
    """Its front end knows what was denied, for whatever core comes next."""
    choice = plugin("lying_norm")
    with small_llm(dense[0], core_process=True, **SETTINGS) as llm:
        check(llm, dense[1])
        assert not chosen(llm, choice)
        assert isinstance(llm.client, RemoteCore)
        assert [culprit.choice for culprit in llm.client.recovery.denied] == [choice]


def test_ranks_find_it_together(
    dense: tuple[Path, PreTrainedModel], plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them deny the same kernel, and are started again."""
    choice = plugin("lying_norm")
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", RecordableAttention)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: RecordedCalls(None))
    monkeypatch.setattr(TorchDistributed, "capturable", True)
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(TorchDistributed, name, recordable(getattr(TorchDistributed, name)))
    # The recorder sees torch's operators alone.
    others: dict[str, Any] = {"linear_backend": "torch", "attention_backend": "reference", "deny": (UNSEEN,)}
    others["communicator"] = "torch_distributed"
    folder, model = dense
    with ranks_in_threads(folder, 2, custom_ops=["none", "+rms_norm"], **others, **SETTINGS) as llm:
        check(llm, model)
        assert not chosen(llm, choice)
        assert llm.config.deny == (UNSEEN, choice)


class FaultyEngine(RecordedCalls):
    """Replays that are wrong for no kernel's fault: what comes out is twice what it should be, or nothing is stored."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> RecordedCall:
        prepared = super().prepare(key, fn, inputs)
        if self._fault == "store":
            prepared._calls = [call for call in prepared._calls if "index_put" not in str(call[0])]
        else:
            floats = [x for x in prepared._results if x.is_floating_point()]
            prepared._calls += [(torch.Tensor.mul_, (x, 2), {}, x) for x in floats]
        return prepared


@pytest.mark.parametrize("fault", ["double", "store"])
def test_replays_that_are_wrong_for_no_known_reason_are_not_used(
    fault: str,
    dense: tuple[Path, PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hardpoint.reference.attention.ReferenceAttention", RecordableAttention)
    monkeypatch.setattr(CpuPlatform, "graph_engine", lambda platform: FaultyEngine(fault))
    folder, model = dense
    settings: dict[str, Any] = {"custom_ops": ["none"], "linear_backend": "torch", "attention_backend": "reference"}
    with small_llm(folder, **SETTINGS, **settings) as llm:
        prompts = random_prompts(3, 20, seed=4)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert counted(llm)["graph_replays_total"] == 0
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("decode steps of 3 requests are not captured: step (<decode steps of 3 requests, logits>,")
    assert "gives other results when it is replayed than when it is called, and no plugin's kernel can be named" in said
