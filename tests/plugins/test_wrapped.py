"""Libraries that plugins wrap: part of the lock file, of its enforcement, and of what the doctor looks at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from importlib_metadata import Distribution

from hardpoint.cli.main import run
from hardpoint.plugin_host import LockFile, discover, wrapped
from hardpoint.plugin_host.wrapped import Installed, Library, required_by, wrapped_by
from hardpoint_plugin_api import PluginLoadError
from tests.out_of_tree.build import Dist, install_editable
from tests.plugins.conftest import Installer

NAME = "vendor-kernels"
MODULE = "vendor_lib/__init__.py"


@pytest.fixture
def site(installed: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin ``adapter`` with the library that it wraps; the working directory is empty."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return installed("adapter", "vendor_kernels")


def set_version(site: Path, version: str) -> None:
    """As an upgrade whose files are the same."""
    info = next(site.glob("vendor_kernels-*.dist-info"))
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(metadata.replace("Version: 1.0", f"Version: {version}"))


def lock() -> LockFile:
    locked = LockFile.of(Path("hardpoint-plugins.lock"), discover().records)
    locked.write()
    return LockFile.read(locked.path)


def objection(locked: LockFile) -> str:
    """The reason that keeps the adapter from an engine with this lock file."""
    record = discover(lock=locked).record("adapter")
    return str(record.reason) if record.status == "refused" else ""


def test_the_libraries_are_those_that_contributions_name(site: Path) -> None:
    record = discover().record("adapter")
    assert required_by(record.contributions) == {NAME}
    found = wrapped_by({NAME})[NAME]
    assert (found.version, found.editable, len(found.sha256)) == ("1.0", False, 64)
    locked = lock()
    assert locked.plugins[record.distribution, record.entry_value].wrapped == {NAME: found}
    assert objection(locked) == ""


def test_one_byte_of_a_library_is_seen(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = lock()
    assert run(["plugins", "verify"]) == 0
    assert run(["plugins", "doctor", "adapter"]) == 1, "its targets are broken"
    assert "sha256" in capsys.readouterr().out
    text = (site / MODULE).read_text()
    (site / MODULE).write_text(text.replace("paged", "pagad"))
    assert "the files of vendor-kernels 1.0 are not those that they were" in objection(locked)
    assert run(["plugins", "verify", "--json"]) == 1
    (difference,) = json.loads(capsys.readouterr().out)
    assert difference["kind"] == "library"
    assert "adapter" in difference["plugin"]
    assert run(["plugins", "doctor", "adapter", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    (edited,) = (f for f in findings if f["state"] == "edited")
    assert edited["about"] == "library vendor-kernels 1.0"
    assert edited["note"] == f"changed since it was installed: {MODULE}"
    assert edited["fix"] == "pip install --force-reinstall vendor-kernels==1.0"
    (site / MODULE).write_text(text)
    assert objection(locked) == ""


def test_a_file_that_was_slipped_in_is_seen(site: Path) -> None:
    locked = lock()
    (site / "vendor_lib" / "fast.py").write_text("")
    assert "are not those that they were" in objection(locked)


def test_another_version_is_named_and_a_library_that_came_or_went(site: Path) -> None:
    locked = lock()
    set_version(site, "2.0")
    assert "vendor-kernels is 2.0, and was 1.0" in objection(locked)
    for path in site.glob("vendor_*"):
        shutil.rmtree(path)
    assert "vendor-kernels 1.0 is no longer installed" in objection(locked)


def test_a_library_that_was_not_locked(installed: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    installed("adapter")
    locked = lock()
    assert objection(locked) == ""
    installed("vendor_kernels")
    assert "vendor-kernels 1.0 is installed, and was not" in objection(locked)


def test_of_a_large_library_a_start_compares_the_outline(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "READ_AT_START", 0)
    locked = lock()
    text = (site / MODULE).read_text()
    (site / MODULE).write_text(text.replace("paged", "pagad"))
    assert objection(locked) == "", "sizes and RECORD are as they were"
    assert run(["plugins", "verify"]) == 1, "verify reads every byte"
    (site / MODULE).write_text(text + "\n")
    assert "are not those that they were" in objection(locked)


def test_without_record_its_package_is_found_by_name(site: Path) -> None:
    for path in site.glob("vendor_kernels-*.dist-info/RECORD"):
        path.unlink()
    (site / "vendor_kernels").mkdir()
    (site / "vendor_kernels" / "__init__.py").write_text("")
    assert set(Library(NAME, Distribution.from_name(NAME)).files) == {"vendor_kernels/__init__.py"}
    (next(site.glob("vendor_kernels-*.dist-info")) / "top_level.txt").write_text("vendor_lib\n")
    before = wrapped_by({NAME})
    assert set(Library(NAME, Distribution.from_name(NAME)).files) == {MODULE}
    (site / MODULE).write_text("")
    assert Installed().difference({NAME}, before) is not None


def test_an_editable_library_is_its_source_tree(
    installed: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Dist("editable-kernels", {"editable_lib/__init__.py": "GAIN = 1\n"}, {})
    install_editable(library, tmp_path / "editable", tmp_path / "source")
    module = tmp_path / "source" / "src" / "editable_lib" / "__init__.py"
    monkeypatch.syspath_prepend(str(tmp_path / "editable"))
    monkeypatch.syspath_prepend(str(module.parent.parent))  # what the .pth file does at start
    before = wrapped_by({"editable-kernels"})
    assert before["editable-kernels"].editable
    assert set(Library("editable-kernels", Distribution.from_name("editable-kernels")).files) == {
        "editable_lib/__init__.py"
    }
    module.write_text("GAIN = 2\n")
    assert "are not those that they were" in str(Installed().difference({"editable-kernels"}, before))


def test_a_file_that_cannot_be_read_is_one_error(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(wrapped, "file_hash", fail)
    with pytest.raises(PluginLoadError, match=r"a file of vendor-kernels cannot be read.*force-reinstall"):
        wrapped_by({NAME})
