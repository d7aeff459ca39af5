"""Tables and parameters of rotary embedding against Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.configuration_glm import GlmConfig
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hardpoint.ops.rope_table import rope_args, rope_table
from hardpoint_plugin_api import CheckpointError, RopeArgs

CPU = torch.device("cpu")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn_factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
    "yarn_mscale": {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_betas": {"rope_type": "yarn", **YARN, "beta_fast": 20, "beta_slow": 2},
    "yarn_untruncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn_implied_factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    "yarn_no_original": {"rope_type": "yarn", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.5 + 0.5 * i for i in range(32)],
    },
}


def raw_config(rope: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The keys of a config.json that matter here."""
    return {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_theta": 50_000.0, **rope},
        **more,
    }


def expected_table(rotary: Any, num_positions: int) -> torch.Tensor:
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.filterwarnings("ignore")
def test_tables_equal_transformers(name: str) -> None:
    raw = raw_config(SCALED[name])
    args = rope_args(raw, 64)
    config = LlamaConfig(**raw_config(dict(SCALED[name])))
    table = rope_table(args, 2048, CPU)
    assert table.shape == (2048, 64)
    assert table.dtype == torch.float32
    assert torch.equal(table, expected_table(LlamaRotaryEmbedding(config), 2048))
    if args.kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[args.kind](config, CPU, seq_len=2048)
        assert torch.equal(table[1, :32], frequencies.cos() * factor)


def test_every_parameter_counts() -> None:
    rows = {name: rope_table(rope_args(raw_config(rope), 64), 99, CPU)[50].tolist() for name, rope in SCALED.items()}
    assert rows.pop("yarn_implied_factor") == rows["yarn"]  # 2048 / 512 is the factor that the other one states
    assert len({tuple(row) for row in rows.values()}) == len(rows)


def test_partial_rotation_equals_transformers() -> None:
    config = GlmConfig(hidden_size=256, num_attention_heads=4, head_dim=64)
    raw = {"rope_parameters": dict(config.rope_parameters or {})}
    args = rope_args(raw, 64, interleaved=True)
    assert (args.rotary_dim, args.interleaved) == (32, True)
    assert torch.equal(rope_table(args, 100, CPU), expected_table(GlmRotaryEmbedding(config), 100))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn_mscale"])
def test_older_configs_mean_the_same(key: str, name: str) -> None:
    today = raw_config(SCALED[name])
    scaling = {key if k == "rope_type" else k: v for k, v in SCALED[name].items()}
    older = {**today, "rope_theta": 50_000.0, "rope_scaling": scaling}
    del older["rope_parameters"]
    assert rope_args(older, 64) == rope_args(today, 64)


def test_nothing_said_means_the_default() -> None:
    assert rope_args({}, 64) == RopeArgs(64, 10_000.0)
    assert rope_args({"rope_theta": 5e5, "rope_scaling": None}, 64) == RopeArgs(64, 5e5)
    assert rope_args({}, 64, default_theta=1e6).theta == 1e6
    assert rope_args({"partial_rotary_factor": 0.5}, 64).rotary_dim == 32


def test_the_original_length_outside_the_dictionary_comes_first() -> None:
    args = rope_args(raw_config(SCALED["yarn"], original_max_position_embeddings=1024), 64)
    assert dict(args.scaling)["original_max_position_embeddings"] == 1024


def test_parameters_per_type_of_layer() -> None:
    raw = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    assert rope_args(raw, 64, layer_type="full_attention").theta == 1e6
    assert rope_args(raw, 64, layer_type="sliding_attention").theta == 1e4
    with pytest.raises(CheckpointError, match="per type of layer"):
        rope_args(raw, 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarm"}}, "did you mean 'yarn'.*known: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "dynamic"}}, "unknown rope type 'dynamic'"),
        (
            {"rope_scaling": {"type": "su", "factor": 4, "short_factor": [1.0]}, "max_position_embeddings": 64},
            "'short_factor' must list 32 finite numbers",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, r"unknown rope type \['yarn'\]"),
        ({"rope_scaling": {"type": ""}}, "unknown rope type ''"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' must be a finite number above 0, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' must be a finite number above 0, got 0"),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "factor": -4.0}},
            "'factor' must be a finite number above 0, got -4",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_slow": -1}}, "'beta_slow' must be a finite number above 0"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "'truncate' must be true or false, got 1"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
            "'original_max_position_embeddings' must be a finite number above 0, got 0",
        ),
        ({"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1}, "'rope_theta' must be a finite number above 1"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "must be above 'low_freq_factor'"),
        ({"rope_scaling": "x"}, "'rope_scaling' must be an object or null, got 'x'"),
        ({"rope_parameters": []}, r"'rope_parameters' must be an object or null, got \[\]"),
        ({"rope_theta": "1e4"}, "'rope_theta' must be a finite number above 0, got '1e4'"),
        ({"rope_theta": True}, "'rope_theta' must be a finite number above 0, got True"),
        ({"rope_theta": 0}, "'rope_theta' must be a finite number above 0, got 0"),
        ({"rope_theta": -1e4}, "'rope_theta' must be a finite number above 0, got -10000"),
        ({"rope_theta": float("nan")}, "'rope_theta' must be a finite number above 0, got nan"),
        ({"rope_theta": 10**400}, "'rope_theta' must be a finite number above 0, got 1000"),
        ({"partial_rotary_factor": 0.33}, "makes 21 of 64 elements rotate"),
        ({"partial_rotary_factor": 2}, "makes 128 of 64 elements rotate"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^some/config.json: .*{message}"):
        rope_args(config, 64, file="some/config.json")
