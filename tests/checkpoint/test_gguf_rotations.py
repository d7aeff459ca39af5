"""Rotary embeddings and windows of GGUF files, beside Transformers' own models with the same weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.gguf.container import Container
from hardpoint_plugin_api import CheckpointError
from tests.checkpoint.gguf_writer import write_gguf
from tests.support.engines import prompt_logits, small_llm

FIXTURES = Path(__file__).parents[1] / "quantization" / "fixtures" / "gguf"
PROMPT = list(range(3, 40))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
"""The sizes of the fixtures."""


def rewritten(name: str, file: Path, metadata: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write the fixture ``name`` with other ``metadata``, None for keys to leave out, and further ``tensors``."""
    whole = Container.read(FIXTURES / f"{name}.gguf")
    values = {key: value for key, value in {**whole.metadata, **metadata}.items() if value is not None}
    write_gguf(file, values, {**whole.tensors, **(tensors or {})})


def check(file: Path, model: Any) -> None:
    """Compare logits with those of Transformers' ``model``, which gets the file's weights."""
    weights = {name: tensor.float() for name, tensor in open_files(file).tensors()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([PROMPT])).logits[0]
    with small_llm(file, dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
        got = prompt_logits(llm, PROMPT)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-5


def test_longrope(tmp_path: Path) -> None:
    """Phi-3 with 128k positions: two tensors of factors, and no type of scaling in the metadata."""
    original, longest, file = 16, 128, tmp_path / "model.gguf"
    short, long = [1.0, 1.25, 1.5, 2.0], [1.5, 2.0, 4.0, 8.0]
    factor = math.sqrt(1 + math.log(longest / original) / math.log(original))
    metadata = {
        "phi3.context_length": longest,
        "phi3.rope.scaling.original_context_length": original,
        "phi3.rope.scaling.attn_factor": factor,
    }
    factors = {"rope_factors_long.weight": torch.tensor(long), "rope_factors_short.weight": torch.tensor(short)}
    rewritten("phi3", file, metadata, factors)
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    lengths = {"max_position_embeddings": longest, "original_max_position_embeddings": original}
    config = transformers.Phi3Config(**{**SIZES, **lengths, "rope_scaling": scaling})
    check(file, transformers.Phi3ForCausalLM(config))
    rewritten("phi3", file, metadata, {"rope_factors_long.weight": torch.tensor(long)})
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight of LongRoPE is missing; convert"):
        open_files(file).read_text("config.json")


@pytest.mark.parametrize("period", [1, 2], ids=["no window", "every second layer"])
def test_windows_of_gemma3(tmp_path: Path, period: int) -> None:
    """Without a window, as llama.cpp converts a model of period 1, all layers attend to all tokens."""
    file = tmp_path / "model.gguf"
    metadata: dict[str, Any] = {"gemma3.rope.freq_base": 20_000.0, "gemma3.rope.freq_base_swa": 5_000.0}
    if period == 1:
        metadata |= {"gemma3.attention.sliding_window": None}
    else:
        metadata |= {"gemma3.attention.sliding_window_pattern": [True, False]}
    rewritten("gemma3", file, metadata)
    config = transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        layer_types=["full_attention" if period == 1 else "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        },
        rms_norm_eps=1e-6,
    )
    check(file, transformers.Gemma3ForCausalLM(config))
