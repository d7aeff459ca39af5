"""Requests with LoRA adapters get what Transformers' model gives with the adapter merged into its weights."""

from __future__ import annotations

import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hardpoint import LLM, LoRARequest, SamplingParams
from hardpoint.checkpoint.peft import LoRAFiles
from hardpoint.config import EngineConfig
from hardpoint.engine.control import LoadAdapter, UnloadAdapter
from hardpoint.engine.remote.remote_core import RemoteCore, ThreadLink
from hardpoint_plugin_api import CapacityError, CheckpointError, ConfigError, EngineError, RequestError
from tests.support.checkpoints import GATED_DELTA_MOE, check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import SMALL, counted, small_llm
from tests.support.lora import ATTENTION, FEED_FORWARD, write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
PAGE_BYTES = 2 * 16 * 2 * 16 * 4


@dataclass(frozen=True)
class Adapted:
    """A checkpoint, its adapters, and the models that judge: by adapter, "" for the checkpoint itself."""

    folder: Path
    adapters: dict[str, LoRARequest]
    models: dict[str, PreTrainedModel]

    def check(self, llm: LLM, names: list[str], prompts: list[list[int]]) -> None:
        """Run prompts with the adapters of these names in one batch."""
        requests = [self.adapters.get(name) for name in names]
        for name, prompt, output in zip(
            names, prompts, llm.generate(prompts, GREEDY, lora_request=requests), strict=True
        ):
            check_tokens_equal(self.models[name], prompt, output.outputs[0].token_ids)


def adapted(folder: Path, family: str = "llama", **changes: Any) -> Adapted:
    """A checkpoint with three adapters: of all linear layers, of attention alone, and with ranks of their own."""
    model = write_checkpoint(folder, family, **changes)
    kinds: dict[str, dict[str, Any]] = {
        "all": {"seed": 1},
        "attention": {"seed": 2, "targets": ATTENTION, "rank": 8, "use_rslora": True},
        "patterns": {
            "seed": 3,
            "targets": ("q_proj", "v_proj", "gate_proj", "down_proj"),
            "rank_pattern": {"q_proj": 2, "down_proj": 7},
            "alpha_pattern": {"v_proj": 3},
        },
    }
    models, adapters = {"": model}, {}
    for number, (name, options) in enumerate(kinds.items(), 1):
        models[name] = write_adapter(folder / name, model, **options)
        adapters[name] = LoRARequest(name, number, str(folder / name))
    return Adapted(folder, adapters, models)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(tmp_path_factory.mktemp("llama"))


def lora_llm(folder: Path, **settings: Any) -> LLM:
    """A small engine that serves three adapters."""
    return small_llm(folder, **(LORA | settings))


def mixed(count: int) -> list[str]:
    """Adapters of so many prompts, each kind among them."""
    return [("", "all", "attention", "patterns")[i % 4] for i in range(count)]


