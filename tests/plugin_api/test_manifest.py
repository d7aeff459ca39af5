"""The static manifest: a whole valid one, and one clear error for everything that may be wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint_plugin_api import (
    FAMILIES,
    MANIFEST_SCHEMA,
    ApiVersion,
    ConfigKey,
    Contribution,
    DeviceInfo,
    Fp8Format,
    Manifest,
    ManifestError,
    parse_manifest,
    read_manifest,
)
from hardpoint_plugin_api.requirements import (
    ArchRequirement,
    FeatureRequirement,
    OneOfRequirement,
    PackageRequirement,
)

WHOLE = """
schema = 1
api = "0.3"
[plugin]
name = "acme"
after = ["cpu", "rival"]
[config.workspace_mib]
type = "int"
default = 256
help = "Scratch memory for the paged kernel."
[config.ratio]
type = "float"
default = 1
[[device]]
name = "acme-1"
arch = "acme1"
memory_gib = 64
[[device]]
name = "acme-2-on-cpu"
platform = "cpu"
torch_type = "privateuseone"
arch = "acme2"
memory_gib = 0.5
accelerator = false
dtypes = ["bfloat16"]
features = ["tensor_cores", "graphs"]
fp8_dtype = "float8_e4m3fnuz"
fp8_max = 224
[[contribution]]
family = "platform"
name = "acme"
target = "acme_hp.platform:AcmePlatform"
[[contribution]]
family = "attention"
name = "acme_paged"
target = "acme_hp.attention:Backend.paged"
platforms = ["acme"]
priority = 100
summary = "Paged attention for Acme cards"
layout = "acme_tiled"
replaces = "reference"
requires = [{ package = "acme-kernels>=2" }, { arch = ["acme1"] }, { dtype = ["bfloat16"] }, { head_size = [64, 128] }]
[[contribution]]
family = "op"
of = "rms_norm"
name = "acme_rms_norm"
target = "acme_hp.norm:rms_norm"
form = "out"
"""

PARSED = Manifest(
    name="acme",
    api=ApiVersion(0, 3),
    after=("cpu", "rival"),
    config=(
        ConfigKey("workspace_mib", "int", 256, "Scratch memory for the paged kernel."),
        ConfigKey("ratio", "float", 1.0),
    ),
    devices=(
        DeviceInfo("acme", "acme-1", "acme", "acme1", memory_bytes=64 * 2**30, present=False),
        DeviceInfo(
            platform="cpu",
            name="acme-2-on-cpu",
            torch_type="privateuseone",
            arch="acme2",
            memory_bytes=2**29,
            accelerator=False,
            dtypes=frozenset({"bfloat16"}),
            features=frozenset({"tensor_cores", "graphs"}),
            fp8=Fp8Format("float8_e4m3fnuz", 224.0),
            present=False,
        ),
    ),
    contributions=(
        Contribution("platform", "acme", "acme_hp.platform:AcmePlatform"),
        Contribution(
            family="attention",
            name="acme_paged",
            target="acme_hp.attention:Backend.paged",
            of="causal",
            platforms=("acme",),
            priority=100,
            summary="Paged attention for Acme cards",
            requires=(
                PackageRequirement(("acme-kernels>=2",)),
                ArchRequirement(("acme1",)),
                OneOfRequirement("dtype", ("bfloat16",)),
                OneOfRequirement("head_size", (64, 128)),
            ),
            replaces="reference",
            layout="acme_tiled",
        ),
        Contribution("op", "acme_rms_norm", "acme_hp.norm:rms_norm", of="rms_norm", form="out"),
    ),
)

HEAD = 'schema = 1\napi = "0.2"\n[plugin]\nname = "acme"\n'
CONTRIBUTION = '[[contribution]]\nfamily = "linear"\nname = "acme_matmul"\ntarget = "acme_hp:Matmul"\n'
OP = '[[contribution]]\nfamily = "op"\nof = "norm"\nname = "acme_norm"\ntarget = "acme_hp:norm"\n'
DEVICE = '[[device]]\nname = "acme-1"\nplatform = "cpu"\narch = "acme1"\n'


def refused(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, "place/hardpoint.toml")
    assert str(caught.value).startswith("place/hardpoint.toml: ")
    return str(caught.value)


def test_a_whole_manifest() -> None:
    assert parse_manifest(WHOLE, "test") == PARSED


def test_the_least_manifest() -> None:
    assert parse_manifest(HEAD, "test") == Manifest("acme", ApiVersion(0, 2))


def test_features_that_are_not_claimed_are_required_to_be_absent() -> None:
    platform, attention, _ = PARSED.contributions
    assert platform.requirements == (FeatureRequirement(()),)
    assert attention.requirements == (*attention.requires, FeatureRequirement(()))
    claiming = Contribution("attention", "a", "b:c", requires=(FeatureRequirement(("sinks",)),))
    assert claiming.requirements == claiming.requires


def test_titles_and_slots() -> None:
    _, attention, op = PARSED.contributions
    assert (str(attention), attention.slot) == ("attention causal: acme_paged", ("attention", "causal"))
    assert (str(op), op.slot) == ("op rms_norm: acme_rms_norm", ("op", "rms_norm"))


def test_reading_files(tmp_path: Path) -> None:
    path = tmp_path / "hardpoint.toml"
    path.write_text(WHOLE, encoding="utf-8")
    assert read_manifest(path) == PARSED
    with pytest.raises(ManifestError, match=r"absent\.toml: cannot be read"):
        read_manifest(tmp_path / "absent.toml")
    path.write_bytes(b"# \xff\n" + WHOLE.encode())
    with pytest.raises(ManifestError, match=r"hardpoint\.toml: cannot be read"):
        read_manifest(path)
    path.write_text("schema = ", encoding="utf-8")
    with pytest.raises(ManifestError, match=r"hardpoint\.toml: not valid TOML"):
        read_manifest(path)


# The head


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("schema = 1\nschema = 1\n", "not valid TOML"),
        ('api = "0.2"\n[plugin]\nname = "acme"', "'schema' is missing or no positive number; write schema = 1"),
        (HEAD.replace("schema = 1", 'schema = "1"'), "'schema' is missing or no positive number"),
        (HEAD.replace("schema = 1", "schema = true"), "'schema' is missing or no positive number"),
        (HEAD.replace("schema = 1", "schema = 0"), "'schema' is missing or no positive number"),
        ('schema = 1\n[plugin]\nname = "acme"', "key 'api' is missing"),
        (HEAD.replace('"0.2"', "0.2"), "'api' must be of type str, got 0.2"),
        (HEAD.replace("0.2", "0.2.1"), "API version '0.2.1' is not of the form MAJOR.MINOR"),
        ('schema = 1\napi = "0.2"\n', "[plugin]: key 'name' is missing"),
        ('schema = 1\napi = "0.2"\nplugin = "acme"\n', "'plugin' must be of type dict"),
        (HEAD.replace('"acme"', '"Acme"'), "name = 'Acme' must be lower-case letters"),
        (HEAD.replace('"acme"', '"1acme"'), "a letter first"),
        (HEAD.replace('"acme"', '"ac-me"'), "must be lower-case letters, digits and underscores"),
        (HEAD.replace('"acme"', '"acme\\n"'), "must be lower-case letters"),
        (HEAD.replace('"acme"', '""'), "must be lower-case letters"),
        (HEAD + 'after = "cpu"\n', "'after' must be of type list"),
        (HEAD + "after = [1]\n", "'after' must be a list of texts, got [1]"),
        (HEAD + 'aftr = ["cpu"]\n', "[plugin]: unknown key 'aftr'; did you mean 'after'?"),
        ("contributions = []\n" + HEAD, "unknown key 'contributions'; did you mean 'contribution'?"),
        ("zzz = 1\n" + HEAD, "unknown key 'zzz'; it is misspelt, or the plugin is newer than this Hardpoint"),
        ("contribution = 3\n" + HEAD, "'contribution' must be of type list"),
        ("contribution = [3]\n" + HEAD, "write [[contribution]]"),
        ("device = [3]\n" + HEAD, "write [[device]]"),
        (HEAD + "[device]\n", "'device' must be of type list"),
    ],
)
def test_a_bad_head(text: str, fact: str) -> None:
    assert fact in refused(text)


def test_a_newer_schema_says_how_to_upgrade() -> None:
    """Before anything else of it is looked at: the rest may mean something new."""
    message = refused(f"schema = {MANIFEST_SCHEMA + 1}\nunheard_of = true\n")
    assert f"manifest schema {MANIFEST_SCHEMA + 1} is newer than this host reads (up to {MANIFEST_SCHEMA})" in message
    assert "pip install --upgrade hardpoint-plugin-api hardpoint-core" in message


# Contributions


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (CONTRIBUTION + "prioriti = 3\n", "unknown key 'prioriti'; did you mean 'priority'?"),
        (CONTRIBUTION.replace("linear", "liner"), "unknown family 'liner'; did you mean 'linear'?"),
        (CONTRIBUTION.replace("linear", "zebra"), "unknown family 'zebra'; known: all2all, attention,"),
        (CONTRIBUTION.replace('family = "linear"', ""), "key 'family' is missing"),
        (CONTRIBUTION.replace('"linear"', "3"), "'family' must be of type str, got 3"),
        (CONTRIBUTION + 'of = "qkv"\n', "family 'linear' has no 'of'; remove the key"),
        (OP.replace('of = "norm"', ""), "family 'op' needs 'of': which one it implements"),
        (OP.replace('"norm"', "3"), "'of' must be of type str, got 3"),
        (CONTRIBUTION.replace('name = "acme_matmul"', ""), "key 'name' is missing"),
        (CONTRIBUTION.replace("acme_matmul", "acme+pad64"), "name = 'acme+pad64' must be lower-case letters"),
        (CONTRIBUTION.replace('target = "acme_hp:Matmul"', ""), "key 'target' is missing"),
        (CONTRIBUTION.replace(":Matmul", ".Matmul"), "must be of the form 'package.module:attribute'"),
        (CONTRIBUTION.replace(":Matmul", ":"), "target 'acme_hp:' must be of the form"),
        (CONTRIBUTION.replace("acme_hp:", ":"), "target ':Matmul' must be of the form"),
        (CONTRIBUTION.replace(":Matmul", ":Matmul()"), "must be of the form"),
        (CONTRIBUTION.replace(":Matmul", ":a:b"), "must be of the form"),
        (CONTRIBUTION.replace("acme_hp:", ".acme_hp:"), "must be of the form"),
        (CONTRIBUTION + 'platforms = "cpu"\n', "'platforms' must be of type list"),
        (CONTRIBUTION + "platforms = [1]\n", "'platforms' must be a list of texts"),
        (CONTRIBUTION + 'priority = "high"\n', "'priority' must be of type int, got 'high'"),
        (CONTRIBUTION + "priority = true\n", "'priority' must be of type int, got True"),
        (CONTRIBUTION + "priority = 1.5\n", "'priority' must be of type int, got 1.5"),
        (CONTRIBUTION + "summary = 3\n", "'summary' must be of type str"),
        (CONTRIBUTION + "layout = 3\n", "'layout' must be of type str"),
        (CONTRIBUTION + "replaces = 3\n", "'replaces' must be of type str"),
        (OP + 'form = "inplace"\n', "form 'inplace' is not one of functional, out, factory"),
        (CONTRIBUTION + 'requires = { arch = "x" }\n', "'requires' must be of type list"),
        (CONTRIBUTION + 'requires = ["arch"]\n', "'requires' must be a list of tables"),
        (CONTRIBUTION + "requires = [{ tokens = { max = 8 } }, { tokens = { min = 2 } }]\n", "more than once"),
        (CONTRIBUTION + "preferred = [{ priority = 3 }]\n", "'requires' is missing: a preference without it"),
        (
            CONTRIBUTION + "preferred = [{ requires = [{ arch = ['a'] }] }]\n",
            "1: key 'priority' is missing",
        ),
        (CONTRIBUTION + "preferred = [{ prio = 3 }]\n", "[[preferred]] 1: unknown key 'prio'"),
        (CONTRIBUTION + "preferred = 3\n", "'preferred' must be of type list"),
    ],
)
def test_a_bad_contribution(text: str, fact: str) -> None:
    message = refused(HEAD + text)
    assert fact in message
    assert "[[contribution]] " in message


def test_the_bad_one_of_several_is_named() -> None:
    message = refused(HEAD + CONTRIBUTION + OP + "priority = false\n")
    assert "[[contribution]] 'acme_norm': 'priority' must be" in message
    nameless = OP.replace('name = "acme_norm"', "")
    assert "[[contribution]] 2: key 'name' is missing" in refused(HEAD + CONTRIBUTION + nameless)


@pytest.mark.parametrize("form", ["functional", "out", "factory"])
def test_forms(form: str) -> None:
    (op,) = parse_manifest(HEAD + OP + f'form = "{form}"\n', "test").contributions
    assert op.form == form
    assert parse_manifest(HEAD + OP, "test").contributions[0].form == "functional"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_contributed_to(name: str) -> None:
    family = FAMILIES[name]
    for of in [kind.of for kind in family.kinds] or ["thing" if family.has_of else None]:
        text = HEAD + CONTRIBUTION.replace("linear", name) + (f'of = "{of}"\n' if of else "")
        (made,) = parse_manifest(text, "test").contributions
        assert made.slot == (name, of)
        assert (family.workload_of(of).family, family.workload_of(of).of) == (name, of if family.kinds else None)


def test_a_contribution_to_attention_may_leave_its_kind_out() -> None:
    text = HEAD + CONTRIBUTION.replace("linear", "attention")
    assert parse_manifest(text, "test").contributions[0].slot == ("attention", "causal")
    with pytest.raises(ManifestError, match=r"unknown 'of' for family 'attention' 'casual'; did you mean 'causal'\?"):
        parse_manifest(text + 'of = "casual"\n', "test")


# Config keys


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [("int", "8", 8), ("float", "0.5", 0.5), ("float", "2", 2.0), ("bool", "true", True), ("str", '""', "")],
)
def test_config_defaults(kind: str, default: str, value: object) -> None:
    (key,) = parse_manifest(HEAD + f'[config.tile]\ntype = "{kind}"\ndefault = {default}\n', "test").config
    assert (key.name, key.type, key.default, key.help) == ("tile", kind, value, "")
    assert type(key.default) is type(value)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ('[config.tile]\ntype = "int"\n', "key 'default' is missing"),
        ("[config.tile]\ndefault = 3\n", "key 'type' is missing"),
        ('[config.tile]\ntype = "integer"\ndefault = 3\n', "type 'integer' is not one of int, float, bool, str"),
        ('[config.tile]\ntype = "int"\ndefault = 0.5\n', "default is of type int, got 0.5"),
        ('[config.tile]\ntype = "int"\ndefault = true\n', "default is of type int, got True"),
        ('[config.tile]\ntype = "int"\ndefault = "many"\n', "default is of type int, got 'many'"),
        ('[config.tile]\ntype = "float"\ndefault = true\n', "default is of type float, got True"),
        ('[config.tile]\ntype = "bool"\ndefault = 1\n', "default is of type bool, got 1"),
        ('[config.tile]\ntype = "bool"\ndefault = "maybe"\n', "default is true or false, got 'maybe'"),
        ('[config.tile]\ntype = "str"\ndefault = 3\n', "default is of type str, got 3"),
        ('[config.tile]\ntype = "int"\ndefault = [3]\n', "default is of type int, got [3]"),
        ('[config.tile]\ntype = "int"\ndefault = 3\nhlep = ""\n', "unknown key 'hlep'; did you mean 'help'?"),
        ('[config.tile]\ntype = "int"\ndefault = 3\nhelp = 3\n', "'help' must be of type str"),
        ('[config.Tile]\ntype = "int"\ndefault = 3\n', "key 'Tile' must be lower-case letters"),
        ("[config]\ntile = 3\n", "'tile' must be of type dict, got 3"),
    ],
)
def test_a_bad_config_key(text: str, fact: str) -> None:
    message = refused(HEAD + text)
    assert fact in message
    assert "[config]" in message


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        (ConfigKey("k", "int", 0), "256", 256),
        (ConfigKey("k", "int", 0), "-3", -3),
        (ConfigKey("k", "int", 0), 7, 7),
        (ConfigKey("k", "float", 0.0), "0.25", 0.25),
        (ConfigKey("k", "float", 0.0), "1e-3", 0.001),
        (ConfigKey("k", "float", 0.0), 3, 3.0),
        (ConfigKey("k", "bool", False), "true", True),
        (ConfigKey("k", "bool", False), "Yes", True),
        (ConfigKey("k", "bool", False), "ON", True),
        (ConfigKey("k", "bool", False), "1", True),
        (ConfigKey("k", "bool", True), "off", False),
        (ConfigKey("k", "bool", True), "0", False),
        (ConfigKey("k", "bool", True), "no", False),
        (ConfigKey("k", "bool", True), "False", False),
        (ConfigKey("k", "bool", True), False, False),
        (ConfigKey("k", "str", ""), "256", "256"),
        (ConfigKey("k", "str", ""), "true", "true"),
    ],
)
def test_values_from_flags_and_files(key: ConfigKey, given: object, value: object) -> None:
    found = key.parse(given, "--acme.k")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "given", "fact"),
    [
        (ConfigKey("k", "int", 0), "1.5", "--acme.k is of type int, got '1.5'"),
        (ConfigKey("k", "int", 0), "", "--acme.k is of type int, got ''"),
        (ConfigKey("k", "int", 0), 1.0, "--acme.k is of type int, got 1.0"),
        (ConfigKey("k", "int", 0), True, "--acme.k is of type int, got True"),
        (ConfigKey("k", "float", 0.0), "fast", "--acme.k is of type float, got 'fast'"),
        (ConfigKey("k", "float", 0.0), None, "--acme.k is of type float, got None"),
        (ConfigKey("k", "bool", False), "2", "--acme.k is true or false, got '2'"),
        (ConfigKey("k", "bool", False), 1, "--acme.k is of type bool, got 1"),
        (ConfigKey("k", "str", ""), 3, "--acme.k is of type str, got 3"),
        (ConfigKey("k", "str", ""), ["a"], "--acme.k is of type str, got ['a']"),
    ],
)
def test_values_that_do_not_fit(key: ConfigKey, given: object, fact: str) -> None:
    with pytest.raises(ValueError, match=r"--acme\.k") as caught:
        key.parse(given, "--acme.k")
    assert str(caught.value) == fact


# Device presets


def test_a_preset_is_of_the_plugins_own_platform() -> None:
    own = '[[contribution]]\nfamily = "platform"\nname = "acme_dev"\ntarget = "acme_hp:P"\n'
    text = HEAD + DEVICE.replace('platform = "cpu"\n', "")
    (device,) = parse_manifest(text + own, "test").devices
    assert (device.platform, device.torch_type, device.present) == ("acme_dev", "acme_dev", False)
    (elsewhere,) = parse_manifest(HEAD + DEVICE + own, "test").devices
    assert elsewhere.platform == "cpu"
    assert "[[device]] 'acme-1': key 'platform' is missing" in refused(text)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (DEVICE.replace('arch = "acme1"\n', ""), "key 'arch' is missing"),
        (DEVICE.replace('name = "acme-1"\n', ""), "[[device]] 1: key 'name' is missing"),
        (DEVICE + "memory = 3\n", "unknown key 'memory'; did you mean 'memory_gib'?"),
        (DEVICE + 'memory_gib = "64"\n', "'memory_gib' must be a number of zero or more, got '64'"),
        (DEVICE + "memory_gib = -1\n", "'memory_gib' must be a number of zero or more, got -1"),
        (DEVICE + "memory_gib = true\n", "'memory_gib' must be a number of zero or more, got True"),
        (DEVICE + "memory_gib = inf\n", "'memory_gib' must be a number of zero or more, got inf"),
        (DEVICE + "memory_gib = nan\n", "'memory_gib' must be a number of zero or more, got nan"),
        (DEVICE + "accelerator = 1\n", "'accelerator' must be of type bool, got 1"),
        (DEVICE + 'dtypes = "float32"\n', "'dtypes' must be of type list"),
        (DEVICE + "features = [1]\n", "'features' must be a list of texts"),
        (DEVICE + "torch_type = 1\n", "'torch_type' must be of type str"),
        (DEVICE + "fp8_dtype = 1\n", "'fp8_dtype' must be of type str"),
        (DEVICE + 'fp8_dtype = "float8_e4m3"\n', "unknown element 'float8_e4m3'; did you mean"),
        (
            DEVICE + 'fp8_dtype = "float8_e4m3fnuz"\nfp8_max = 240\n',
            "'fp8_dtype' 'float8_e4m3fnuz': float8_e4m3fnuz is rounded to at most 224, got max 240",
        ),
        (DEVICE + 'fp8_dtype = "f8"\nfp8_max = "big"\n', "'fp8_max' must be a number of zero or more, got 'big'"),
        (DEVICE + 'fp8_dtype = "f8"\nfp8_max = [448]\n', "'fp8_max' must be a number of zero or more, got [448]"),
    ],
)
def test_a_bad_preset(text: str, fact: str) -> None:
    message = refused(HEAD + text)
    assert fact in message
    assert "[[device]] " in message
