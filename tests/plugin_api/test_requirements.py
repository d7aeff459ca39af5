"""Every kind of requirement: how it is written, when it holds, and what it says when it does not."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest

from hardpoint_plugin_api import (
    FAMILIES,
    ApiVersion,
    AttentionWorkload,
    Contribution,
    DeviceInfo,
    ExpertsWorkload,
    Feature,
    Fp8Format,
    LinearWorkload,
    ManifestError,
    OpWorkload,
    QuantSpec,
    ScalarValue,
    Scale,
    TokensRequirement,
    Workload,
    parse_requirement,
    requirements,
)
from hardpoint_plugin_api.requests import FEATURE_SINCE
from hardpoint_plugin_api.requirements import FeatureRequirement, HeadMultipleRequirement, OneOfRequirement
from tests.plugin_api.requirement_checks import TOY, check, facts, parsed

E4M3 = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (128, 128)),))
DYNAMIC = QuantSpec("float8_e4m3fn", scales=(Scale("float32", (1, 128)),), static=False)
NVFP4 = QuantSpec("float4_e2m1", scales=(Scale("float8_e4m3fn", (1, 16)), Scale("float32", (-1, -1))))
PLAIN = QuantSpec("bfloat16")

FNUZ = replace(TOY, fp8=Fp8Format("float8_e4m3fnuz", 224.0))
"""A device whose 8-bit float is not the common one."""


@pytest.mark.parametrize("element", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_fp8_is_the_devices_own_format(element: str) -> None:
    """As the element of a weight, of an activation, of one and not of the other, and of a cache; never of scales."""
    row = QuantSpec(element, scales=(Scale("float32", (1, -1)),))
    pair, plain = (row, replace(row, static=False)), QuantSpec("bfloat16")
    refused = "spec" if element == "float8_e4m3fn" else None

    def codes(written: str, *specs: QuantSpec) -> list[str | None]:
        weight, activation = specs
        workload = LinearWorkload(dtype="bfloat16", in_features=64, out_features=64, spec=(weight, activation))
        requirement = parse_requirement({"spec": [written]}, FAMILIES["linear"], "x")
        reasons = [check(requirement, workload, device) for device in (FNUZ, TOY)]
        return [reason.code if reason else None for reason in reasons]

    assert TOY.fp8 is None
    assert codes("fp8@float32:row/fp8@float32:row+dynamic", *pair) == [refused, "spec"]
    assert codes("fp8@float32:row/*", row, plain) == [refused, "spec"]
    assert codes("*/fp8@float32:row+dynamic", plain, pair[1]) == [refused, "spec"]
    scaled = QuantSpec("int8", scales=(Scale("fp8", (1, 16)),))
    assert codes("int8@fp8:1x16/*", scaled, plain) == [None, None]
    cache = AttentionWorkload(head_size=64, kv_dtype=element)
    requirement = parse_requirement({"kv_dtype": ["fp8", "int8"]}, FAMILIES["attention"], "x")
    reason = check(requirement, cache, FNUZ)
    assert (reason and reason.supported) == ("float8_e4m3fnuz, int8" if refused else None)
    assert facts(check(requirement, cache)) == ("kv-dtype", element, "fp8, int8")


# Of the request


@pytest.mark.parametrize(
    ("family", "key", "value", "good", "bad", "wanted", "supported"),
    [
        ("attention", "dtype", ["bfloat16", "float16"], "float16", "float32", "float32", "bfloat16, float16"),
        ("attention", "dtype", "bfloat16", "bfloat16", "bfloat", "bfloat", "bfloat16"),
        ("attention", "kv_dtype", ["bfloat16"], "bfloat16", "float8_e4m3fn", "float8_e4m3fn", "bfloat16"),
        ("attention", "head_size", [64, 128], 128, 80, "80", "64, 128"),
        ("attention", "head_size", 64, 64, 128, "128", "64"),
        ("attention", "block_size", [16], 16, 32, "32", "16"),
        ("op", "layout", ["acme_tiled"], "acme_tiled", "plain", "plain", "acme_tiled"),
        ("op", "activation", ["silu", "gelu"], "gelu", "relu", "relu", "silu, gelu"),
        ("experts", "routing", ["topk"], "topk", "grouped", "grouped", "topk"),
        ("experts", "parallel", ["tp"], "tp", "ep", "ep", "tp"),
        ("experts", "activation", ["silu"], "silu", "gelu", "gelu", "silu"),
        ("experts", "format", ["batched"], "batched", "standard", "standard", "batched"),
        ("all2all", "parallel", ["ep"], "ep", "tp", "tp", "ep"),
    ],
)
def test_a_field_is_one_of_the_values(
    family: str, key: str, value: object, good: object, bad: object, wanted: str, supported: str
) -> None:
    requirement = parsed(family, **{key: value})

    def workload(**values: Any) -> Workload:
        return FAMILIES[family].workload(**values)

    assert check(requirement, workload(**{key: good})) is None
    assert facts(check(requirement, workload(**{key: bad}))) == (key.replace("_", "-"), wanted, supported)
    assert check(requirement, workload()) is None, "a field that the request leaves open rejects nobody"


def test_head_multiple() -> None:
    requirement = parsed(head_multiple=64)
    assert requirement == HeadMultipleRequirement(64)
    for size in (64, 128, 576):
        assert check(requirement, AttentionWorkload(head_size=size)) is None
    assert check(requirement, AttentionWorkload()) is None
    reason = check(requirement, AttentionWorkload(head_size=80))
    assert facts(reason) == ("head-multiple", "80", "multiples of 64")


@pytest.mark.parametrize(
    ("table", "told", "wanted", "supported"),
    [
        ({"interleaved": False}, {"interleaved": False}, None, None),
        ({"interleaved": False}, {"interleaved": True}, "True", "False"),
        ({"interleaved": [False, True]}, {"interleaved": True}, None, None),
        ({"eps": [1e-5, 1e-6]}, {"eps": 1e-6, "interleaved": True}, None, None),
        ({"eps": 0}, {"eps": 0.0}, None, None),
        ({"eps": 1e-5}, {"eps": 1e-6}, "1e-06", "1e-05"),
        ({"interleaved": True}, {"interleaved": 1}, "1", "True"),
        ({"scoring": ["softmax"]}, {"scoring": "sigmoid"}, "sigmoid", "softmax"),
        ({"interleaved": False}, {"eps": 1e-6}, "eps", "interleaved = False"),
        ({"interleaved": False}, {}, None, "interleaved = False"),
    ],
)
def test_a_scalar_of_the_op(
    table: dict[str, object], told: dict[str, ScalarValue], wanted: str | None, supported: str | None
) -> None:
    """A value that the caller does not give may come at any time, so that it is rejected, too."""
    reason = check(parsed("op", scalar=table), OpWorkload(of="rope", scalars=tuple(told.items())))
    assert facts(reason) == (None if supported is None else ("scalar", wanted, supported))


def test_a_field_of_the_workload_that_is_written_as_a_scalar() -> None:
    """The author of a plugin reads how to write it."""
    reason = check(parsed("op", scalar={"activation": "silu"}), OpWorkload(of="act_and_mul", activation="silu"))
    assert reason is not None
    assert reason.fix == "in the plugin's manifest, write { activation = ... } in place of { scalar = ... }"


@pytest.mark.parametrize("value", [True, "interleaved", {}, {"a": 1, "b": 2}, {"a": []}, {"a": [{}]}, {"a": None}])
def test_a_malformed_scalar(value: object) -> None:
    with pytest.raises(ManifestError, match=r"requirement 'scalar': expected .*; got"):
        parsed("op", scalar=value)


@pytest.mark.parametrize(
    ("claimed", "used", "missing"),
    [
        ([], [], None),
        (["sinks"], [], None),
        (["sinks"], ["sinks"], None),
        (["sinks", "alibi"], ["alibi"], None),
        ([], ["sinks"], "sinks"),
        (["alibi"], ["sinks", "alibi"], "sinks"),
        ("alibi", ["sinks", "soft_cap"], "sinks, soft_cap"),
    ],
)
def test_features_in_use_must_be_claimed(claimed: object, used: list[str], missing: str | None) -> None:
    workload = AttentionWorkload(features=frozenset(map(Feature, used)))
    reason = check(parsed(feature=claimed), workload)
    assert (reason is None) == (missing is None)
    if reason:
        names = [claimed] if isinstance(claimed, str) else claimed
        assert isinstance(names, list)
        assert facts(reason) == ("feature", ", ".join(sorted(used)), ", ".join(names) or None)
        assert reason.message == f"{missing} not supported"


def test_a_feature_newer_than_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rejects the plugin only where it is in use, and says that the plugin could not have known."""
    monkeypatch.setitem(FEATURE_SINCE, Feature.SINKS, ApiVersion(0, 3))
    requirement = FeatureRequirement(("alibi",))
    sinks = AttentionWorkload(features=frozenset({Feature.SINKS, Feature.ALIBI}))
    reason = check(requirement, sinks, api=ApiVersion(0, 2))
    assert facts(reason) == ("predates-feature", "sinks (API 0.3)", "API 0.2")
    assert reason is not None
    assert reason.fix == "upgrade the plugin"
    for version in (ApiVersion(0, 3), ApiVersion(0, 4), ApiVersion(1, 0)):
        assert facts(check(requirement, sinks, api=version)) == ("feature", "alibi, sinks", "alibi")
    alibi = AttentionWorkload(features=frozenset({Feature.ALIBI}))
    assert check(requirement, alibi, api=ApiVersion(0, 2)) is None
    claimed_early = FeatureRequirement(("sinks", "alibi"))
    assert check(claimed_early, sinks, api=ApiVersion(0, 2)) is None


