"""Engine flags: one for each setting and each plugin key, all read by EngineConfig."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from hardpoint.config import SETTINGS, EngineConfig, Group
from hardpoint.terminal import engine_options as options
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint.terminal.lazy import HELP_OPTIONS
from hardpoint_plugin_api import ConfigError, ConfigKey

KEYS = {
    "acme": {
        "workspace_mib": ConfigKey("workspace_mib", "int", 256, "Scratch memory."),
        "fast": ConfigKey("fast", "bool", False),
    }
}


@pytest.fixture(autouse=True)
def _acme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "plugin_keys", lambda quiet: KEYS)


def parse(*args: str) -> EngineConfig:
    """The config that a command gets for ``args``."""

    @click.command("probe", cls=EngineCommand)
    @click.option("--prompt")
    def probe(config: EngineConfig, prompt: str | None) -> EngineConfig:
        return config

    config = probe.main(list(args), standalone_mode=False)
    assert isinstance(config, EngineConfig)
    return config


def test_every_setting_has_a_flag() -> None:
    command = EngineCommand("probe")
    flags = {
        name
        for param in command.get_params(click.Context(command, help_option_names=HELP_OPTIONS))
        for name in param.opts
    }
    assert {f"--{name.replace('_', '-')}" for name in SETTINGS} <= flags
    assert {"--acme.workspace_mib", "--acme.fast", "--config"} <= flags


def test_without_flags_everything_is_left_open() -> None:
    config = parse()
    assert config.model == "demo"
    assert config.explicit == {"model"}


def test_flags_reach_the_config() -> None:
    config = parse(
        "some/model",
        "--block-size=32",
        *("--dtype", "half"),
        *("--kv-cache-memory", "1GiB"),
        *("--custom-ops", "-rms_norm"),
        *("--use", "op.rms_norm=x", "--use", "attention=y"),
        *("--plugins", "core,acme"),
        "--enforce-eager",
        "--acme.workspace_mib=512",
        *("--acme.fast", "yes"),
        *("--prompt", "--acme.fast"),
    )
    assert (config.model, config.block_size, config.dtype) == ("some/model", 32, "float16")
    assert (config.kv_cache_memory, config.custom_ops, config.enforce_eager) == (2**30, ("-rms_norm",), True)
    assert config.use == {"op.rms_norm": "x", "attention": "y"}
    assert config.plugins == ("core", "acme")
    assert config.plugin_config == {"acme": {"workspace_mib": 512, "fast": True}}
    assert not parse("--no-enforce-eager").enforce_eager


def test_a_repeated_flag_of_a_list_adds_to_it() -> None:
    config = parse("--deny", "linear=torch,op.rms_norm=triton", "--deny", "op.silu_and_mul=triton")
    assert list(config.deny) == ["linear=torch", "op.rms_norm=triton", "op.silu_and_mul=triton"]
    assert "deny" in config.explicit
    assert not parse("--block-size=32").deny


def test_flags_come_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hp.toml"
    file.write_text("model = 'file'\nblock_size = 16\nmax_num_seqs = 4\n[acme]\nfast = true\n")
    config = parse("--config", str(file), "--block-size", "32")
    assert (config.model, config.block_size, config.max_num_seqs) == ("file", 32, 4)
    assert config.plugin_config["acme"]["fast"] is True


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--block-size", "x"], "--block-size = 'x' is invalid: must be a whole number"),
        (["--dtype", "flot16"], "unknown value of --dtype: 'flot16'; did you mean 'float16'"),
        (["--acme.workspace_mib", "x"], "--acme.workspace_mib is of type int, got 'x'"),
        (["--use", "op=x"], "family 'op' has several members"),
    ],
)
def test_bad_values_are_the_configs_own_errors(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*args)


@pytest.mark.parametrize(
    ("args", "nearest"),
    [(["--blok-size", "3"], "--block-size"), (["--acme.workspace_mb", "3"], "--acme.workspace_mib")],
)
def test_unknown_flags_come_with_the_nearest(args: list[str], nearest: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(*args)
    assert nearest in caught.value.format_message()


def test_two_models_are_refused() -> None:
    with pytest.raises(click.UsageError, match="MODEL a and --model b differ"):
        parse("a", "--model", "b")
    assert parse("a", "--model", "a").model == "a"


def test_help_groups_options_and_shows_defaults() -> None:
    command = EngineCommand("probe", params=[click.Option(["--prompt"], help="Own.")])
    text = command.get_help(click.Context(command, help_option_names=HELP_OPTIONS))
    titles = ["Options", *Group, "Settings of plugins"]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    cache = text[text.index("\nMemory and cache:") : text.index("\nScheduling:")]
    assert all(flag in cache for flag in ("--kv-cache-memory", "--block-size"))
    assert text.count("--block-size") == 1
    assert "Scratch memory.  [default: 256]" in text
    assert "[auto|float32|float16|bfloat16]" in text
    assert "SIZE" in text
