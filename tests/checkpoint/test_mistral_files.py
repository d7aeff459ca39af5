"""Mistral's own files, params.json and consolidated.safetensors, against Transformers' run of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.model_check import check_model
from hardpoint_plugin_api import CheckpointError, ConfigError
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import prompt_logits, small_llm
from tests.support.tekken import defined, write_tekken

NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.gate": "feed_forward.gate",
}
YARN_OF_8 = {"factor": 8, "original_max_position_embeddings": 24}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 24}


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as Mistral has them: elements that rotate together are neighbours."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def own_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a language model by Mistral's names."""
    config = model.config.get_text_config()
    tensors: dict[str, torch.Tensor] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    ends = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if "mlp.experts" in module:
            tensors |= own_experts(module, tensor)
            continue
        if module in ends:
            tensors[f"{ends[module]}.weight"] = tensor.contiguous()
            continue
        _, _, number, inner = module.split(".", 3)
        count = heads.get(inner.rpartition(".")[2])
        value = tensor if count is None else in_pairs(tensor, count)
        tensors[f"layers.{number}.{NAMES[inner]}.weight"] = value.contiguous()
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    return tensors


def own_experts(module: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of all experts of a layer: w1 (gate) and w3 (up), or w2 (down)."""
    matrices = ["w2"] if module.endswith("down_proj") else ["w1", "w3"]
    return {
        f"layers.{module.split('.')[2]}.feed_forward.experts.{number}.{name}.weight": rows.contiguous()
        for number, expert in enumerate(tensor)
        for name, rows in zip(matrices, expert.chunk(len(matrices)), strict=True)
    }


def write_consolidated(
    folder: Path, model: PreTrainedModel, more: dict[str, torch.Tensor] | None = None, **params: object
) -> None:
    """``model`` in Mistral's format. ``more`` tensors are stored beside its own, or in place of them."""
    config, tensors = model.config, own_tensors(model) | (more or {})
    folder.mkdir()
    save_file(tensors, folder / "consolidated.safetensors")
    found = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    (folder / "params.json").write_text(json.dumps(found | params))


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_logits(impl: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hugging_face", "mistral", sliding_window=None)
    write_consolidated(tmp_path / "own", model)
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    with small_llm(tmp_path / "own", max_model_len=128, skip_tokenizer_init=True, model_impl=impl) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < 1e-4


def check(folder: Path, model: PreTrainedModel, tolerance: float = 1e-4, **settings: Any) -> None:
    """Compare logits and greedy tokens with Transformers'."""
    (prompt,) = random_prompts(1, 90, seed=1, shortest=90)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with small_llm(folder, **({"max_model_len": 160, "skip_tokenizer_init": True} | settings)) as llm:
        assert (prompt_logits(llm, prompt) - reference_logits(model, prompt)).abs().max() < tolerance
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        check_tokens_equal(model, prompt, output.outputs[0].token_ids, tolerance)


def test_scaled_queries_and_a_vision_encoder(tmp_path: Path) -> None:
    """Ministral 3: the language model of a checkpoint whose other parts are left out."""
    rope = YARN | {"llama_4_scaling_beta": 0.4, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.0}
    changes: dict[str, Any] = {"rope_parameters": rope, "tie_word_embeddings": True, "max_position_embeddings": 192}
    model = write_checkpoint(tmp_path / "hugging_face", "ministral3", **changes)
    names = ("vision_encoder.patch_conv", "vision_language_adapter.w_in", "patch_merger.merging_layer")
    more = {f"{name}.weight": torch.zeros(2, 2) for name in (*names, "pre_mm_projector_norm")}
    write_consolidated(
        tmp_path / "own",
        model,
        more,
        yarn={"factor": 8, "original_max_position_embeddings": 24, "apply_scale": False, "beta": 16, "alpha": 2},
        llama_4_scaling={"beta": 0.4, "original_max_position_embeddings": 24},
        vision_encoder={"hidden_size": 16},
        tied_embeddings=True,
    )
    check(tmp_path / "own", model)
    with small_llm(tmp_path / "own", skip_tokenizer_init=True) as llm:
        assert llm.core.blueprint.ctx.max_model_len == 192, "as far as YaRN reaches"


def test_yarn_as_its_paper_has_it(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hugging_face", "mistral", sliding_window=None, rope_parameters=YARN)
    yarn = {"factor": 8, "original_max_position_embeddings": 24}
    write_consolidated(tmp_path / "own", model, yarn=yarn, activation="silu", model_type="transformer")
    check(tmp_path / "own", model)


def test_mixtures_of_experts(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_local_experts": 4, "head_dim": 16}
    model = write_checkpoint(tmp_path / "hugging_face", "mixtral", sliding_window=None, **sizes)
    write_consolidated(tmp_path / "own", model, moe={"num_experts": 4, "num_experts_per_tok": 2})
    check(tmp_path / "own", model)


@pytest.mark.parametrize(
    ("key", "windows"),
    [("sliding_window", "13"), ("sliding_window", [None, 13, 13]), ("_sliding_window", [None, "13", 13])],
    ids=str,
)
def test_windows(key: str, windows: Any, tmp_path: Path) -> None:
    """One for all layers, in some files as a text, or a pattern, which Ministral 8B has under another key."""
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    if isinstance(windows, str):
        kinds = ["sliding_attention"] * 3
    model = write_checkpoint(tmp_path / "hugging_face", "ministral", sliding_window=13, layer_types=kinds)
    write_consolidated(tmp_path / "own", model, **{key: windows})
    check(tmp_path / "own", model)


@pytest.mark.parametrize("scheme", ["TENSOR", "NO_SCALES"])
@pytest.mark.parametrize("vision", [False, True])
def test_weights_of_8_bits(scheme: str, vision: bool, tmp_path: Path) -> None:
    """The same tensors in both formats give the same logits: as Transformers names them, in halves, and by Mistral."""
    model = write_checkpoint(tmp_path / "hugging_face", "mistral", sliding_window=None)
    own, theirs = {}, load_file(tmp_path / "hugging_face" / "model.safetensors")
    scales: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "act": {}}
    for name, tensor in list(theirs.items()):
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            continue
        scale = tensor.abs().max().float() / 448
        theirs[name] = (tensor / scale).to(torch.float8_e4m3fn)
        scales["weight"][module] = theirs[f"{module}.weight_scale"] = scale
        if scheme == "TENSOR":
            scales["act"][module] = theirs[f"{module}.input_scale"] = torch.tensor(0.02)
    save_file(theirs, tmp_path / "hugging_face" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "hugging_face" / "config.json"
    method = {"quant_method": "fp8", "activation_scheme": "static" if scheme == "TENSOR" else "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for module in scales["weight"]:
        _, _, number, inner = module.split(".", 3)
        count, mine = heads.get(inner.rpartition(".")[2]), f"layers.{number}.{NAMES[inner]}"
        weight = theirs[f"{module}.weight"]
        own[f"{mine}.weight"] = (weight if count is None else in_pairs(weight, count)).contiguous()
        own |= {f"{mine}.qscale_{kind}": found[module].clone() for kind, found in scales.items() if module in found}
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": scheme}
    params = {"vision_encoder": {"hidden_size": 16}} if vision else {}
    write_consolidated(tmp_path / "own", model, own, quantization=quantization, **params)
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    logits = []
    for folder in ("hugging_face", "own"):
        with small_llm(tmp_path / folder, max_model_len=128, skip_tokenizer_init=True) as llm:
            logits.append(prompt_logits(llm, prompt))
    assert torch.equal(*logits)
    assert (logits[1] - reference_logits(model, prompt)).abs().max() > 1e-4, "weights are meant to be rounded"


def write_both(folder: Path, seed: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model in Hugging Face's format, another in Mistral's, and tokenizers of both."""
    theirs = write_checkpoint(folder, "mistral", seed=seed, sliding_window=None, vocab_size=330)
    own = write_checkpoint(folder / "source", "mistral", seed=seed + 1, sliding_window=None, vocab_size=330)
    write_consolidated(folder / "own", own)
    for file in (folder / "own").iterdir():
        file.rename(folder / file.name)
    write_tekken(folder)
    return theirs, own


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, PreTrainedModel]:
    """A folder with the files of both formats."""
    folder = tmp_path_factory.mktemp("both")
    return folder, *write_both(folder, seed=1)


@pytest.mark.parametrize(("form", "number"), [("auto", 0), ("hf", 0), ("mistral", 1)])
def test_new_weights_have_the_format_of_the_old(
    both: tuple[Path, PreTrainedModel, PreTrainedModel], form: str, number: int, tmp_path: Path
) -> None:
    expected = write_both(tmp_path, seed=3)[number]
    (prompt,) = random_prompts(1, 40, seed=1, shortest=40)
    with small_llm(both[0], config_format=form) as llm:
        before = prompt_logits(llm, prompt)
        llm.update_weights(tmp_path)
        after = prompt_logits(llm, prompt)
    assert (before - reference_logits(both[1:][number], prompt)).abs().max() < 1e-4
    assert (after - reference_logits(expected, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "is_own"),
    [
        ({}, False),
        ({"config_format": "hf"}, False),
        ({"config_format": "mistral"}, True),
        ({"load_format": "mistral"}, True),
        ({"config_format": "mistral", "load_format": "mistral"}, True),
    ],
    ids=str,
)
def test_a_folder_with_both_formats(
    both: tuple[Path, PreTrainedModel, PreTrainedModel], settings: dict[str, Any], is_own: bool
) -> None:
    folder, theirs, own = both
    check(folder, own if is_own else theirs, **settings)


@pytest.mark.parametrize("mode", ["auto", "hf", "mistral"])
def test_a_folder_with_both_tokenizers(both: tuple[Path, PreTrainedModel, PreTrainedModel], mode: str) -> None:
    folder, params = both[0], SamplingParams(temperature=0, max_tokens=4)
    check_model(EngineConfig.create(model=str(folder), tokenizer_mode=mode))
    for settings in ({}, {"config_format": "mistral"}):
        with small_llm(folder, max_model_len=128, tokenizer_mode=mode, **settings) as llm:
            (output,) = llm.generate(["the hat"], params, use_tqdm=False)
        is_tekken = output.prompt_token_ids == defined("the hat", begins=True)
        assert is_tekken == (mode == "mistral"), "single bytes are the other tokenizer's"


def test_a_folder_with_mistrals_tokenizer_alone(
    both: tuple[Path, PreTrainedModel, PreTrainedModel], tmp_path: Path
) -> None:
    for file in ("params.json", "consolidated.safetensors", "tekken.json"):
        (tmp_path / file).write_bytes((both[0] / file).read_bytes())
    check_model(EngineConfig.create(model=str(tmp_path)))
    with small_llm(tmp_path, max_model_len=128) as llm:
        (output,) = llm.generate(["the hat"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert output.prompt_token_ids == defined("the hat", begins=True)
    with pytest.raises(CheckpointError, match=r"holds no config.json, which --config-format hf asks for"):
        small_llm(tmp_path, config_format="hf")
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no tekken.json, which --tokenizer-mode mistral asks for"):
        small_llm(tmp_path, tokenizer_mode="mistral")
    with pytest.raises(ConfigError, match="name formats of one checkpoint; keep one"):
        EngineConfig.create(model=str(tmp_path), config_format="hf", load_format="mistral")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"q_lora_rank": 512}, "q_lora_rank is not read .* Hugging Face's format"),
        ({"moe": {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "'moe' holds num_shared_exp"),
        ({"moe": {"num_experts": 8}}, "'moe' must hold num_experts_per_tok"),
        ({"model_type": "mamba"}, "'model_type' must be 'transformer', got 'mamba'"),
        ({"yarn": {"factor": 8}}, "'yarn' must hold original_max_position_embeddings"),
        ({"yarn": [8]}, r"'yarn' must be an object, got \[8\]"),
        ({"multimodal": {"whisper_model_args": {"dim": 8}}}, "'multimodal' may hold 'vision_encoder_args' alone"),
        ({"sliding_window": [None, 13]}, "'sliding_window' must be one size for a pattern of 'n_layers' layers"),
        ({"sliding_window": "abc"}, "'sliding_window' must be a whole number of tokens, 1 or more, got 'abc'"),
        ({"_sliding_window": [None, -1, -1]}, "'_sliding_window' must be a whole number of tokens, 1 or more, got -1"),
        ({"sliding_window": True}, "'sliding_window' must be a whole number of tokens, 1 or more, got True"),
        (
            {"sliding_window": 9, "_sliding_window": 8},
            "'sliding_window' and '_sliding_window' differ: 9 and 8",
        ),
        (
            {"sliding_window": [None, 13, 13], "moe": {"num_experts": 4, "num_experts_per_tok": 2}},
            "'sliding_window' must be one size for all layers beside 'moe'",
        ),
        (
            {"sliding_window": [13], "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 32}},
            "'sliding_window' must be one size for all layers beside 'llama_4_scaling'",
        ),
        ({"yarn": YARN_OF_8 | {"beta": None}}, "'yarn' must hold a finite number above 0 as 'beta', got None"),
        ({"yarn": YARN_OF_8 | {"factor": None}}, "'yarn' must hold a finite number above 0 as 'factor', got None"),
        ({"yarn": YARN_OF_8 | {"factor": "8"}}, "'yarn' must hold a finite number above 0 as 'factor', got '8'"),
        (
            {"yarn": YARN_OF_8 | {"original_max_position_embeddings": None}},
            "'yarn' must hold a positive whole number as 'original_max_position_embeddings', got None",
        ),
        ({"quantization": {"quant_method": "compressed-tensors"}}, "'quantization' must be of weights in fp8_e4m3"),
        (
            {"yarn": {"factor": 8, "original_max_position_embeddings": 24}}
            | {"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 32}},
            "'llama_4_scaling' must have the original_max_position_embeddings of 'yarn', 24",
        ),
    ],
    ids=str,
)
def test_params_that_are_refused(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hugging_face", "mistral")
    write_consolidated(tmp_path / "own", model, **params)
    with pytest.raises(CheckpointError, match=f"params.json: {message}"):
        small_llm(tmp_path / "own", skip_tokenizer_init=True)