def test_every_feature_has_its_version() -> None:
    assert FEATURE_SINCE.keys() == set(Feature)


@pytest.mark.parametrize(
    ("pair", "spec", "ok"),
    [
        ("bfloat16/bfloat16", (PLAIN, PLAIN), True),
        ("bfloat16/bfloat16", (QuantSpec("float32"), PLAIN), False),
        ("*", (E4M3, DYNAMIC), True),
        ("*/*", (E4M3, DYNAMIC), True),
        ("float8_e4m3fn@float32:128x128/float8_e4m3fn@float32:1x128+dynamic", (E4M3, DYNAMIC), True),
        ("float8_e4m3fn@float32:128x128/float8_e4m3fn@float32:1x128", (E4M3, DYNAMIC), False),
        ("float8_e4m3fn@float32:1x128/float8_e4m3fn@float32:128x128+dynamic", (E4M3, DYNAMIC), False),
        ("float8_e4m3fn@float32:1x128/bfloat16", (E4M3, PLAIN), False),
        ("float8_e4m3fn@float32:128x128/*", (E4M3, DYNAMIC), True),
        ("float8*@*:*/float8*@*:1x*+dynamic", (E4M3, DYNAMIC), True),
        ("float8*@*:*/float8*@*:1x*+*", (E4M3, DYNAMIC), True),
        ("float8*/float8*+dynamic", (E4M3, DYNAMIC), False),
        ("*@*:*/*", (PLAIN, PLAIN), False),
        ("float4_e2m1@float8_e4m3fn:1x16@float32:all/bfloat16", (NVFP4, PLAIN), True),
        ("float4_e2m1@*:*/bfloat16", (NVFP4, PLAIN), False),
        ("float4_e2m1@float8_e4m3fn:1x16@float32:all/bfloat16", (E4M3, PLAIN), False),
        ("float8_e4m3fn@float32:*/bfloat16", (E4M3, PLAIN), True),
        ("float8_e4m3fn@float32:row/bfloat16", (E4M3, PLAIN), False),
        ("BFLOAT16/bfloat16", (PLAIN, PLAIN), False),
    ],
)
def test_spec_pairs(pair: str, spec: tuple[QuantSpec, QuantSpec], ok: bool) -> None:
    reason = check(parsed("linear", spec=[pair]), LinearWorkload(spec=spec))
    assert (reason is None) == ok
    if reason:
        assert facts(reason) == ("spec", f"{spec[0]}/{spec[1]}", pair)