WAYS: dict[str, dict[str, Any]] = {
    "replayed": {},
    "eager": {"enforce_eager": True},
    "ahead": {"async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 8, "async_scheduling": True},
    "tight": {"kv_cache_memory": 3 * 8 * PAGE_BYTES, "max_model_len": 64},
    "without prefixes": {"enable_prefix_caching": False},
    "drafts": {"speculative_method": "ngram", "prompt_lookup_min": 1, "async_scheduling": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running_equals_merged_weights(llama: Adapted, way: str) -> None:
    prompts = random_prompts(8, 40, seed=5)
    prompts[4:] = [prompt * 2 for prompt in prompts[:4]] if way == "drafts" else prompts[4:]
    with lora_llm(llama.folder, **WAYS[way]) as llm:
        llama.check(llm, mixed(8), prompts)
        llama.check(llm, [""] * 3, prompts[:3])
        llama.check(llm, ["patterns"] * 3, prompts[:3])
        steps = counted(llm)
        assert (llm.stats.num_preemptions > 0) == (way == "tight")
    if way in ("replayed", "ahead"):
        assert steps["graph_replays_total"] > steps["prefill"] > 0
        assert "unrecordable" not in steps


@pytest.mark.parametrize(("family", "changes"), [("qwen2", {}), ("olmo3", {"sliding_window": 13})])
def test_layers_of_other_families(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """With biases; with norms of results, and of heads together."""
    other = adapted(tmp_path, family, **changes)
    with lora_llm(tmp_path) as llm:
        other.check(llm, mixed(4), random_prompts(4, 30, seed=6))


def test_each_layer_alone(tmp_path: Path, llama: Adapted) -> None:
    prompts = random_prompts(9, 30, seed=7, shortest=20)
    models, requests = [], []
    for number, targets in enumerate([ATTENTION, FEED_FORWARD, *((x,) for x in (*ATTENTION, *FEED_FORWARD))], 1):
        folder = tmp_path / str(number)
        models.append(write_adapter(folder, llama.models[""], targets=targets, size=3.0))
        requests.append(LoRARequest(str(number), number, str(folder)))
    with lora_llm(llama.folder, enforce_eager=True, max_loras=9) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=requests)
    for model, prompt, output in zip(models, prompts, outputs, strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


def test_the_same_prompt_with_another_adapter_finds_no_cached_prefix(llama: Adapted) -> None:
    (prompt,) = random_prompts(1, 80, seed=8, shortest=70)
    with lora_llm(llama.folder) as llm:

        def cached(name: str) -> int:
            (output,) = llm.generate([prompt], GREEDY, lora_request=[llama.adapters.get(name)])
            check_tokens_equal(llama.models[name], prompt, output.outputs[0].token_ids)
            return output.num_cached_tokens

        assert [cached(name) for name in ("", "all", "attention")] == [0, 0, 0]
        assert [cached(name) for name in ("", "all", "attention")] == [64, 64, 64]
        llm.control(UnloadAdapter("all"))
        assert cached("all") == 0, "another load may be of other weights"


def test_quantized_base_weights_take_adapters(llama: Adapted) -> None:
    """The error of a quantized model's own weights stays with the adapter: the merged one has other roundings."""
    (prompt,) = random_prompts(1, 40, seed=9, shortest=30)
    scores = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with lora_llm(llama.folder, quantization="int8") as llm, small_llm(llama.folder) as exact:

        def row(engine: LLM, request: LoRARequest | None) -> torch.Tensor:
            (output,) = engine.generate([prompt], scores, lora_request=request)
            assert output.prompt_logprobs is not None
            pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            return torch.tensor([position[token].logprob for token, position in pairs if position is not None])

        plain, with_adapter = row(llm, None), row(llm, llama.adapters["all"])
        with torch.inference_mode():
            logits = llama.models["all"](torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        lost = float((plain - row(exact, None)).abs().max())
        assert float((with_adapter - wanted).abs().max()) < 2 * lost
        assert float((with_adapter - plain).abs().max()) > 10 * lost


def test_slots_are_given_again(llama: Adapted) -> None:
    (prompt,) = random_prompts(1, 30, seed=10)
    with lora_llm(llama.folder, max_loras=1) as llm:
        for name in ("all", "attention", "all"):
            llama.check(llm, [name], [prompt])
            with pytest.raises(
                CapacityError, match=rf"'other' finds no slot: {name} fill all 1; unload one.*--max-loras"
            ):
                llm.control(LoadAdapter("other", llama.adapters["all"].lora_path))
            assert llm.control(UnloadAdapter(name)) == ()
        with pytest.raises(RequestError, match="no adapter 'all' is loaded"):
            llm.control(UnloadAdapter("all"))


def test_an_adapter_in_use_stays(llama: Adapted) -> None:
    (prompt,) = random_prompts(1, 30, seed=11)
    with lora_llm(llama.folder) as llm:
        stream = llm.stream(prompt, GREEDY, llama.adapters["all"])
        next(stream)
        with pytest.raises(EngineError, match="'all' serves 1 requests; unload it when they have ended"):
            llm.control(UnloadAdapter("all"))
        *_, last = stream
        check_tokens_equal(llama.models["all"], prompt, last.outputs[0].token_ids)
        llm.control(UnloadAdapter("all"))


def test_a_name_is_of_one_adapter(llama: Adapted) -> None:
    with lora_llm(llama.folder) as llm:
        llm.control(LoadAdapter("mine", llama.adapters["all"].lora_path))
        with pytest.raises(EngineError, match=r"adapter 'mine' is loaded already, from .*all; unload it first"):
            llm.control(LoadAdapter("mine", llama.adapters["attention"].lora_path))


def test_adapters_that_are_loaded_at_the_start(llama: Adapted) -> None:
    (prompt,) = random_prompts(1, 30, seed=12)
    modules = [f"{name}={request.lora_path}" for name, request in llama.adapters.items()]
    with lora_llm(llama.folder, lora_modules=modules) as llm:
        assert [adapter.name for adapter in llm.client.facts.adapters] == ["all", "attention", "patterns"]
        llama.check(llm, ["attention"], [prompt])


def test_adapters_are_read_again_after_sleep(llama: Adapted) -> None:
    prompts = random_prompts(4, 30, seed=13)
    with lora_llm(llama.folder) as llm:
        llama.check(llm, mixed(4), prompts)
        held = llm.memory_report().by_tag["adapters"]
        linears = 3 * (64 * 2 + 2 * 2 * 32 + 64 * 2 + 3 * (64 + 96) + 3 * 64)  # inputs and outputs of all parts
        assert held >= 3 * 8 * 4 * linears // 2
        llm.sleep(level=2)
        assert llm.memory_report().by_tag["adapters"] == 0
        with pytest.raises(EngineError, match="sleeps"):
            llm.control(LoadAdapter("more", llama.adapters["all"].lora_path))
        llm.wake_up()
        assert llm.memory_report().by_tag["adapters"] == held
        llama.check(llm, mixed(4), prompts)


def test_an_engine_without_adapters_says_so(llama: Adapted) -> None:
    with small_llm(llama.folder) as llm, pytest.raises(ConfigError, match=r"serves no LoRA adapters.*--enable-lora"):
        llm.generate([[1, 2]], GREEDY, lora_request=llama.adapters["all"])
    with pytest.raises(ConfigError, match=r"max_loras.*add --enable-lora"):
        small_llm(llama.folder, max_loras=2)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("a=x", "b=y"), "lora_modules = 'a=x,b=y': 2 adapters do not fit max_loras = 1"),
        ("a", "takes NAME=PATH,NAME=PATH, each name once; got 'a'"),
        ("a=", "takes NAME=PATH,NAME=PATH, each name once; got 'a='"),
        ("a=x,a=y", "takes NAME=PATH,NAME=PATH, each name once; got 'a=x'"),
    ],
)
def test_adapters_to_load_at_the_start_are_names_and_paths(modules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(model="demo", enable_lora=True, lora_modules=modules)


def test_requests_go_on_while_an_adapter_is_downloaded(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def download(kind: str, repo: str, *others: object) -> Path:
        assert (kind, repo) == ("adapter", "someone/all")
        asked.set()
        assert answered.wait(60)
        return Path(llama.adapters["all"].lora_path)

    monkeypatch.setattr("hardpoint.checkpoint.source._download", download)
    prompts = random_prompts(2, 30, seed=17)
    remote = LoRARequest("all", 1, "someone/all")
    with lora_llm(llama.folder) as llm, ThreadPoolExecutor(1) as threads:
        loading = threads.submit(llm.control, LoadAdapter("all", remote.lora_path))
        try:
            assert asked.wait(60)
            llama.check(llm, ["", "attention"], prompts)
        finally:
            answered.set()
        (adapter, _) = sorted(loading.result(60), key=lambda adapter: adapter.name)
        assert (adapter.path, adapter.folder) == (remote.lora_path, llama.adapters["all"].lora_path)
        monkeypatch.setattr("hardpoint.checkpoint.source._download", None)  # what is loaded is not looked up again
        (output,) = llm.generate([prompts[0]], GREEDY, lora_request=remote)
        check_tokens_equal(llama.models["all"], prompts[0], output.outputs[0].token_ids)
        llm.sleep(level=2)
        llm.wake_up()
        (output,) = llm.generate([prompts[0]], GREEDY, lora_request=remote)
        check_tokens_equal(llama.models["all"], prompts[0], output.outputs[0].token_ids)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 9}, r"the adapter has rank 9 .*slots hold 8; start with --max-lora-rank 9"),
    "dora": ({"use_dora": True}, "'use_dora' is True"),
    "bias": ({"bias": "lora_only"}, "'bias' is 'lora_only'"),
    "saved": ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is"),
    "kind": ({"peft_type": "IA3"}, "'peft_type' is 'IA3'"),
    "alpha": ({"lora_alpha": "x", "targets": ()}, "'lora_alpha' must be a finite number, got 'x'"),
    "endless alpha": ({"lora_alpha": math.inf, "targets": ()}, "'lora_alpha' must be a finite number, got inf"),
    "no alpha": ({"lora_alpha": math.nan, "targets": ()}, "'lora_alpha' must be a finite number, got nan"),
    "alpha beyond floats": ({"lora_alpha": 10**400, "targets": ()}, "'lora_alpha' must be a finite number, got 1000"),
    "pattern": ({"alpha_pattern": {"q_proj": math.inf}}, "'alpha_pattern.q_proj' must be a finite number, got inf"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' is 'pissa_niter_4'"),
    "olora": ({"init_lora_weights": "olora"}, "'init_lora_weights' is 'olora'"),
    "unknown": (
        {
            "tensors": {
                "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
            }
        },
        "takes tensor '.*layers.9.self_attn.q_proj.lora_A.weight': the model has no such module",
    ),
    "head": (
        {
            "tensors": {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(288, 4),
            }
        },
        "lm_head.lora_A.weight': the layer at head.linear takes no adapters",
    ),
    "other kind": ({"tensors": {f"{Q}.lora_magnitude_vector": torch.zeros(64)}}, "lora_magnitude_vector' is no LoRA"),
    "half": ({"tensors": {f"{Q}.lora_B.weight": None}}, "q_proj.lora_A.weight' without the other"),
    "shape": (
        {"tensors": {f"{Q}.lora_A.weight": torch.zeros(4, 63)}},
        r"q_proj.lora_A.weight' has shape \[4, 63\], expected \[4, 64\]",
    ),
    "rank of a tensor": (
        {"tensors": {f"{Q}.lora_B.weight": torch.zeros(64, 5)}},
        r"q_proj.lora_B.weight' has shape \[64, 5\], expected \[64, 4\]",
    ),
    "integers": (
        {"tensors": {f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}},
        "is int8; expected float32",
    ),
    "not finite": ({"tensors": {f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)}}, "not finite in float32"),
}


def test_bad_adapters_change_nothing(tmp_path: Path, llama: Adapted) -> None:
    prompts = random_prompts(2, 30, seed=14)
    with lora_llm(llama.folder, max_loras=2) as llm:
        for name, (options, message) in BAD.items():
            write_adapter(tmp_path / name, llama.models[""], **options)
            with pytest.raises(CheckpointError, match=message):
                llm.control(LoadAdapter(name, str(tmp_path / name)))
        (tmp_path / "dora" / "adapter_config.json").unlink()
        with pytest.raises(CheckpointError, match=r"holds no adapter_config.json"):
            llm.control(LoadAdapter("x", str(tmp_path / "dora")))
        (tmp_path / "shape" / "adapter_model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"neither adapter_model.safetensors"):
            llm.control(LoadAdapter("x", str(tmp_path / "shape")))
        with pytest.raises(CheckpointError, match=r"adapter path .* does not exist"):
            llm.control(LoadAdapter("x", str(tmp_path / "nowhere")))
        llama.check(llm, ["all", "attention"], prompts)


def test_experts_take_no_adapters(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3_moe")
    expert = "base_model.model.model.layers.0.mlp.experts.1.gate_proj"
    tensors = {f"{expert}.lora_A.weight": torch.zeros(4, 64), f"{expert}.lora_B.weight": torch.zeros(32, 4)}
    write_adapter(tmp_path / "experts", model, targets=(), tensors=tensors)
    merged = write_adapter(tmp_path / "attention", model, targets=ATTENTION)
    (prompt,) = random_prompts(1, 30, seed=15)
    with lora_llm(tmp_path) as llm:
        with pytest.raises(
            CheckpointError, match=r"experts.1.gate_proj.lora_A.weight': the layer at .* takes no adapters"
        ):
            llm.control(LoadAdapter("experts", str(tmp_path / "experts")))
        request = LoRARequest("attention", 1, str(tmp_path / "attention"))
        (output,) = llm.generate([prompt], GREEDY, lora_request=request)
        check_tokens_equal(merged, prompt, output.outputs[0].token_ids)


def test_a_core_in_a_thread_lets_requests_in_by_its_adapters(llama: Adapted) -> None:
    (prompt,) = random_prompts(1, 30, seed=16)
    core = RemoteCore(ThreadLink, EngineConfig.create(model=str(llama.folder), **(SMALL | LORA)))
    try:
        core.wait_until_ready()
        with pytest.raises(RequestError, match=r"no adapter 'all' is loaded \(none is loaded\)"):
            core.add_request(prompt, GREEDY, frozenset(), adapter="all")
        core.control(LoadAdapter("all", llama.adapters["all"].lora_path))
        request = core.add_request(prompt, GREEDY, frozenset(), adapter="all")
        while request.finish_reason is None:
            core.step()
        check_tokens_equal(llama.models["all"], prompt, request.output_token_ids)
        core.control(UnloadAdapter("all"))
        with pytest.raises(RequestError, match="no adapter 'all'"):
            core.add_request(prompt, GREEDY, frozenset(), adapter="all")
    finally:
        core.close()


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "lora.md", "exec"), {})
    with_adapter, without = capsys.readouterr().out.strip().splitlines()
    assert with_adapter != without


@pytest.mark.parametrize("how", [None, True, False, "gaussian", "eva", "orthogonal"])
def test_beginnings_that_leave_the_base_weights_alone(how: str | bool | None, tmp_path: Path, llama: Adapted) -> None:
    write_adapter(tmp_path, llama.models[""], init_lora_weights=how)
    assert LoRAFiles.open(tmp_path).modules


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_projections_that_are_stored_by_turns(tmp_path: Path, ranks: int) -> None:
    """Qwen3-Next stores rows of q, k, v and z key head by key head: B's rows go the same way."""
    model = write_checkpoint(tmp_path, "qwen3_next", **GATED_DELTA_MOE)
    targets = ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION)
    merged = write_adapter(tmp_path / "adapter", model, targets=targets, seed=4)
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    settings = LORA if ranks == 1 else LORA | {"tensor_parallel_size": ranks}
    with small_llm(tmp_path, kv_cache_memory="64MiB", **settings) as llm:
        for prompt in random_prompts(2, 20, seed=7):
            (output,) = llm.generate([prompt], GREEDY, lora_request=request)
            check_tokens_equal(merged, prompt, output.outputs[0].token_ids)
