"""A config file and flags: flags come first, and every error says where the value stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from hardpoint.config import load_config
from hardpoint_plugin_api import ConfigError, ConfigKey

KEYS = {"acme": {"workspace_mib": ConfigKey("workspace_mib", "int", 256)}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hp.toml"


def test_flags_come_before_the_file_and_the_file_before_defaults(file: Path) -> None:
    file.write_text(
        """
        model = "from-file"
        block_size = 16
        max_num_seqs = 8
        kv_cache_memory = "1GiB"
        custom_ops = ["none", "+rms_norm"]
        [use]
        attention = "paged"
        op.rms_norm = "file"
        [acme]
        workspace_mib = 64
        """
    )
    flags = {"block_size": "32", "use": ("op.rms_norm=flag",), "acme.workspace_mib": "128", "seed": None}
    config = load_config(file, flags, KEYS, {"model": "default", "dtype": "half"})
    assert (config.model, config.block_size, config.max_num_seqs) == ("from-file", 32, 8)
    assert config.use == {"attention": "paged", "op.rms_norm": "flag"}
    assert config.custom_ops == ("none", "+rms_norm")
    assert config.plugin_config == {"acme": {"workspace_mib": 128}}
    assert config.dtype == "float16"
    assert "seed" not in config.explicit
    assert {"block_size", "max_num_seqs", "acme.workspace_mib"} <= config.explicit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok_size = 3", r"unknown key in .*hp\.toml: 'blok_size'; did you mean 'block_size'"),
        ("block_size = 0", r"hp\.toml: block_size = 0 is invalid: must be 1 or more"),
        ("dtype = 'flot16'", r"unknown value of .*hp\.toml: dtype: 'flot16'; did you mean 'float16'"),
        ("[acmee]\nworkspace_mib = 3", r"unknown section in .*hp\.toml: 'acmee'; did you mean 'acme'"),
        ("[acme]\nworkspace = 3", "unknown setting of plugin acme: 'workspace'; did you mean 'workspace_mib'"),
        ("[acme]\nworkspace_mib = 'x'", r"hp\.toml: \[acme\] workspace_mib is of type int, got 'x'"),
        ("[plugin_config.acme]\nworkspace_mib = 3", "unknown section .* 'plugin_config'"),
        ("acme = 3", "unknown key .* 'acme'"),
        ("block_size = ", r"^--config .*hp\.toml: the config file is not valid TOML"),
        ("[use]\nopp.x = 'y'", "did you mean 'op'"),
        ("[use]\nop = 3", r"hp\.toml: use\.op = 3 is invalid: must be a text"),
        ("[use]\nop.rms_norm = 3", r"hp\.toml: use\.op\.rms_norm = 3 is invalid: must be a text"),
        ("plugins = ['cpu', 3]", r"hp\.toml: plugins\[1\] = 3 is invalid: must be a text"),
        (
            "attention_backend = 'a'\nuse.attention = 'b'",
            r"hp\.toml: attention_backend = 'a' and .*hp\.toml: use\.attention = 'b' contradict each other",
        ),
    ],
)
def test_errors_name_the_file(file: Path, text: str, message: str) -> None:
    file.write_text("model = 'm'\n" + text)
    with pytest.raises(ConfigError, match=message):
        load_config(file, {}, KEYS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_size": "x"}, "--block-size = 'x' is invalid: must be a whole number"),
        ({"blok_size": "3"}, "unknown flag '--blok-size'; did you mean '--block-size'"),
        ({"plugin_config": "3"}, "unknown flag '--plugin-config'"),
        ({"acmee.x": "3"}, "unknown plugin in --acmee.x: 'acmee'; did you mean 'acme'"),
        ({"acme.workspace_mb": "3"}, "unknown setting of plugin acme: .* did you mean 'workspace_mib'"),
        ({"acme.workspace_mib": "x"}, "--acme.workspace_mib is of type int, got 'x'"),
        ({"use": ("nonsense",)}, "^--use = 'nonsense' is invalid: takes FAMILY=NAME"),
        ({"use": ("op.rms_norm=a", "nonsense")}, "^--use = 'nonsense' is invalid: takes FAMILY=NAME"),
        ({"use": ("op.rms_norm=a,nonsense",)}, "^--use = 'op.rms_norm=a,nonsense' is invalid: takes .* got 'nonsense'"),
        ({"use": ("linear.x=a",)}, "^--use = 'linear.x=a' is invalid: family 'linear' has no members"),
        (
            {"use": ("attention=a", "attention=b")},
            "^--use = 'attention=a attention=b' is invalid: chooses both 'a' and 'b' for attention; keep one",
        ),
        (
            {"attention_backend": "b", "use": ("attention=c",)},
            "--attention-backend=b and --use attention=c contradict each other; keep one",
        ),
    ],
)
def test_errors_name_the_flag(file: Path, flags: dict[str, Any], message: str) -> None:
    file.write_text("model = 'm'\n[use]\nattention = 'a'\n")
    with pytest.raises(ConfigError, match=message):
        load_config(file, flags, KEYS)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config .*absent\.toml: the config file cannot be read: No such file"):
        load_config(tmp_path / "absent.toml", {}, {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^--config .* cannot be read: it is not UTF-8"):
        load_config(tmp_path / "binary.toml", {}, {})


@pytest.mark.parametrize("in_file", ["attention_backend = 'file'", "use.attention = 'file'"])
@pytest.mark.parametrize("flags", [{"attention_backend": "flag"}, {"use": ("attention=flag",)}])
def test_flags_come_before_the_file_in_either_spelling(file: Path, in_file: str, flags: dict[str, Any]) -> None:
    file.write_text(f"model = 'm'\n{in_file}\nuse.op.rms_norm = 'kept'\n")
    assert load_config(file, flags, {}).choices == {"attention": "flag", "op.rms_norm": "kept"}


def test_what_is_wrong_in_the_file_is_not_blamed_on_a_flag(file: Path) -> None:
    file.write_text("model = 'm'\nuse = ['nonsense']\n")
    with pytest.raises(ConfigError, match=r"hp\.toml: use = \['nonsense'\] is invalid"):
        load_config(file, {"use": ("attention=a",)}, {})


def test_what_was_set_makes_a_file_that_sets_it(file: Path, tmp_path: Path) -> None:
    """With sections of plugins and of choices; defaults are left out."""
    file.write_text(
        "model = 'm'\ndeny = ['op.x=y']\nkv_cache_memory = '2GiB'\n[use]\nattention = 'a'\n[acme]\nworkspace_mib = 3\n"
    )
    config = load_config(file, {"max_num_seqs": 7}, KEYS)
    again = tmp_path / "again.toml"
    again.write_text(tomli_w.dumps(config.explicit_settings()))
    assert load_config(again, {}, KEYS).explicit_settings() == config.explicit_settings()
    assert config.explicit_settings() == {
        "acme": {"workspace_mib": 3},
        "deny": ("op.x=y",),
        "kv_cache_memory": 2 * 2**30,
        "max_num_seqs": 7,
        "model": "m",
        "use": {"attention": "a"},
    }