def test_experts_matrices_of_two_specs() -> None:
    """Both pairs are checked, and a kernel without the feature is refused whichever specs it claims."""
    pairs = parsed("experts", spec=["float8_e4m3fn@float32:*/bfloat16", "bfloat16/bfloat16"])
    mixed = ExpertsWorkload(spec=(E4M3, PLAIN), w2_spec=(PLAIN, PLAIN), features=frozenset({Feature.W2_SPEC}))
    assert (mixed.spec_of("w13"), mixed.spec_of("w2")) == ((E4M3, PLAIN), (PLAIN, PLAIN))
    assert check(pairs, mixed) is None
    refused = check(pairs, replace(mixed, w2_spec=(NVFP4, PLAIN)))
    assert facts(refused) == ("spec", f"{NVFP4}/bfloat16", "float8_e4m3fn@float32:*/bfloat16, bfloat16/bfloat16")
    assert mixed.key().endswith("w2_spec=bfloat16/bfloat16")
    assert facts(check(parsed("experts", feature=["expert_bias"]), mixed)) == ("feature", "w2_spec", "expert_bias")
    assert check(parsed("experts", feature=["w2_spec"]), mixed) is None
    same = ExpertsWorkload(spec=(E4M3, PLAIN))
    assert same.spec_of("w2") == same.spec_of("w13")


