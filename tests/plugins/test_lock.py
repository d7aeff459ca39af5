"""The lock file: written, compared, enforced before anything of a plugin is imported."""

from __future__ import annotations

import logging
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.cli.main import run
from hardpoint.plugin_host import LockFile, PluginSet, discover
from hardpoint_plugin_api import ConfigError, PluginLoadError
from tests.plugins.catalog import KIT
from tests.plugins.conftest import Installer
from tests.support.engines import SMALL


@pytest.fixture
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands write it: the working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder / "hardpoint-plugins.lock"


def lock(path: Path) -> LockFile:
    locked = LockFile.of(path, discover().records)
    locked.write()
    return LockFile.read(path)


def reason(plugins: PluginSet, name: str) -> str:
    record = plugins.record(name)
    assert record.status == "refused"
    return str(record.reason)


def differences(path: Path) -> dict[str, str]:
    """The differences, by kind."""
    return {d.kind: f"{d.plugin}: {d.detail}" for d in LockFile.read(path).differences(discover().records)}


def test_what_is_written(installed: Installer, lock_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed("kit", "raises")
    assert run(["plugins", "lock"]) == 0
    printed = capsys.readouterr().out
    assert "  kit (kit-hardpoint 1.0), 4 files\n" in printed
    assert "are locked in hardpoint-plugins.lock" in printed
    entries = {entry["name"]: entry for entry in tomllib.loads(lock_file.read_text())["plugin"]}
    assert {"core", "kit", "raises", "cpu"} <= set(entries), "core is a plugin too, and a broken one may be mended"
    kit, record = entries["kit"], discover().record("kit")
    assert kit.pop("files") == record.file_hashes()
    assert kit == {
        "name": "kit",
        "distribution": "kit-hardpoint",
        "version": "1.0",
        "entry": "hp_kit.plugin",
        "editable": False,
        "sha256": record.content_hash(),
        "wrapped": {},
    }
    assert run(["plugins", "verify"]) == 0
    assert "plugins are as hardpoint-plugins.lock says" in capsys.readouterr().out
    assert not {"hp_kit", "hp_raises"} & set(sys.modules)


def test_what_is_locked_is_used_and_nothing_else(
    installed: Installer, lock_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    installed("kit")
    locked = lock(lock_file)
    installed("slow")
    plugins = discover(lock=locked)
    plugins.activate("kit")
    assert reason(plugins, "slow") == (
        f"it is not in {lock_file}; fix: if you trust it: hardpoint plugins lock --lock-file {lock_file}"
    )
    assert "plugin slow (slow-hardpoint 1.0) is not used: it is not in" in caplog.text
    with pytest.raises(PluginLoadError, match=r"plugin slow .*is not in"):
        discover(["slow"], locked)
    assert "hp_slow" not in sys.modules


@pytest.mark.parametrize(
    ("tamper", "kind", "fact"),
    [
        (lambda site: flip(site / "hp_kit" / "ops.py"), "content", "changed hp_kit/ops.py"),
        (lambda site: flip(site / "hp_kit" / "hardpoint.toml", 5), "content", "changed hp_kit/hardpoint.toml"),
        (lambda site: (site / "hp_kit" / "evil.py").touch(), "content", "added hp_kit/evil.py"),
        (lambda site: (site / "hp_kit" / "ops.py").unlink(), "content", "removed hp_kit/ops.py"),
        (lambda site: set_version(site, "1.1"), "version", "its version is 1.1, the locked one is 1.0"),
    ],
    ids=["byte", "manifest", "added", "removed", "version"],
)
def test_a_plugin_that_has_changed(
    installed: Installer,
    lock_file: Path,
    capsys: pytest.CaptureFixture[str],
    tamper: Callable[[Path], object],
    kind: str,
    fact: str,
) -> None:
    site = installed("kit")
    locked = lock(lock_file)
    tamper(site)
    assert fact in reason(discover(lock=locked), "kit")
    with pytest.raises(PluginLoadError, match=r"plugin kit .*pip install .* kit-hardpoint==1\.0"):
        discover(["kit"], locked)
    assert differences(lock_file).keys() == {kind}
    assert run(["plugins", "verify"]) == 1
    printed = capsys.readouterr().out
    assert fact in printed
    assert "pip install --force-reinstall" in printed
    assert "hp_kit" not in sys.modules


def flip(path: Path, place: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def set_version(site: Path, version: str) -> None:
    info = site / KIT.metadata_folder
    metadata = info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", f"Version: {version}"))


def test_one_flipped_byte_of_an_editable_install(
    editable_kit: tuple[Path, Path],
    lock_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in editable_kit:  # the second by its .pth file
        monkeypatch.syspath_prepend(str(folder))
    locked = lock(lock_file)
    assert locked.plugins["kit-hardpoint", "hp_kit.plugin"].editable
    assert discover(lock=locked).record("kit").is_usable
    module = editable_kit[1] / "hp_kit" / "ops.py"
    flip(module, 3)
    try:
        assert "changed hp_kit/ops.py" in reason(discover(lock=locked), "kit")
        assert run(["plugins", "verify", "--json"]) == 1
    finally:
        flip(module, 3)
    assert '"changed": [\n        "hp_kit/ops.py"' in capsys.readouterr().out
    assert "hp_kit" not in sys.modules


def test_editable_in_place_of_an_ordinary_install(
    installed: Installer, editable_kit: tuple[Path, Path], lock_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("kit")
    locked = lock(lock_file)
    for folder in editable_kit:
        monkeypatch.syspath_prepend(str(folder))
    assert "it is editable, the locked one not so" in reason(discover(lock=locked), "kit")


def test_added_and_missing(
    installed: Installer, lock_file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    site = installed("kit", "slow")
    locked = lock(lock_file)
    for name in ("hp_slow", "slow_hardpoint-1.0.dist-info"):
        shutil.rmtree(site / name)
    installed("last")
    found = {d.plugin: d for d in locked.differences(discover().records)}
    assert {plugin: d.kind for plugin, d in found.items()} == {
        "last (last-hardpoint 1.0)": "added",
        "slow (slow-hardpoint 1.0)": "missing",
    }
    assert found["slow (slow-hardpoint 1.0)"].fix == "pip install slow-hardpoint==1.0"
    assert found["last (last-hardpoint 1.0)"].fix.startswith("pip uninstall last-hardpoint, or if you trust it:")
    assert run(["plugins", "verify"]) == 1
    assert "it is in the lock file, and not installed" in capsys.readouterr().out
    discover(lock=locked)
    assert "plugin slow (slow-hardpoint 1.0) is in" in caplog.text


def test_the_allowlist_comes_before_the_lock_and_the_lock_before_the_manifest(
    installed: Installer, lock_file: Path
) -> None:
    site = installed("kit")
    locked = lock(lock_file)
    installed("newer_api", "malformed")
    flip(site / "hp_kit" / "ops.py")
    plugins = discover(["cpu"], locked)
    assert plugins.record("kit").status == "not-selected"
    plugins = discover(lock=locked)
    for name in ("newer_api", "malformed"):
        assert "it is not in" in reason(plugins, name)
        assert reason(discover(), name) != reason(plugins, name)


def test_core_itself_is_held_to_the_lock(lock_file: Path) -> None:
    locked = lock(lock_file)
    key = ("hardpoint-core", "hardpoint.plugin")
    core = locked.plugins[key]
    files = {name: content for name, content in core.files.items() if name != "hardpoint/plugin_host/lock.py"}
    older = type(core)(core.name, core.distribution, core.version, core.entry, core.editable, files)
    with pytest.raises(PluginLoadError, match=r"plugin core .*added hardpoint/plugin_host/lock\.py"):
        discover(lock=LockFile(lock_file, {**locked.plugins, key: older}))


def test_in_an_engine(installed: Installer, lock_file: Path) -> None:
    lock(lock_file)
    installed("kit")
    with LLM(**SMALL, plugins_locked=True) as llm:
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
        assert llm.core.blueprint.plugins.record("kit").status == "refused"
    with pytest.raises(PluginLoadError, match=r"plugin kit .*is not in hardpoint-plugins\.lock"):
        LLM(**SMALL, plugins_locked=True, plugins=["cpu", "kit"])
    moved = lock_file.rename(lock_file.with_name("other.lock"))
    with pytest.raises(ConfigError, match=r"lock file hardpoint-plugins\.lock cannot be read.*write it with"):
        LLM(**SMALL, plugins_locked=True)
    LLM(**SMALL, plugins_locked=True, plugins_lock_file=str(moved)).close()
    with pytest.raises(ConfigError, match=r"plugins_lock_file = 'x': the lock file is read with --plugins-locked only"):
        LLM(**SMALL, plugins_lock_file="x")


def entry(**changes: Any) -> str:
    values = {
        "name": '"a"',
        "distribution": '"d"',
        "version": '"1"',
        "entry": '"a.b"',
        "editable": "false",
        "sha256": '"49bd1b1f6b6aa0c7ea8bcf2ac39ddb1fc6acfc1a9b4c3b8e3a8d2c4d4c0ef4b2"',
        "files": "{}",
        "wrapped": "{}",
    }
    return "schema = 2\n[[plugin]]\n" + "\n".join(f"{k} = {v}" for k, v in (values | changes).items() if v is not None)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("schema = 2\n[[plugin", "is not valid TOML"),
        ("", "has schema None, this Hardpoint reads 2"),
        ("schema = 1", "has schema 1"),
        ("schema = 2\nplugin = 3", r"may hold \[\[plugin\]\] tables only"),
        ("schema = 2\nplugin = [3]", r"must be \[\[plugin\]\] tables"),
        ("schema = 2\nother = 3", r"may hold \[\[plugin\]\] tables only"),
        (entry(version="3"), "plugin a: 'version' must be a str, got 3"),
        (entry(entry=None), "plugin a: 'entry' must be a str, got None"),
        (entry(more="3"), "plugin a: unknown key 'more'"),
        (entry(), "plugin a: its sha256 is not that of its files"),
        (entry(files='{ "a/b.py" = 3 }'), "plugin a: a file's hash is no SHA-256"),
        (entry(files='{ "a/b.py" = "xyz" }'), "plugin a: a file's hash is no SHA-256"),
    ],
)
def test_lock_files_that_are_none(lock_file: Path, text: str, fact: str) -> None:
    lock_file.write_text(text)
    with pytest.raises(ConfigError, match=f"lock file .*{fact}.*hardpoint plugins lock --lock-file"):
        LockFile.read(lock_file)


def test_a_lock_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    assert run(["plugins", "lock", "--lock-file", str(tmp_path / "absent" / "x.lock")]) == 2
    assert "cannot be written: [Errno 2]" in capsys.readouterr().err
