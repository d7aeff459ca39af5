"""A certificate counts for a contribution while the sources of its results stay as they were."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint.conformance.certificate import Certificate, merge, read_certificate
from hardpoint.conformance.certify import certify
from hardpoint.conformance.content import Content, Loaded, Sources, content_of
from hardpoint.conformance.kit import Order
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import ConfigError
from tests.out_of_tree.build import Dist, install

KEY = ("op", "rms_norm", "parts")
KERNEL = """
import torch, importlib, importlib.util, pathlib, sys
from hp_parts import helper, alias, itself
from hp_parts.space import inner
try:
    from hp_parts import tuned
except ImportError:
    pass
try:
    from hp_parts import broken
except ValueError:
    pass
importlib.util.find_spec("hp_parts.sought")
from hp_parts import gone
del sys.modules["hp_parts.gone"]
_spec = importlib.util.spec_from_file_location("by_path", pathlib.Path(__file__).with_name("by_path.py"))
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

def norm(x, weight, out, *, eps):
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())
"""
MANIFEST = """
schema = 1
api = "0.2"
[plugin]
name = "parts"
[config.speed]
type = "int"
default = 1
help = "Nothing."
""" + "".join(
    f"""
[[contribution]]
family = "op"
of = "rms_norm"
name = "{name}"
target = "hp_parts.kernel:norm"
form = "out"
platforms = ["cpu"]
priority = {priority}
summary = "A norm"
requires = [{{ dtype = ["float32"] }}]
"""
    for priority, name in enumerate(("parts", "other"), 1)
)
FILES = {
    **dict.fromkeys(("__init__.py", "plugin.py", "helper.py", "gone.py", "by_path.py", "unread.py", "_alias.py"), ""),
    "itself.py": "import sys, types\nsys.modules[__name__] = types.SimpleNamespace()\n",
    "broken.py": "raise ValueError\n",
    "space/inner.py": "",
    "kernel.py": KERNEL,
    "hardpoint.toml": MANIFEST,
    "table.json": "{}",
    "stubs.pyi": "",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Certificate]:
    """A plugin of many parts, as it is installed, and a certificate of one of its kernels."""
    site, work = tmp_path_factory.mktemp("parts-site"), tmp_path_factory.mktemp("parts-wheel")
    install(
        [Dist("hp-parts", {f"hp_parts/{name}": text for name, text in FILES.items()}, {"parts": "hp_parts.plugin"})],
        site,
        work,
    )
    (site / "hp_parts" / "alias.py").symlink_to("_alias.py")
    with pytest.MonkeyPatch.context() as patch:
        in_sight(site, patch)
        order = Order("parts", name="parts", settings={"cpu": {"threads": 1}}, case="float32/o*")
        certificate = replace(certify(discover(), order, jobs=1), scope={"case": "*"})
        certificate.write(work / "c.json")
    return site / "hp_parts", read_certificate(work / "c.json")


def in_sight(site: Path, patch: pytest.MonkeyPatch) -> None:
    patch.syspath_prepend(str(site))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))


@pytest.fixture
def package(made: tuple[Path, Certificate], monkeypatch: pytest.MonkeyPatch) -> Path:
    in_sight(made[0].parent, monkeypatch)
    return made[0]


@pytest.fixture
def certificate(made: tuple[Path, Certificate]) -> Certificate:
    return made[1]


def installed() -> Content:
    return content_of(discover().record("parts"))


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """The file has other text for a while; a link is replaced by a file."""
    link = path.readlink() if path.is_symlink() else None
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    try:
        yield
    finally:
        path.unlink()
        if link is not None:
            path.symlink_to(link)
        elif before is not None:
            path.write_text(before)
        elif not any(path.parent.iterdir()):
            path.parent.rmdir()


def test_it_counts_for_what_was_tried(package: Path, certificate: Certificate) -> None:
    assert certificate.proves(*KEY)
    (sources,) = certificate.sources
    assert sources.loaded.files == {
        f"hp_parts/{name}" for name in FILES.keys() | {"alias.py"} if name.endswith(".py") and name != "unread.py"
    }
    assert sources.loaded.absent == {"hp_parts.tuned", "hp_parts.sought"}
    assert certificate.plugin["packages"] == ["hp_parts"]
    assert certificate.difference(KEY, installed()) is None
    assert certificate.difference(("op", "rms_norm", "other"), replace(installed(), files={})) is not None


VOIDING = ("kernel.py", "helper.py", "itself.py", "broken.py", "gone.py", "by_path.py", "alias.py", "space/inner.py")


@pytest.mark.parametrize("name", [*VOIDING, "__init__.py", "table.json"])
def test_an_edit_of_what_was_loaded_voids_it(package: Path, certificate: Certificate, name: str) -> None:
    with changed(package / name, "# more\n"):
        assert certificate.difference(KEY, installed()) == f"hp_parts/{name} has changed"
    assert certificate.difference(KEY, installed()) is None


@pytest.mark.parametrize(
    "name",
    [
        *("helper/__init__.py", "space/__init__.py", "tuned.py", "sought.py", "tuned/__init__.py", "more.json"),
        "tuned/inner.py",  # a folder without __init__.py is a package, too
        "space.py",
    ],
)
def test_a_new_file_that_would_be_found_voids_it(package: Path, certificate: Certificate, name: str) -> None:
    with changed(package / name, ""):
        assert certificate.difference(KEY, installed()) == f"hp_parts/{name} is new"


def test_a_new_package_of_the_distribution_voids_it(package: Path, certificate: Certificate) -> None:
    content = installed()
    files = {**content.files, "hp_more/__init__.py": "00" * 32}
    more = replace(content, files=files, packages=(*content.packages, "hp_more"))
    assert certificate.difference(KEY, more) == "the plugin's package hp_more is new"


@pytest.mark.parametrize("name", ["helper.py", "table.json"])
def test_a_file_that_is_gone_voids_it(package: Path, certificate: Certificate, name: str) -> None:
    text = (package / name).read_text()
    (package / name).unlink()
    try:
        assert certificate.difference(KEY, installed()) == f"hp_parts/{name} is missing"
    finally:
        (package / name).write_text(text)


@pytest.mark.parametrize("name", ["unread.py", "new.py", "stubs.pyi", "py.typed", "certificates/c.json"])
def test_a_file_that_nothing_loads_voids_nothing(package: Path, certificate: Certificate, name: str) -> None:
    before = installed().hash
    with changed(package / name, "# more\n"):
        assert (installed().hash != before) == (name != "certificates/c.json")
        assert certificate.difference(KEY, installed()) is None


def with_requirement(name: str) -> str:
    entries = MANIFEST.split("[[contribution]]")
    own = (e.replace('["float32"]', '["float32", "bfloat16"]') if f'"{name}"' in e else e for e in entries)
    return "[[contribution]]".join(own)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (f"{MANIFEST}\n# more\n", True),
        (with_requirement("other"), True),
        (with_requirement("parts"), False),
        (MANIFEST.replace("default = 1", "default = 2"), False),
    ],
)
def test_of_the_manifest_its_own_entry_counts(package: Path, certificate: Certificate, text: str, counts: bool) -> None:
    with changed(package / "hardpoint.toml", text):
        assert (certificate.difference(KEY, installed()) is None) == counts


def test_a_name_that_is_no_text_can_be_written(package: Path, certificate: Certificate, tmp_path: Path) -> None:
    odd = package / os.fsdecode(b"bad\xff.dat")
    with changed(odd, ""):
        files = {**certificate.files, "hp_parts/bad\\xff.dat": installed().always["hp_parts/bad\\xff.dat"]}
        whole = replace(certificate, files=files)
        whole.write(tmp_path / "c.json")
        assert read_certificate(tmp_path / "c.json").difference(KEY, installed()) is None
        assert certificate.difference(KEY, installed()) == "hp_parts/bad\\xff.dat is new"


def test_sources_without_the_targets_module_are_none(package: Path, certificate: Certificate) -> None:
    (sources,), content = certificate.sources, installed()
    kept = sources.loaded
    assert content.sources(KEY, kept) == sources
    assert content.sources(KEY, Loaded(kept.files - {"hp_parts/kernel.py"})) is None
    assert content.sources(KEY, Loaded(kept.files | {"hp_parts/passing.py"})) is None
    nothing = replace(certificate, sources=(replace(sources, loaded=Loaded()),), plugin={"content_hash": ""})
    assert nothing.difference(KEY, content) is not None


def test_shards_loaded_all_that_one_of_them_did(certificate: Certificate) -> None:
    one, two = (replace(certificate, shards=(i,), num_shards=2) for i in (1, 2))

    def with_sources(shard: Certificate, *files: str) -> Certificate:
        sources = (Sources(KEY, "e", Loaded(frozenset(files), frozenset(f"no_{f}" for f in files))),) if files else ()
        return replace(shard, sources=sources, files=dict.fromkeys(files, "1"))

    merged = merge([with_sources(one, "a.py"), with_sources(two, "b.py")])
    both = Loaded(frozenset({"a.py", "b.py"}), frozenset({"no_a.py", "no_b.py"}))
    assert (merged.sources, merged.files) == ((Sources(KEY, "e", both),), {"a.py": "1", "b.py": "1"})
    assert merge([with_sources(one, "a.py"), with_sources(two)]).sources == ()


@pytest.mark.parametrize(("field", "value"), [("files", None), ("sources", [{"loaded": "x"}]), ("sources", [5])])
def test_a_field_of_another_form_is_named(certificate: Certificate, tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "c.json").write_text(json.dumps({**certificate.to_json(), field: value}))
    with pytest.raises(ConfigError, match=rf"is no certificate: {field}"):
        read_certificate(tmp_path / "c.json")


def test_a_run_in_one_process_knows_no_sources(package: Path) -> None:
    order = Order("parts", name="parts", settings={"cpu": {"threads": 1}}, case="float32/odd")
    found = certify(discover(), order, isolated=False)
    assert found.sources == ()


def test_the_target_of_the_plugins_platform_counts(package: Path, certificate: Certificate) -> None:
    content, platform = installed(), ("platform", None, "parts")
    same = replace(content, targets={**content.targets, platform: "hp_parts.helper"})
    other = replace(content, targets={**content.targets, platform: "hp_parts.unread"})
    assert certificate.difference(KEY, replace(same, files={**same.files, "hp_parts/new.py": "00" * 32})) is None
    assert certificate.difference(KEY, replace(other, files={**other.files, "hp_parts/new.py": "00" * 32})) == (
        "the target of the plugin's platform has changed"
    )