def test_specs_of_other_shapes() -> None:
    pairs = parsed("experts", spec=["int4/bfloat16", "bfloat16/bfloat16"])
    assert check(pairs, ExpertsWorkload(spec=(PLAIN, PLAIN))) is None
    assert check(pairs, ExpertsWorkload()) is None
    single = parsed("op", spec="float8_e4m3fn@float32:1x128+dynamic")
    assert check(single, OpWorkload(spec=DYNAMIC)) is None
    assert facts(check(single, OpWorkload(spec=E4M3))) == (
        "spec",
        "float8_e4m3fn@float32:128x128",
        "float8_e4m3fn@float32:1x128+dynamic",
    )


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({"max": 8}, (1, 8, None)),
        ({"min": 9}, (9, None, None)),
        ({"min": 4, "max": 4}, (4, 4, None)),
        ({"phase": "decode"}, (1, None, "decode")),
        ({"min": 2, "max": 64, "phase": "prefill"}, (2, 64, "prefill")),
    ],
)
def test_tokens_reject_nothing_by_themselves(value: object, parts: tuple[Any, ...]) -> None:
    requirement = parsed(tokens=value)
    assert requirement == TokensRequirement(*parts)
    assert check(requirement) is None


# Of the device


@pytest.mark.parametrize(
    ("globs", "arch", "ok"),
    [
        (["sm_90"], "sm_90", True),
        (["sm_90"], "sm_90a", False),
        (["sm_90*"], "sm_90a", True),
        (["sm_100", "sm_120"], "sm_120", True),
        (["sm_1?0"], "sm_100", True),
        (["sm_1?0"], "sm_90", False),
        (["gfx94[02]"], "gfx942", True),
        (["gfx94[02]"], "gfx941", False),
        ("gfx9*", "gfx1100", False),
        (["SM_90"], "sm_90", False),
        (["*"], "anything", True),
    ],
)
def test_architectures_are_globs_and_sets(globs: str | list[str], arch: str, ok: bool) -> None:
    device = DeviceInfo("toy", "Toy 1", "cpu", arch)
    supported = globs if isinstance(globs, str) else ", ".join(globs)
    assert facts(check(parsed(arch=globs), device=device)) == (None if ok else ("arch", arch, supported))


def test_there_is_no_order_of_architectures() -> None:
    device = DeviceInfo("toy", "Toy 1", "cpu", "sm_120")
    assert facts(check(parsed(arch=[">=sm_100"]), device=device)) == ("arch", "sm_120", ">=sm_100")


def test_device_features() -> None:
    assert check(parsed(device_feature=["graphs", "tensor_cores"])) is None
    reason = check(parsed(device_feature=["tma", "graphs", "clusters"]))
    assert facts(reason) == ("device-feature", "tma, graphs, clusters", "graphs, tensor_cores")
    assert reason is not None
    assert reason.message == "the device lacks clusters, tma"
    bare = DeviceInfo("toy", "Toy 1", "cpu", "x")
    assert facts(check(parsed(device_feature="tma"), device=bare)) == ("device-feature", "tma", None)


# The written form


