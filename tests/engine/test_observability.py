"""Metrics of an engine and its plugins, its profiles, and all of that from another process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_plugin_api import ConfigError, EngineError, StepLimits
from tests.out_of_tree.build import Dist, importable, install
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm
from tests.support.traces import trace_events

GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = random_prompts(4, 60, seed=1, shortest=40)

METER = Dist(
    "meter-hardpoint",
    {
        "hp_meter/__init__.py": "",
        "hp_meter/plugin.py": "",
        "hp_meter/mlp.py": "from hardpoint.layers.mlp import MLP\n"
        "class MeteredMLP(MLP):\n"
        "    capturable = False\n"  # a replay would count nothing
        "    def __init__(self, ctx, args):\n"
        "        super().__init__(ctx, args)\n"
        "        self.range = ctx.range\n"
        "        self.rows = ctx.metrics.counter('rows', 'Rows.', ['path']).labels(ctx.path)\n"
        "    def forward(self, x, step):\n"
        "        self.rows.inc(x.shape[0])\n"
        "        with self.range('metered'):\n"
        "            return super().forward(x, step)\n",
        "hp_meter/hardpoint.toml": 'schema = 1\napi = "0.2"\n[plugin]\nname = "meter"\n[[contribution]]\n'
        'family = "layer"\nof = "mlp"\nname = "metered"\ntarget = "hp_meter.mlp:MeteredMLP"\npriority = 1\n',
    },
    {"meter": "hp_meter.plugin"},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "qwen3")


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[None]:
    """A plugin whose layer counts its rows and marks its ranges, really installed."""
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    wheels.mkdir()
    install([METER], site, wheels)
    with importable(site):
        yield


def test_the_engine_counts_what_it_does(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    with small_llm(checkpoint[0], kv_cache_memory=13 * page_bytes, max_model_len=96) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        stopping = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=list(range(258)))
        outputs += [llm.generate(PROMPTS[0], stopping, use_tqdm=False)[0] for _ in range(2)]
        found = llm.metrics
        held = llm.memory_report()
        stats = llm.stats
    assert found.value("hardpoint_generated_tokens_total") == 4 * 9 + 2
    assert found.value("hardpoint_finished_requests_total", reason="length") == 4
    assert found.value("hardpoint_finished_requests_total", reason="stop") == 2
    assert found.value("hardpoint_steps_total") == found.value("hardpoint_step_seconds_count") == stats.num_steps > 9
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert found.value("hardpoint_preemptions_total") == preemptions > 0
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[-1] == (len(PROMPTS[0]) - 1) // 16 * 16
    assert found.value("hardpoint_cached_tokens_total") == sum(cached), "not what the preempted found of their own"
    computed = [found.value("hardpoint_computed_tokens_total", step=step) for step in ("prefill", "decode")]
    assert sum(computed) >= sum(map(len, PROMPTS)) + 4 * 8
    assert found.value("hardpoint_running_requests") == found.value("hardpoint_waiting_requests") == 0
    assert found.value("hardpoint_cache_pages") == found.value("hardpoint_free_cache_pages") == 12
    assert found.value("hardpoint_memory_bytes", tag="kv") == held.by_tag["kv"] == 13 * page_bytes
    assert found.value("hardpoint_padding_tokens_total") == 0


def test_padding_is_reported(checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "step_limits", lambda self: StepLimits(token_buckets=(4, 64)))
    with small_llm(checkpoint[0]) as llm:
        llm.generate([[1] * 50], GREEDY)
        assert llm.metrics.value("hardpoint_padding_tokens_total") == 14 + 8 * 3


@pytest.mark.usefixtures("meter")
def test_a_plugin_counts_and_marks_in_two_engines(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with small_llm(checkpoint[0]) as llm, small_llm(checkpoint[0]) as twin:
        twin.start_profile(tmp_path / "profiles" / "twin", layers=True)
        twin.generate([[1] * 20], GREEDY)
        llm.generate([[1] * 7, [2] * 8], GREEDY, use_tqdm=False)
        twin.stop_profile()
        twin.generate([[1] * 20], SamplingParams(temperature=0, max_tokens=1))
        for engine, rows in ((llm, 7 + 8 + 2 * 8), (twin, 20 + 8 + 20 - 16)):
            for layer in range(3):
                path = f"stack.blocks.{layer}.feed_forward"
                assert engine.metrics.value("hardpoint_meter_rows_total", path=path) == rows
    marked = Counter(event["name"] for event in trace_events(tmp_path / "profiles" / "twin") if event.get("ph") == "X")
    for name in ("step", "plan", "model", "sample", "collect"):
        assert marked[f"hardpoint.{name}"] == 9, "the steps of this engine, while its profile was taken"
    assert marked["meter.metered"] == 3 * 9
    assert marked["layer.stack.blocks.1.feed_forward"] == marked["layer.norm"] == 9
    assert any(name.startswith("aten::") for name in marked)


def test_profiles_that_cannot_be(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    llm = small_llm(checkpoint[0])
    with pytest.raises(EngineError, match="no profile is being taken; start one first"):
        llm.stop_profile()
    with pytest.raises(ConfigError, match="file: File exists"):
        llm.start_profile(tmp_path / "file")
    llm.start_profile(tmp_path / "one")
    with pytest.raises(EngineError, match=r"taken already, into .*one; stop it first"):
        llm.start_profile(tmp_path / "two")
    llm.close()
    assert trace_events(tmp_path / "one"), "closing the engine ends its profile"


def test_nothing_is_marked_while_no_profile_is_taken(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CpuPlatform, name: str) -> None:
        raise AssertionError("a range was marked")

    monkeypatch.setattr(CpuPlatform, "range", fail)
    with small_llm(checkpoint[0]) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        assert not any(module._forward_hooks for module in llm.core.blueprint.model.modules())


def test_an_engine_in_another_process(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, model = checkpoint
    other = write_checkpoint(tmp_path / "other", "qwen3", seed=9)

    def check(llm: LLM, model: PreTrainedModel) -> None:
        check_tokens_equal(model, PROMPTS[0], llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids)

    with small_llm(folder, core_process=True) as llm:
        llm.start_profile(tmp_path / "profile")
        check(llm, model)
        llm.stop_profile()
        assert "hardpoint.step" in {event["name"] for event in trace_events(tmp_path / "profile")}
        assert llm.metrics.value("hardpoint_generated_tokens_total") == 9
        held = llm.memory_report().by_tag
        llm.sleep(level=2)
        assert llm.memory_report().by_tag["kv"] == 0 < held["kv"]
        with pytest.raises(EngineError, match="the engine sleeps, without its kv, resources, weights"):
            llm.generate(PROMPTS[0])
        llm.wake_up()
        assert llm.memory_report().by_tag == held | {"graphs": 0}, "they are prepared when they are needed"
        check(llm, model)
        llm.update_weights(tmp_path / "other")
        check(llm, other)
        with pytest.raises(ConfigError, match="save them to a folder"):
            llm.update_weights([])
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=300, ignore_eos=True))
        next(stream)
        with pytest.raises(EngineError, match="requests are under way"):
            llm.sleep()
        stream.close()  # type: ignore[attr-defined]  # it is a generator
