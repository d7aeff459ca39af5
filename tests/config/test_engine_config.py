"""EngineConfig: what is accepted, what is refused and in which words, and what plugins may change."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hardpoint.config import SETTINGS, EngineConfig
from hardpoint_plugin_api import FAMILIES, ConfigChange, ConfigError, ConfigKey, UnknownNameError

KEYS = {
    "acme": {
        "workspace_mib": ConfigKey("workspace_mib", "int", 256),
        "fast": ConfigKey("fast", "bool", False),
    },
    "other": {"level": ConfigKey("level", "float", 0.5)},
}


def create(**settings: Any) -> EngineConfig:
    return EngineConfig.create(**({"model": "m"} | settings))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "bf16", "bfloat16"),
        ("kv_cache_dtype", "half", "float16"),
        ("kv_cache_memory", "4GiB", 4 * 2**30),
        ("kv_cache_memory", "1.5 MiB", 3 * 2**19),
        ("kv_cache_memory", "2GB", 2 * 10**9),
        ("kv_cache_memory", "4096", 4096),
        ("kv_cache_memory", "1" + 400 * "0" + "KB", 10**403),
        ("block_size", 65536, 65536),
        ("max_num_batched_tokens", 2**22, 2**22),
        ("kv_cache_memory", 4096, 4096),
        ("custom_ops", "all,-rms_norm", ("all", "-rms_norm")),
        ("custom_ops", ["none", "+rms_norm"], ("none", "+rms_norm")),
        ("plugins", "acme, other", ("acme", "other")),
        ("plugins", "", ()),
        ("use", ["op.rms_norm=acme", "attention=paged"], {"op.rms_norm": "acme", "attention": "paged"}),
        ("use", {"op": {"rms_norm": "acme"}, "attention": "paged"}, {"op.rms_norm": "acme", "attention": "paged"}),
        ("use", "op.rms_norm=acme", {"op.rms_norm": "acme"}),
        ("max_num_seqs", "32", 32),
        ("enforce_eager", "true", True),
    ],
)
def test_values_become_typed(key: str, value: object, expected: object) -> None:
    assert getattr(create(**{key: value}), key) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, r"block_size = 0 is invalid: must be 1 or more"),
        ({"block_size": True}, r"block_size = True is invalid: must be a whole number"),
        ({"block_size": "many"}, r"block_size = 'many' is invalid: must be a whole number"),
        ({"max_num_seqs": 2.5}, r"max_num_seqs = 2.5 is invalid: must be a whole number"),
        ({"max_model_len": -1}, "must be 1 or more"),
        ({"seed": 2**63}, "must be below 9223372036854775808"),
        ({"device_index": -1}, "must be 0 or more"),
        ({"enforce_eager": "maybe"}, r"enforce_eager = 'maybe' is invalid: must be true or false"),
        ({"model": ""}, "must not be empty"),
        ({"model": 3}, "must be a text"),
        ({"kv_cache_memory": "4GG"}, r"kv_cache_memory = '4GG' is invalid: .* such as 4GiB"),
        ({"kv_cache_memory": "0"}, "must be 1 or more"),
        ({"kv_cache_memory": -5}, "must be 1 or more"),
        ({"plugins": 3}, "must be a list of texts"),
        ({"custom_ops": "all,none"}, "takes one of 'all' and 'none', not both"),
        ({"custom_ops": "+a,-a"}, r"holds both '\+a' and '-a'"),
        ({"custom_ops": "rms_norm"}, "'rms_norm' is none of these"),
        ({"use": "rms_norm"}, "takes FAMILY=NAME or FAMILY.OF=NAME"),
        ({"use": {"opp.x": "y"}}, "unknown family 'opp'; did you mean 'op'"),
        ({"use": {"op": "y"}}, "family 'op' has several members"),
        ({"use": {"linear.x": "y"}}, "family 'linear' has no members"),
        ({"use": {"attention.casual": "y"}}, "unknown attention 'casual'; did you mean 'causal'"),
        ({"use": ["attention=a", "attention=b"]}, "chooses both 'a' and 'b' for attention"),
        ({"use": 5}, "must be a table"),
        (
            {"use": {"attention": "a"}, "attention_backend": "b"},
            "attention_backend = 'b' and use.attention = 'a' contradict",
        ),
        ({"plugin_config": {"acme": {"x": [1]}}}, r"acme.x = \[1\] is invalid: must be a text, a number"),
        ({"plugin_config": {"acme": 1}}, "plugin_config.acme = 1 is invalid: must be a table"),
        ({"max_num_seqs": 65537}, "max_num_seqs = 65537 is invalid: must be 65536 or less"),
        ({"max_num_batched_tokens": 2**22 + 1}, "must be 4194304 or less"),
        ({"block_size": 65537}, "must be 65536 or less"),
        ({"plugins": [3]}, r"plugins\[0\] = 3 is invalid: must be a text"),
        ({"use": {"op": 3}}, "use.op = 3 is invalid: must be a text"),
        ({"hub_revision": "v2", "model": "demo"}, "hub_revision = 'v2': a revision applies to hub ids"),
        ({"hub_revision": "v2", "model": "."}, "the model '.' is local"),
    ],
)
def test_a_bad_value_is_one_clear_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        create(**settings)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_every_bad_value_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        create(block_size=0, max_num_seqs="x")
    assert str(caught.value).splitlines() == [
        "block_size = 0 is invalid: must be 1 or more",
        "max_num_seqs = 'x' is invalid: must be a whole number",
    ]


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown setting 'blok_size'; did you mean 'block_size'") as caught:
        create(blok_size=16)
    assert "all2all_backend" not in str(caught.value), "not all sixty names"
    assert "hardpoint generate --help" in str(caught.value)
    with pytest.raises(UnknownNameError, match="unknown value of dtype: 'flot16'; did you mean 'float16'"):
        create(dtype="flot16")
    with pytest.raises(ConfigError, match="no model was given"):
        EngineConfig.create()


@given(
    st.sampled_from(SETTINGS), st.none() | st.text() | st.integers() | st.lists(st.text()) | st.floats() | st.booleans()
)
@example("load_format", [])
@settings(deadline=None)
def test_whatever_is_given_no_other_error_escapes(key: str, value: object) -> None:
    try:
        config = create(**{key: value})
    except ConfigError:
        return
    assert key in config.explicit


def test_choices_join_the_flags_of_families_and_use() -> None:
    config = create(attention_backend="paged", platform="cpu", use={"op.rms_norm": "fast", "attention": "paged"})
    assert config.choices == {"attention": "paged", "platform": "cpu", "op.rms_norm": "fast"}
    assert create().choices == {}


def test_every_flag_of_a_family_is_a_setting() -> None:
    for family in FAMILIES.values():
        assert family.flag is None or family.flag[2:].replace("-", "_") in SETTINGS


def test_every_setting_has_a_help_text() -> None:
    assert all(field.description for field in EngineConfig.model_fields.values())


def test_a_config_is_frozen_and_picklable() -> None:
    config = create(seed=3).with_plugin_keys(KEYS)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 4
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.explicit == config.explicit
    with pytest.raises(TypeError):
        config.selection_view()["seed"] = 4  # type: ignore[index]  # what this test is about


def test_plugin_keys_are_typed_and_filled_up() -> None:
    config = create(plugin_config={"acme": {"workspace_mib": "12"}}).with_plugin_keys(KEYS)
    assert config.plugin_config == {"acme": {"workspace_mib": 12, "fast": False}, "other": {"level": 0.5}}
    assert config.explicit == {"model", "acme.workspace_mib"}
    assert config.with_plugin_keys(KEYS) == config


def test_defaults_of_a_plugin_that_is_not_used_are_dropped() -> None:
    config = create().with_plugin_keys(KEYS).with_plugin_keys({"other": KEYS["other"]})
    assert config.plugin_config == {"other": {"level": 0.5}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"acmee": {"fast": True}}, "unknown plugin 'acmee'; did you mean 'acme'"),
        ({"acme": {"fats": True}}, "unknown setting of plugin acme: 'fats'; did you mean 'fast'"),
        ({"acme": {"fast": 3}}, "acme.fast is of type bool, got 3"),
        ({"acme": {"workspace_mib": "x"}}, "acme.workspace_mib is of type int, got 'x'"),
    ],
)
def test_bad_plugin_keys_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(plugin_config=section).with_plugin_keys(KEYS)


def test_plugins_change_what_the_user_left_open() -> None:
    config = create(max_num_seqs=8, plugin_config={"acme": {"fast": True}}).with_plugin_keys(KEYS)
    changed, lines = config.with_changes(
        [
            ConfigChange("block_size", 32, "pages of 32"),
            ConfigChange("max_num_seqs", 64, "wide batches"),
            ConfigChange("acme.workspace_mib", 512, "long prompts"),
            ConfigChange("acme.fast", False, "old firmware"),
            ConfigChange("dtype", "half", "no bfloat16 here"),
        ]
    )
    assert (changed.block_size, changed.max_num_seqs, changed.dtype) == (32, 8, "float16")
    assert changed.plugin_config["acme"] == {"workspace_mib": 512, "fast": True}
    assert changed.explicit == config.explicit
    assert config.block_size is None
    assert lines == [
        "block_size: None -> 32, pages of 32",
        "kept max_num_seqs = 8, which you set; wished: 64, wide batches",
        "acme.workspace_mib: 256 -> 512, long prompts",
        "kept acme.fast = True, which you set; wished: False, old firmware",
        "dtype: 'auto' -> 'half', no bfloat16 here",
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("blok_size", 3, "did you mean 'block_size'"),
        ("acme.fats", True, "did you mean 'acme.fast'"),
        ("plugin_config", {}, "unknown setting"),
        ("block_size", 0, "a plugin's wish: block_size = 0 is invalid"),
        ("acme.fast", 3, "a plugin's wish: acme.fast = 3 is invalid"),
    ],
)
def test_a_plugins_bad_wish_is_an_error(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create().with_plugin_keys(KEYS).with_changes([ConfigChange(key, value, "why")])