@pytest.mark.parametrize(
    ("family", "table", "fact"),
    [
        ("attention", {}, "a requirement has exactly one key, got []"),
        ("attention", {"dtype": "x", "arch": "y"}, "exactly one key, got ['arch', 'dtype']"),
        ("attention", {"from": "x"}, "exactly one key, got ['from']"),
        ("attention", {"head_sise": [64]}, "unknown requirement 'head_sise' (did you mean 'head_size'?)"),
        ("attention", {"zebra": 1}, "unknown requirement 'zebra'; if it is no misspelling, the plugin is newer"),
        ("attention", {"zebra": 1}, "pip install --upgrade hardpoint-core"),
        ("linear", {"head_size": [64]}, "requirement 'head_size' does not apply to family 'linear'"),
        ("linear", {"head_multiple": 64}, "requirement 'head_multiple' does not apply to family 'linear'"),
        ("attention", {"spec": "a/b"}, "requirement 'spec' does not apply to family 'attention'"),
        ("linear", {"spec": "int4@float32[1,128]/bfloat16"}, "is no spec: write ELEMENT@FORMAT:BLOCK"),
        ("attention", {"layout": "x"}, "requirement 'layout' does not apply to family 'attention'"),
        ("platform", {"dtype": "x"}, "requirement 'dtype' does not apply to family 'platform'"),
        ("attention", {"symbol": "a:b"}, "'symbol' needs 'from'"),
        ("attention", {"dtype": "x", "from": "y"}, "'symbol' needs 'from'"),
        ("attention", {"symbol": "a.b", "from": "y"}, "expected 'module:attribute', got 'a.b'"),
        ("attention", {"symbol": "a:", "from": "y"}, "expected 'module:attribute', got 'a:'"),
        ("attention", {"symbol": 3, "from": "y"}, "expected a text or a list of texts, got 3"),
        ("attention", {"symbol": "a:b", "from": 3}, "expected a text or a list of texts, got 3"),
        ("attention", {"dtype": 16}, "requirement 'dtype': expected a text or a list of texts, got 16"),
        ("attention", {"dtype": []}, "expected a text or a list of texts, got []"),
        ("attention", {"dtype": ["a", 1]}, "expected a text or a list of texts"),
        ("attention", {"arch": {"min": "sm_90"}}, "requirement 'arch': expected a text or a list of texts"),
        ("attention", {"head_size": "64"}, "requirement 'head_size': expected a whole number or a list of them"),
        ("attention", {"head_size": [64, True]}, "expected a whole number"),
        ("attention", {"head_size": True}, "expected a whole number"),
        ("attention", {"head_size": 64.0}, "expected a whole number"),
        ("attention", {"head_multiple": 0}, "expected a positive number, got 0"),
        ("attention", {"head_multiple": [64, 128]}, "requirement 'head_multiple': "),
        ("attention", {"package": "acme kernels >="}, "requirement 'package': "),
        ("attention", {"package": ["a", "b >="]}, "requirement 'package': "),
        ("attention", {"feature": [1]}, "requirement 'feature': expected a text"),
        ("attention", {"feature": ["softcap"]}, "unknown feature 'softcap' (did you mean 'soft_cap'?)"),
        ("linear", {"dtype": ["float23"]}, "unknown dtype 'float23' (did you mean 'float32'?)"),
        ("attention", {"kv_dtype": "fp7"}, "unknown dtype 'fp7' (did you mean 'fp8'?)"),
        ("attention", {"tokens": {}}, "expected a table of min, max, phase; got {}"),
        ("attention", {"tokens": 8}, "expected a table of min, max, phase; got 8"),
        ("attention", {"tokens": {"maximum": 8}}, "expected a table of min, max, phase"),
        ("attention", {"tokens": {"min": 0}}, "expected 1 <= min <= max"),
        ("attention", {"tokens": {"min": 9, "max": 8}}, "expected 1 <= min <= max"),
        ("attention", {"tokens": {"max": 0}}, "expected 1 <= min <= max"),
        ("attention", {"tokens": {"max": "8"}}, "expected 1 <= min <= max"),
        ("attention", {"tokens": {"max": True}}, "expected 1 <= min <= max"),
        ("attention", {"tokens": {"phase": "decoding"}}, "phase is 'prefill' or 'decode', got 'decoding'"),
        ("attention", {"tokens": {"phase": ["decode"]}}, "phase is 'prefill' or 'decode', got ['decode']"),
    ],
)
def test_what_is_written_wrongly(family: str, table: dict[str, object], fact: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_requirement(table, FAMILIES[family], "place: [[contribution]] 'x'")
    assert str(caught.value).startswith("place: [[contribution]] 'x': ")
    assert fact in str(caught.value)


def test_the_vocabulary_is_closed() -> None:
    """Another key takes another schema; each key is for exactly the families whose workload has its field."""
    values: dict[str, object] = {"head_size": 64, "block_size": 16, "dtype": "int8", "kv_dtype": "int8", "routing": "a"}
    values |= {"parallel": "a", "format": "a", "layout": "a", "activation": "a", "spec": "a/b"}
    values |= {"scalar": {"eps": 0.5}, "latent_size": 512, "rope_size": 64}
    fields_of = {"scalar": "scalars"}
    others = {"package", "symbol", "arch", "device_feature", "feature", "head_multiple", "tokens"}
    assert requirements._PARSERS.keys() == values.keys() | others
    kinds = [(family, kind) for family in FAMILIES.values() for kind in family.kinds or (family.workload,)]
    for (family, kind), (key, value) in itertools.product(kinds, values.items()):
        if fields_of.get(key, key) in {f.name for f in fields(kind)}:
            assert parse_requirement({key: value}, family, "here", kind.of)
        else:
            with pytest.raises(ManifestError, match="does not apply"):
                parse_requirement({key: value}, family, "here", kind.of)


def test_one_value_needs_no_list() -> None:
    assert parsed(dtype="bfloat16") == parsed(dtype=["bfloat16"]) == OneOfRequirement("dtype", ("bfloat16",))
    assert parsed(head_size=64) == parsed(head_size=[64]) == OneOfRequirement("head_size", (64,))


# The workloads' keys


def test_a_workloads_key_holds_what_is_set() -> None:
    features = frozenset({Feature.SINKS, Feature.ALIBI})
    workload = AttentionWorkload(dtype="float32", head_size=64, features=features)
    assert workload.key() == "features=alibi|sinks dtype=float32 head_size=64"
    assert AttentionWorkload().key() == ""
    assert OpWorkload(of="norm", dtype="float32").key() == "dtype=float32"
    assert OpWorkload(spec=DYNAMIC).key() == "spec=float8_e4m3fn@float32:1x128+dynamic"
    pair = LinearWorkload(spec=(E4M3, DYNAMIC))
    assert pair.key() == "spec=float8_e4m3fn@float32:128x128/float8_e4m3fn@float32:1x128+dynamic"


@pytest.mark.parametrize(
    ("family", "tokens", "message"),
    [
        ("layer", {"max": 8}, "does not apply to 'layer': it serves every step alike"),
        ("op", {"phase": "decode"}, "only attention tells phases apart; 'op' knows a step's size alone"),
        ("linear", {"max": 8, "phase": "decode"}, "only attention tells phases apart"),
    ],
)
def test_what_may_differ_from_step_to_step(family: str, tokens: dict[str, object], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_requirement({"tokens": tokens}, FAMILIES[family], "here")
    parse_requirement({"tokens": {"max": 8}}, FAMILIES["linear"], "here")
    parse_requirement({"tokens": {"phase": "decode"}}, FAMILIES["attention"], "here")


@pytest.mark.parametrize(("weight", "is_served"), [("bfloat16", True), ("int8", False)])
@pytest.mark.parametrize("family", ["linear", "experts"])
def test_a_matrix_product_without_spec_serves_plain_weights_alone(family: str, weight: str, is_served: bool) -> None:
    scales = () if weight == "bfloat16" else (Scale("float32", (1, -1)),)
    specs = (QuantSpec(weight, scales=scales), QuantSpec("bfloat16"))
    kinds: dict[str, type[LinearWorkload | ExpertsWorkload]] = {"linear": LinearWorkload, "experts": ExpertsWorkload}
    made = kinds[family](dtype="bfloat16", spec=specs)
    contribution = Contribution(family=family, name="any", target="acme:Any", requires=(FeatureRequirement(()),))
    reasons = [reason for need in contribution.requirements if (reason := check(need, made))]
    assert [reason.code for reason in reasons] == ([] if is_served else ["spec"])
