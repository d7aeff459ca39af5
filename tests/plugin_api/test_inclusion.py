"""Includes, defaults and overrides of manifests: the contributions they give, and one clear error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint_plugin_api import Contribution, Manifest, ManifestError, parse_manifest, read_manifest
from hardpoint_plugin_api.requirements import ArchRequirement, OneOfRequirement, PackageRequirement

HEAD = 'schema = 1\napi = "0.2"\n[plugin]\nname = "acme"\n'
PORTABLE = """
[defaults]
priority = 100
requires = [{ dtype = ["bfloat16"] }]
[[contribution]]
family = "attention"
name = "paged"
target = "kernels.attention:Paged"
summary = "Any architecture"
[[contribution]]
family = "op"
of = "rms_norm"
name = "triton"
target = "kernels.norm:rms_norm"
priority = 7
platforms = ["here"]
requires = [{ arch = ["a?"] }]
"""
INCLUDE = """
[[include]]
file = "portable.toml"
platforms = ["acme"]
requires = [{ package = "triton>=3.6" }]
"""
DTYPE, TRITON = OneOfRequirement("dtype", ("bfloat16",)), PackageRequirement(("triton>=3.6",))


def read(folder: Path, text: str, portable: str = PORTABLE) -> Manifest:
    (folder / "portable.toml").write_text(portable)
    (folder / "hardpoint.toml").write_text(HEAD + text)
    return read_manifest(folder / "hardpoint.toml")


def by_name(manifest: Manifest) -> dict[str, Contribution]:
    return {c.name: c for c in manifest.contributions}


def test_a_manifest_is_parsed_once_until_a_file_of_it_changes(tmp_path: Path) -> None:
    first = read(tmp_path, INCLUDE)
    assert read(tmp_path, INCLUDE) is first
    changed = read(tmp_path, INCLUDE, PORTABLE.replace("priority = 7", "priority = 8"))
    assert by_name(changed)["triton"].priority == 8
    assert read(tmp_path, INCLUDE.replace("3.6", "3.7")) != first
    assert read(tmp_path, INCLUDE) == first


def test_defaults_fill_what_a_contribution_leaves_out() -> None:
    text = """
    [defaults]
    platforms = ["acme"]
    priority = 10
    requires = [{ package = "acme-kernels" }]
    [[contribution]]
    family = "drafter"
    name = "plain"
    target = "acme:Plain"
    [[contribution]]
    family = "drafter"
    name = "own"
    target = "acme:Own"
    priority = 20
    platforms = []
    requires = [{ arch = "acme1" }]
    """
    found = by_name(parse_manifest(HEAD + text, "tests"))
    kernels = PackageRequirement(("acme-kernels",))
    assert (found["plain"].platforms, found["plain"].priority) == (("acme",), 10)
    assert found["plain"].requires == (kernels,)
    assert (found["own"].platforms, found["own"].priority) == ((), 20)
    assert found["own"].requires == (kernels, ArchRequirement(("acme1",)))


def test_what_is_included_is_the_plugins_own(tmp_path: Path) -> None:
    own = '[[contribution]]\nfamily = "drafter"\nname = "plain"\ntarget = "acme:Plain"\n'
    found = by_name(read(tmp_path, own + INCLUDE))
    assert list(found) == ["plain", "paged", "triton"]
    assert found["plain"].platforms == ()
    assert (found["paged"].platforms, found["paged"].priority) == (("acme",), 100)
    assert found["paged"].requires == (TRITON, DTYPE)
    assert (found["triton"].platforms, found["triton"].priority) == (("here",), 7)
    assert found["triton"].requires == (TRITON, DTYPE, ArchRequirement(("a?",)))


def test_overrides(tmp_path: Path) -> None:
    text = """
    [[override]]
    family = "attention"
    name = "paged"
    priority = 3
    summary = "Another"
    requires = [{ arch = "acme2" }]
    [[override]]
    family = "op"
    of = "rms_norm"
    name = "triton"
    remove = true
    """
    found = by_name(read(tmp_path, INCLUDE + text))
    assert list(found) == ["paged"]
    assert (found["paged"].priority, found["paged"].summary) == (3, "Another")
    assert found["paged"].requires == (TRITON, DTYPE, ArchRequirement(("acme2",)))
    assert found["paged"].target == "kernels.attention:Paged"


def test_a_file_of_another_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / "never_imported"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "kernels" / "portable.toml").write_text(PORTABLE)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    include = '[[include]]\nfile = "never_imported:kernels/portable.toml"\n'
    assert len(read(package, include).contributions) == 2
    with pytest.raises(ManifestError, match="lock files and certificates count"):
        read(tmp_path, include)


def test_cores_portable_kernels_can_be_included(tmp_path: Path) -> None:
    found = read(tmp_path, '[[include]]\nfile = "hardpoint:kernels/portable.toml"\nplatforms = ["acme"]\n')
    assert {c.platforms for c in found.contributions} == {("acme",)}
    assert {"attention", "linear", "experts", "op"} == {c.family for c in found.contributions}


@pytest.mark.parametrize(
    ("text", "portable", "message"),
    [
        ("[[include]]\n", PORTABLE, "needs 'file'"),
        ('[[include]]\nfile = "../portable.toml"\n', PORTABLE, "only these can be included"),
        ('[[include]]\nfile = "/etc/portable.toml"\n', PORTABLE, "only these can be included"),
        ('[[include]]\nfile = "absent.toml"\n', PORTABLE, "absent.toml' cannot be read"),
        (
            '[[include]]\nfile = "no_such_package:x.toml"\n',
            PORTABLE,
            "only these can be included",
        ),
        ('[[include]]\nfile = "a.b:x.toml"\n', PORTABLE, "only these can be included"),
        (INCLUDE, "schema = [", "portable.toml: not valid TOML"),
        (INCLUDE, 'api = "0.2"\n', "portable.toml: a file that is included holds defaults"),
        (
            INCLUDE,
            PORTABLE.replace('family = "attention"\n', ""),
            "portable.toml: [[contribution]] 'paged': key 'family'",
        ),
        (INCLUDE + "priorty = 3\n", PORTABLE, "unknown key 'priorty'; did you mean 'priority'?"),
        (
            INCLUDE + '[[override]]\nfamily = "attention"\nname = "pagd"\n',
            PORTABLE,
            "did you mean 'attention causal paged'?",
        ),
        (INCLUDE + '[[override]]\nname = "x"\nfrobnicate = 1\n', PORTABLE, "unknown key 'frobnicate'"),
        ("[defaults]\nsummary = 'x'\n", PORTABLE, "unknown key 'summary'"),
        ("defaults = 3\n", PORTABLE, "'defaults' must be"),
        ("override = 3\n", PORTABLE, "'override' must be of type list"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, portable: str, message: str) -> None:
    if text.startswith(("defaults =", "override =")):
        (tmp_path / "hardpoint.toml").write_text(text + HEAD)
        with pytest.raises(ManifestError, match=r"hardpoint\.toml") as raised:
            read_manifest(tmp_path / "hardpoint.toml")
    else:
        with pytest.raises(ManifestError) as raised:
            read(tmp_path, text, portable)
    assert message in str(raised.value)


def test_one_of_several_packages_suffices() -> None:
    either = PackageRequirement(("no-such-kernels>=1", "packaging>=1"))
    assert either.spec == "packaging>=1"
    assert PackageRequirement(("no-such-kernels>=1", "packaging>=9999")).spec == "packaging>=9999"
    assert PackageRequirement(("no-such-kernels>=1", "nor-these")).spec == "no-such-kernels>=1"
