"""Damaged and unsuitable checkpoints: one clear error each, which names the input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hardpoint import LLM
from hardpoint.checkpoint.source import resolve_adapter, resolve_model, resolve_tokenizer
from hardpoint.config import EngineConfig
from hardpoint_plugin_api import CapacityError, CheckpointError, ConfigError, RequestError, UnknownNameError
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_path() -> None:
    with pytest.raises(CheckpointError, match=r"model path no/such/model does not exist"):
        LLM("no/such/model", platform="cpu")


def test_missing_tokenizer_path(good: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^tokenizer path /nope does not exist"):
        small_llm(good, tokenizer="/nope")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "no/such/model"}, "model path no/such/model does not exist"),
        ({"model": "good", "tokenizer": "/nope"}, "tokenizer path /nope does not exist"),
        ({"model": "unknown"}, "unknown model architecture 'NopeForCausalLM'"),
        ({"model": "mute"}, r"mute: tokenizer\.json is missing"),
    ],
)
def test_a_server_finds_them_before_it_opens_its_port(
    settings: dict[str, str], message: str, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("uvicorn")
    from hardpoint.server.run import serve
    from hardpoint.server.settings import ServerSettings

    for name in ("good", "unknown", "mute"):
        shutil.copytree(good, tmp_path / name)
    change_config(tmp_path / "unknown", architectures=["NopeForCausalLM"])
    (tmp_path / "mute" / "tokenizer.json").unlink()
    model = settings["model"] if "/" in settings["model"] else str(tmp_path / settings["model"])
    caplog.set_level("INFO", "hardpoint")
    with pytest.raises((CheckpointError, UnknownNameError), match=message):
        serve(EngineConfig.create(**settings | {"model": model}), ServerSettings(port=0))
    assert "listening" not in caplog.text


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "/" + "x" * 5000, "a\0b/c\0d"], ids=["home", "long", "NUL"])
@pytest.mark.parametrize("kind", ["model", "tokenizer", "adapter"])
def test_paths_that_no_system_takes(kind: str, path: str) -> None:
    by_kind: dict[str, Callable[[str], Path]] = {
        "model": resolve_model,
        "tokenizer": resolve_tokenizer,
        "adapter": resolve_adapter,
    }
    with pytest.raises(CheckpointError, match=rf"^{kind} .*(give .* hub id|Give a local folder)") as caught:
        by_kind[kind](path)
    assert kind != "adapter" or "Qwen" not in str(caught.value)


def test_an_adapter_may_be_named_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert resolve_adapter("demo") == Path("demo")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        small_llm(tmp_path)


def test_config_that_is_no_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{not json")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        small_llm(checkpoint)


def test_config_without_a_needed_key(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["hidden_size"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'hidden_size' is missing"):
        small_llm(checkpoint)


def test_unknown_architecture_lists_the_known(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["LlamaForCausalML"])
    with pytest.raises(UnknownNameError, match=r"'LlamaForCausalML'; did you mean 'LlamaForCausalLM'\? Known: .*Qwen3"):
        small_llm(checkpoint)


NAN, INF = float("nan"), float("inf")
ABOVE_ZERO = "must be a finite number above 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "'num_attention_heads' must be a multiple of 'num_key_value_heads', got 4 and 3"),
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "must be a multiple of .*, got 2 and 4"),
        *(({"rms_norm_eps": eps}, f"'rms_norm_eps' {ABOVE_ZERO}, got {eps}") for eps in (NAN, INF, 0, -1e-6)),
        *(({"rope_parameters": {"rope_theta": t}}, f"'rope_theta' {ABOVE_ZERO}, got {t}") for t in (NAN, 0, -10)),
        ({"rope_parameters": "x"}, "'rope_parameters' must be an object or null, got 'x'"),
        *(
            ({"dtype": name}, f"'dtype' must be one of float32, float16, bfloat16, float64, got {name!r}")
            for name in ("int8", "float8_e4m3fn", "bf16", 16, "")
        ),
        ({"dtype": None, "torch_dtype": "int8"}, "'torch_dtype' must be one of"),
        ({"quantization_config": "fp8"}, "'quantization_config' must be an object with a 'quant_method', got 'fp8'"),
        ({"quantization_config": []}, "'quantization_config' must be an object"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' must be an object with a 'quant_method'"),
    ],
)
def test_bad_values_of_the_config(checkpoint: Path, changes: dict[str, object], message: str) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(CheckpointError, match=rf"^{checkpoint}/config\.json: .*{message}"):
        small_llm(checkpoint)


def test_unknown_activation_names_the_folder(checkpoint: Path) -> None:
    change_config(checkpoint, hidden_act="sulu")
    with pytest.raises(UnknownNameError, match=rf"did you mean 'silu'.*It stands in {checkpoint}/config\.json"):
        small_llm(checkpoint)


@pytest.mark.parametrize("dtype", ["float64", "torch.float32", None])
def test_dtypes_that_are_accepted(checkpoint: Path, dtype: str | None) -> None:
    change_config(checkpoint, dtype=dtype)
    small_llm(checkpoint).close()


@pytest.mark.parametrize("window", [0, -1, "x", False])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_bad_sliding_window(tmp_path: Path, family: str, window: object) -> None:
    write_checkpoint(tmp_path, family)
    change_config(tmp_path, sliding_window=window, layer_types=["sliding_attention"] * 3)
    with pytest.raises(CheckpointError, match=r"config\.json: 'sliding_window' must be a positive whole number, got"):
        small_llm(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": 3}, "'layer_types' must name 3 layers"),
        ({"layer_types": [[], [], []]}, "'layer_types' must name 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_window' is missing"),
        ({"layer_types": None, "max_window_layers": "x"}, "'max_window_layers' must be a whole number, 0 or more"),
    ],
)
def test_bad_windows_of_layers(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_checkpoint(tmp_path, "qwen2")
    change_config(tmp_path, **({"sliding_window": None} | changes))
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        small_llm(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_a_copy_would_misread(checkpoint: Path, dtype: torch.dtype) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    change_weights(checkpoint, lambda w: w.update({name: torch.zeros(32, 64).to(dtype)}))
    stored = str(dtype).removeprefix("torch.")
    with pytest.raises(
        CheckpointError, match=rf"^{checkpoint}: tensor '{name}' is {stored}, .*need a quantization method"
    ):
        small_llm(checkpoint)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floating_dtypes_are_converted(checkpoint: Path, dtype: torch.dtype) -> None:
    change_weights(checkpoint, lambda w: w.update({name: tensor.to(dtype) for name, tensor in w.items()}))
    small_llm(checkpoint).close()


@pytest.mark.parametrize("shard", [3, None, "../model.safetensors", "a/../../model.safetensors", "ABSOLUTE"])
def test_shards_outside_the_folder_are_not_opened(checkpoint: Path, tmp_path: Path, shard: object) -> None:
    inner = checkpoint / "inner"
    inner.mkdir()
    (inner / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (inner / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    index = {"weight_map": {"lm_head.weight": str(checkpoint / "model.safetensors") if shard == "ABSOLUTE" else shard}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"index\.json: 'weight_map' must name a file inside the folder for tensor 'lm_head"
    ):
        small_llm(inner)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(checkpoint: Path, content: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: .*must "):
        small_llm(checkpoint)


def test_a_tensor_in_two_shards(checkpoint: Path) -> None:
    (checkpoint / "b.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "model.norm.weight": "b.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*' is in b\.safetensors too"):
        small_llm(checkpoint)


def test_no_tokenizer_files(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=rf"^{checkpoint}: tokenizer\.json is missing"):
        small_llm(checkpoint)


def test_truncated_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or truncated"):
        small_llm(checkpoint)


def test_file_that_is_no_safetensors(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged or truncated"):
        small_llm(checkpoint)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*only safetensors are read"):
        small_llm(checkpoint)


def test_missing_shard(checkpoint: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"shards are missing: model-00001-of-00002\.safetensors"):
        small_llm(checkpoint)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda w: w.__delitem__("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        small_llm(checkpoint)


def test_extra_tensor_is_named(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda w: w.update({"model.layers.0.adapter.weight": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"no place for: model\.layers\.0\.adapter\.weight"):
        small_llm(checkpoint)


def test_old_rotary_buffers_are_no_extra(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    small_llm(checkpoint).close()


def test_wrong_shape_shows_both(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda w: w.update({"model.layers.2.self_attn.k_proj.weight": torch.zeros(32, 65)}))
    with pytest.raises(
        CheckpointError, match=rf"^{checkpoint}: .*k_proj\.weight' has shape \[32, 65\], the model expects \[32, 64\]"
    ):
        small_llm(checkpoint)


def test_prompt_too_long(good: Path) -> None:
    with small_llm(good, max_model_len=32) as llm:
        with pytest.raises(RequestError, match=r"maximum context length is 32 .*the prompt has 32 tokens"):
            llm.generate([[1] * 32])
        with pytest.raises(RequestError, match="token id 258 is outside the model's vocabulary of 258"):
            llm.generate([[258]])
        with pytest.raises(RequestError, match="the prompt is empty"):
            llm.generate([[]])
        assert len(llm.generate([[1] * 31])[0].outputs[0].token_ids) == 1, "the engine goes on"


def test_cache_too_small_for_one_sequence(good: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"one sequence of 512 tokens does not fit.*--kv-cache-memory.*--max-model-len"
    ):
        small_llm(good, kv_cache_memory=64 * 1024, max_model_len=512)
    with pytest.raises(CapacityError, match="holds no page"):
        small_llm(good, kv_cache_memory=1000)


def test_cache_beyond_what_is_free(good: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"108,851,651,149,824 bytes does not fit .* bytes are free .*lower --kv-cache-memory, or"
    ):
        small_llm(good, kv_cache_memory="99TiB")


def test_context_beyond_the_model(good: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 513 is beyond the 512 positions"):
        small_llm(good, max_model_len=513)
