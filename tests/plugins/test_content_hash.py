"""The content hash: what counts, that every byte does, and that machines agree on it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from importlib_metadata import Distribution

from hardpoint.plugin_host.content_hash import content_hash, file_hashes, hash_of
from hardpoint_plugin_api import PluginLoadError
from tests.out_of_tree.build import Dist, install

SOLID = Dist(
    "solid-hardpoint",
    {
        "hp_solid/__init__.py": "",
        "hp_solid/plugin.py": "import hp_solid_kernels\n",
        "hp_solid/sub/data.bin": "\x00\x01",
        "hp_solid/hardpoint.toml": 'schema = 1\napi = "0.2"\n[plugin]\nname = "solid"\n',
        "hp_solid_kernels.py": "paged = 1\n",
    },
    {"solid": "hp_solid.plugin"},
)
NAMES = sorted(SOLID.files)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wheels").mkdir()
    install([SOLID], tmp_path / "site", tmp_path / "wheels")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def found(folder: Path, name: str) -> Distribution:
    everything: list[Distribution] = list(Distribution.discover(path=[str(folder)]))
    return next(distribution for distribution in everything if distribution.name == name)


def solid(site: Path) -> Distribution:
    return found(site, "solid-hardpoint")


def test_the_hash_is_what_its_documentation_says(site: Path) -> None:
    """Written down once more, so that a change of the scheme cannot go unnoticed: locks and certificates hold it."""
    digest = hashlib.sha256(b"hardpoint-content/1")
    for name in NAMES:
        digest.update(
            len(name).to_bytes(8, "big") + name.encode() + hashlib.sha256(SOLID.files[name].encode()).digest()
        )
    assert content_hash(solid(site)) == digest.hexdigest()
    assert hash_of({}) == hashlib.sha256(b"hardpoint-content/1").hexdigest()
    assert list(file_hashes(solid(site))) == NAMES


def test_names_and_contents_are_told_apart() -> None:
    one, two = hashlib.sha256(b"1").hexdigest(), hashlib.sha256(b"2").hexdigest()
    listings = [{"ab": one, "c": two}, {"a": one, "bc": two}, {"ab": two, "c": one}, {"abc": one}, {"ab": one}]
    assert len({hash_of(files) for files in listings}) == len(listings)
    assert hash_of({"é": one, "z": two}) == hash_of({"z": two, "é": one})


def test_every_byte_counts_and_caches_do_not(site: Path) -> None:
    first = content_hash(solid(site))
    for name in NAMES:
        path = site / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:] if content else b"\n")
        assert content_hash(solid(site)) != first, name
        path.write_bytes(content)
    for cache in ("hp_solid/__pycache__", "hp_solid/sub/__pycache__", "__pycache__"):
        (site / cache).mkdir()
        (site / cache / "plugin.cpython-311.pyc").write_bytes(b"cache")
    assert content_hash(solid(site)) == first
    (site / "hp_solid" / "sub" / "slipped_in.so").touch()
    assert content_hash(solid(site)) != first


def test_an_editable_install_has_the_same_hash(
    warehouse: Path, editable_kit: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, packages = editable_kit
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(warehouse))
        ordinary = content_hash(found(warehouse, "kit-hardpoint"))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(packages))  # what its .pth file does
    assert content_hash(found(site, "kit-hardpoint")) == ordinary


def test_linked_folders_are_followed_but_not_in_circles(site: Path, tmp_path: Path) -> None:
    """An import follows links, so what is behind one is part of the plugin."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.py").write_text("x = 1\n")
    (site / "hp_solid" / "linked").symlink_to(tmp_path / "elsewhere")
    (site / "hp_solid" / "sub" / "circle").symlink_to(site / "hp_solid")
    (site / "hp_solid" / "broken").symlink_to(tmp_path / "nowhere")
    names = set(file_hashes(solid(site)))
    assert names == {*NAMES, "hp_solid/linked/linked.py"}


def test_what_cannot_be_read_is_an_error(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namesake = tmp_path / "namesake" / "hp_solid"
    namesake.mkdir(parents=True)
    (namesake / "__init__.py").touch()
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(namesake.parent))
        with pytest.raises(PluginLoadError, match=r"solid-hardpoint cannot be hashed: .*namesake"):
            content_hash(solid(site))
    loop = site / "hp_solid" / "plugin.py"

    def fail(*args: object) -> None:
        raise PermissionError(13, "Permission denied", str(loop))

    monkeypatch.setattr("hardpoint.plugin_host.content_hash.file_hash", fail)
    with pytest.raises(PluginLoadError, match=r"a file of solid-hardpoint cannot be read: .*plugin\.py"):
        content_hash(solid(site))
    assert "hp_solid" not in sys.modules
