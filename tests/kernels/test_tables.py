"""Tuning tables: how files are read, whose rules come first, and that shipped ones say what was measured."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hardpoint.conformance.site import Site
from hardpoint.kernels import block_experts, gemm, gemv, tiled_experts, weight_only
from hardpoint.kernels.attention import TritonAttention, TritonQuantizedCacheAttention
from hardpoint.kernels.attention_tuning import Tables, Tiles
from hardpoint.kernels.block_experts import BlockExpertTiles
from hardpoint.kernels.experts_tiling import rule_table
from hardpoint.kernels.gemm import GemmConfiguration, TritonGemm, gemm_configuration, gemm_table
from hardpoint.kernels.gemv import GemvConfiguration, gemv_configuration, gemv_table
from hardpoint.kernels.int4_tuning import Int4Configuration, int4_configuration, int4_table
from hardpoint.kernels.skinny import SkinnyConfiguration, skinny_configuration, skinny_table
from hardpoint.kernels.tables import FOLDER, Options, Table, table, table_of
from hardpoint.kernels.tiled_experts import ExpertTiles
from hardpoint.numerics import quantize_weight
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import (
    AttentionSpec,
    BuildContext,
    ConfigError,
    LinearCall,
    LinearWorkload,
    QuantSpec,
    Scale,
    dequantize,
)
from tests.support.attention import ANY_DEVICE, PluginConfigOnly

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "xe2", "none")
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")


@dataclass(frozen=True)
class Inner:
    rows: int
    fast: bool = False


@dataclass(frozen=True)
class Constants:
    stages: int
    tiles: tuple[Inner, ...] = ()


RULE = "schema = 1\n[[rule]]\n"
FACTS = (("rows", int), ("wide", bool), ("kind", str))


def rules(folder: Path, text: str, arch: str = "sm_90", *others: Path) -> Table[Constants]:
    folder.mkdir(exist_ok=True)
    (folder / "toy.toml").write_text(text)
    return table("toy", Constants, FACTS, arch, (folder, *others))


def test_the_first_rule_that_holds_counts(tmp_path: Path) -> None:
    own = """
        schema = 1
        [[rule]]
        arch = ["sm_10?"]
        use = { stages = 10 }
        [[rule]]
        arch = ["sm_90"]
        when = { min_rows = 3, max_rows = 8, wide = false, kind = "plain" }
        use = { stages = 2, tiles = [{ rows = 1 }, { rows = 4, fast = true }] }
        measured_on = "a device"
        source = "docs/measurements/h200.md"
    """
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "toy.toml").write_text(RULE + "use = { stages = 5 }\n")

    def stages(arch: str, rows: int, wide: bool = False, kind: str = "plain") -> int:
        found = rules(tmp_path / "own", own, arch, tmp_path / "base")
        return found.find(rows=rows, wide=wide, kind=kind).stages

    assert [stages("sm_90", rows) for rows in (2, 3, 8, 9)] == [5, 2, 2, 5]
    assert [stages("sm_90", 3, True), stages("sm_90", 3, kind="other")] == [5, 5]
    assert [stages("sm_103", 3), stages("sm_120", 3)] == [10, 5]
    given = rules(tmp_path / "own", own, "sm_90", tmp_path / "base").given(wide=False, kind="plain")
    assert given.find(rows=3).tiles == (Inner(1), Inner(4, True))
    assert len(given.uses) == 2


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("schema = ", "toy.toml (of --tuning-tables, or a plugin's own): Invalid value"),
        ("schema = 2", "schema is 2, and 1 is read"),
        ("schema = 1", "it holds no rules: write [[rule]]"),
        ("schema = 1\nrules = []", "unknown key 'rules'; did you mean 'rule'?"),
        ("schema = 1\nrule = [3]", "[[rule]] 1 must be a table, got 3"),
        (RULE, "[[rule]] 1: key 'use' is missing"),
        (RULE + "arch = 'sm_90'", "arch must be a list of texts, got 'sm_90'"),
        (RULE + "source = 3", "source must be of type str, got 3"),
        (RULE + "use = {stages = 1}\n[[rule]]\nuse = {stage = 1}", "2: use: unknown key 'stage'"),
        (RULE + "use = {stages = '1'}", "use.stages must be of type int, got '1'"),
        (RULE + "use = {stages = true}", "use.stages must be of type int, got True"),
        (RULE + "use = {stages = -1}", "use.stages must not be negative"),
        (RULE + "use = {}", "use: key 'stages' is missing"),
        (RULE + "use = {stages = 1, tiles = []}", "use.tiles must be a list of one or more"),
        (RULE + "use = {stages = 1, tiles = [{}]}", "use.tiles[0]: key 'rows' is missing"),
        (RULE + "use = {stages = 1}\nwhen = {max_row = 1}", "unknown key 'max_row'; did you mean 'max_rows'?"),
        (RULE + "use = {stages = 1}\nwhen = {wide = 1}", "when wide must be of type bool, got 1"),
    ],
)  # fmt: skip
def test_a_table_that_is_not_right_is_named(tmp_path: Path, text: str, fact: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rules(tmp_path, text)
    assert str(tmp_path / "toy.toml") in str(raised.value)
    assert fact in str(raised.value)


def test_steps_that_no_rule_is_for_are_an_error(tmp_path: Path) -> None:
    found = rules(tmp_path, RULE + "use = {stages = 1}\nwhen = {max_rows = 4}")
    with pytest.raises(ConfigError, match=r"toy: no rule holds for \{'rows': 5, .*let the last always hold"):
        found.find(rows=5, wide=False, kind="plain")


def test_the_users_folder_is_asked_first(tmp_path: Path) -> None:
    ctx = Site.open(discover(), "cpu").context(torch.bfloat16)
    folder = tmp_path / "mine"
    config = ctx.config.model_copy(update={"tuning_tables": str(folder)})
    with pytest.raises(ConfigError, match=r"--tuning-tables .*mine: there is no such folder"):
        _ = replace(ctx, config=config).tuning_folders
    folder.mkdir()
    (folder / "attention_decode.toml").write_text(
        f"{RULE}when = {{ max_decodes = 2 }}\nuse = {{ programs = 8, min_chunk = 32, "
        "tiles = { rows = 4, key_bytes = 4096, num_warps = 2, num_stages = 2 } }\n"
    )
    mine = replace(ctx, config=config)
    assert mine.tuning_folders[0] == folder
    backend = TritonAttention(mine, SPEC)
    assert [one.tuning.programs for one in backend.decodes] == [8, 256]
    assert [decode_tiles(backend, decodes) for decodes in (2, 3)] == [
        (32, Tiles(4, 4096, 2, 2)),
        (128, Tiles(32, 16384, 4, 3)),
    ]


def test_shipped_tables_name_their_source() -> None:
    """Each measured tile names its page of measurements, and the page is there."""
    root = Path(__file__).resolve().parents[2]
    shipped = [folder for name in ("cuda", "rocm") for folder in discover().tuning_folders(name)]
    paths = [path for folder in (FOLDER, *shipped) for path in folder.glob("*.toml")]
    assert len(paths) == 27
    for path in paths:
        table = tomllib.loads(path.read_text())
        for said in (table, *table["rule"]):
            assert ("measured_on" in said) == ("source" in said), path
            assert "source" not in said or (root / said["source"]).is_file(), path


def test_options_of_the_compiler_reach_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand in the table, and hashed with the constants that hold them."""
    (tmp_path / "gemm.toml").write_text(
        f"{RULE}use = {{ block_m = 16, block_n = 16, block_k = 32, num_warps = 1, num_stages = 1, "
        'options = { waves_per_eu = 2, schedule_hint = "none", fast = true } }\n'
    )
    ctx = cast(BuildContext, PluginConfigOnly({}, tuning_folders=(tmp_path,)))
    (cut,) = gemm_table(ctx).uses
    assert cut.options == {"waves_per_eu": 2, "schedule_hint": "none", "fast": True}
    assert hash(cut) != hash(replace(cut, options=Options(waves_per_eu=3)))
    launched = dict[str, object]()

    class Noted:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **kwargs: launched.update(kwargs)

    monkeypatch.setattr(gemm, "_gemm", Noted())
    TritonGemm(ctx, LinearWorkload()).apply(LinearCall(torch.ones(4, 64), {"weight": torch.ones(48, 64)}, None))
    assert launched.items() >= {"num_warps": 1, **cut.options}.items()


@pytest.mark.parametrize("value", ["[1]", "{ a = 1 }", "1.5"])
def test_options_that_are_no_options_are_named(tmp_path: Path, value: str) -> None:
    tiles = "rows = 16, key_bytes = 8192, num_warps = 4, num_stages = 1"
    rule = f"use = {{ programs = 256, tiles = [{{ {tiles}, options = {{ waves_per_eu = {value} }} }}] }}\n"
    (tmp_path / "attention_prefill.toml").write_text(RULE + rule)
    ctx = cast(BuildContext, PluginConfigOnly({}, tuning_folders=(tmp_path,)))
    with pytest.raises(ConfigError, match=r"use\.tiles\[0\]\.options\.waves_per_eu must be a number, true, false or"):
        TritonAttention(ctx, SPEC)


@pytest.mark.parametrize("arch", AMD)
def test_tiles_fill_the_matrix_units_of_amd(arch: str) -> None:
    """MFMA and WMMA take 16 rows; of fewer, Triton multiplies number by number. Tiles of ``_skinny`` are 8 rows."""
    ctx = context_of(arch)
    skinny, experts4 = skinny_table(ctx), table_of(ctx, "experts_int4", ExpertTiles, tiled_experts._FACTS)
    blocks = table_of(ctx, "experts_blocks", BlockExpertTiles, block_experts._FACTS)
    experts = rule_table(ctx)
    for rows in (1, 2, 8, 9, 16, 33, 200, 4096):
        for n in WIDTHS:
            cut = gemm_configuration(rows, n, 1, cuts=gemm_table(ctx))
            assert min(cut.block_m, cut.block_n) >= 16
            assert not cut.turned
            assert int4_configuration(rows, n, 2, int4_table(ctx)).block_m >= 16
            if arch.startswith("gfx9"):  # others are offered none
                assert skinny_configuration(rows, n, 1, 1, skinny).x_tiles >= 2
        assert experts4.find(rows=rows, pairs=8 * rows, itemsize=2).rows >= 16
        assert blocks.find(rows=rows, pairs=8 * rows, itemsize=2).rows >= 16
        assert experts.find(rows=rows, itemsize=2, element="float4_e2m1", by_round=True).rows >= 16


def test_few_heads_have_tiles_of_their_own() -> None:
    """The rule of an H200 for a rank with 4 heads of keys: bounds of what all launches share are judged at once."""
    context = context_of("sm_90")
    tables = Tables.of(context)
    few, many = (tables.decode.given(wide=False, quantized_cache=False, kv_heads=n) for n in (4, 8))
    assert few.find(decodes=32).programs == 128
    assert many.find(decodes=32).programs == 256
    assert few.find(decodes=33) == many.find(decodes=33)
    assert few.uses[0] not in many.uses


@pytest.mark.parametrize("arch", AMD)
def test_lanes_of_a_warp_are_those_of_the_device(arch: str) -> None:
    cuts = gemv_table(context_of(arch))
    lanes = {gemv_configuration(*key, cuts).lanes for key in product(ROWS, WIDTHS, (16, 1024, 4096, 28672))}
    assert lanes == ({64} if arch.startswith("gfx9") else {32})


# Frozen: what kernels were cut to before tables were files.

SPEC = AttentionSpec(32, 8, 128, 0.1, "bfloat16", "bfloat16", 16)
PLATFORM_TABLES: dict[str, Sequence[Path]] = {name: discover().tuning_folders(name) for name in ("cuda", "rocm")}
LARGE_MEMORY = {"sm_80", "sm_90", "sm_100", "sm_103"}
DECODES = (1, 2, 16, 31, 32, 33, 64, 127, 128, 129, 256, 511, 512, 513, 2048)


def context_of(arch: str) -> BuildContext:
    folders = PLATFORM_TABLES.get({"sm": "cuda", "gf": "rocm"}.get(arch[:2], ""), ())
    return cast(BuildContext, PluginConfigOnly({}, device=replace(ANY_DEVICE, arch=arch), tuning_folders=folders))


def decode_tiles(backend: TritonAttention, decodes: int) -> tuple[int, Tiles]:
    found = backend._decode_table.find(decodes=decodes)
    return found.min_chunk, found.tiles


def old_decode_tiles(arch: str, decodes: int, wide: bool, quantized: bool) -> tuple[int, Tiles]:
    """By the contributions triton_paged, and triton_paged_few_, _many_ and _very_many_decodes of the CUDA plugin."""
    min_chunk, tiles = 128, Tiles(32, 16384, 4, 3)
    if arch.startswith("sm_") and not quantized:
        if decodes <= 32 and arch in LARGE_MEMORY:
            min_chunk, tiles = 64, Tiles(32, 16384, 4, 4)
        elif 33 <= decodes <= 128:
            tiles = Tiles(32, 8192, 4, 4)
        elif 129 <= decodes <= 512:
            tiles = Tiles(32, 8192, 2, 3)
    return min_chunk, Tiles(32, 8192, 4, 3) if wide else tiles


@pytest.mark.parametrize(("arch", "dtype"), list(product(ARCHS, ("float32", "float16", "bfloat16"))))
def test_attention_is_cut_as_before(arch: str, dtype: str) -> None:
    ctx = context_of(arch)
    for kv_dtype in (dtype, "float16", "float8_e4m3fn", "int8"):
        quantized = kv_dtype in ("float8_e4m3fn", "int8")
        kind = TritonQuantizedCacheAttention if quantized else TritonAttention
        backend = kind(ctx, replace(SPEC, dtype=dtype, kv_dtype=kv_dtype))
        wide = dtype == "float32" or (not quantized and kv_dtype != dtype)
        for decodes in DECODES:
            assert decode_tiles(backend, decodes) == old_decode_tiles(arch, decodes, wide, quantized)
        many = (Tiles(16, 16384, 4, 3), Tiles(64, 16384, 4, 3), Tiles(128, 16384, 8, 3))
        assert backend.prefill_tiles == ((Tiles(32, 8192, 8, 3),) if wide else many)
        assert {one.tuning.programs for one in backend.decodes} == {backend._prefill_tuning.programs} == {256}


def test_a_platforms_plugin_may_bring_tables(tmp_path: Path) -> None:
    plugins = discover()
    record = plugins.record("cpu")
    assert plugins.tuning_folders("cpu") == []
    record.folder = tmp_path
    (tmp_path / "tuning").mkdir()
    assert plugins.tuning_folders("cpu") == [tmp_path / "tuning"]
    assert plugins.tuning_folders("cuda") != [tmp_path / "tuning"]


ROWS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 4096)
WIDTHS = (16, 1024, 2047, 2048, 4095, 4096, 4999, 5000, 16383, 16384, 28672)


def old_gemm_tiles(rows: int, n: int, itemsize: int, group: int, mixed: bool) -> GemmConfiguration:
    if itemsize == 4:
        return GemmConfiguration(32, 32, 32, 4, 2)
    if itemsize == 1 and not group and rows <= 128:
        return old_tiles_of_8_bits(rows, n)
    if itemsize == 2 and not group and not mixed and rows <= 32:
        return old_tiles_of_16_bits(rows, n)
    block_k = min(128, group or 128)
    if rows <= 16:
        block_n, num_warps, num_stages = (16, 2, 6) if n < 4096 else (32, 4, 6) if n < 16384 else (64, 4, 4)
        return GemmConfiguration(16, block_n, block_k, num_warps, num_stages)
    if rows <= 32 and not group:
        block_n, parts = (32, 2) if n < 5000 else (64, 1)
        return GemmConfiguration(32, block_n, 128, 4, 5, turned=True, parts=parts)
    if rows <= 32 and n >= 16384:
        return GemmConfiguration(32, 64, block_k, 4, 4)
    if rows <= 64:
        return GemmConfiguration(64, 32 if n < 5000 else 64 if n < 16384 else 128, block_k, 4, 4)
    return GemmConfiguration(64, 64, block_k, 4, 4) if rows <= 128 else GemmConfiguration(128, 128, block_k, 8, 3)


def old_tiles_of_16_bits(rows: int, n: int) -> GemmConfiguration:
    if rows <= 8:
        block_m, parts, num_stages = (8, 2, 7) if n < 5000 else (8, 1, 7)
    elif rows <= 16:
        block_m, parts, num_stages = (16, 2, 5) if n < 5000 else (16, 1, 5)
    else:
        block_m, parts, num_stages = (32, 2, 5) if n < 2048 else (32, 1, 7 if n < 5000 else 5)
    return GemmConfiguration(block_m, 64 // parts, 128, 4, num_stages, turned=True, parts=parts)


def old_tiles_of_8_bits(rows: int, n: int) -> GemmConfiguration:
    if rows <= 16:
        if n < 5000:
            return GemmConfiguration(8 if rows <= 8 else 16, 32, 256, 4, 5, turned=True, parts=2)
        return GemmConfiguration(16, *((64, 256, 4, 5) if n < 16384 else (128, 256, 8, 3)), turned=True)
    if rows <= 32:
        if n < 5000:
            return GemmConfiguration(32, 32, 128, 4, 10, turned=True, parts=2)
        return GemmConfiguration(32, 64, 128, 4, 9 if n < 16384 else 4, turned=True)
    if n >= 16384:
        return GemmConfiguration(64, 128, 128, 4, 4)
    return GemmConfiguration(64, 32 if n < 5000 and rows <= 64 else 64, 256, 4, 6)


def test_matrix_products_are_cut_as_before() -> None:
    """On every architecture."""
    for rows, n, itemsize, group in product(ROWS, WIDTHS, (1, 2, 4), (0, 32, 64, 128, 256)):
        for mixed in (False, True) if itemsize > 1 else (False,):
            expected = old_gemm_tiles(rows, n, itemsize, group, mixed)
            assert gemm_configuration(rows, n, itemsize, group, mixed=mixed) == expected
            for arch in ARCHS:
                cuts = gemm_table(context_of(arch))
                assert gemm_configuration(rows, n, itemsize, group, mixed=mixed, cuts=cuts) == expected


def old_skinny_tiles(rows: int, n: int, x_itemsize: int, itemsize: int) -> SkinnyConfiguration:
    if itemsize == 2:
        return SkinnyConfiguration(1 if rows <= 8 else 2, 2, 4, 5, steps=2, early=2)
    if rows <= 8:
        return SkinnyConfiguration(1, 4, 4, 6 if n < 5000 else 4)
    num_stages = 4 if x_itemsize > 1 or n >= 5000 else 6
    return SkinnyConfiguration(2 if rows <= 16 else 4, 4 if n >= 4096 else 2, 4, num_stages)


def test_products_of_few_rows_are_cut_as_before() -> None:
    for rows, n, x_itemsize, itemsize in product(ROWS, WIDTHS, (1, 2), (1, 2)):
        expected = old_skinny_tiles(rows, n, x_itemsize, itemsize)
        assert skinny_configuration(rows, n, x_itemsize, itemsize) == expected
        for arch in ARCHS:
            assert skinny_configuration(rows, n, x_itemsize, itemsize, skinny_table(context_of(arch))) == expected


def old_gemv_cut(rows: int, n: int, row_bytes: int) -> GemvConfiguration:
    if rows == 1:
        if row_bytes >= 4096:
            return GemvConfiguration(1, 1, 4, 2)
        return GemvConfiguration(1, 2, 4, 2) if n < 5000 else GemvConfiguration(1, 4, 1, 2)
    if rows == 2:
        return GemvConfiguration(2, 1 if n <= 2048 else 4, 4 if n <= 4096 else 2)
    together, block_n = 4 if rows <= 4 else 8, 8
    while block_n > 1 and (block_n * 1024 > n or block_n * together > 16):
        block_n //= 2
    return GemvConfiguration(together, block_n, 4 if row_bytes >= 2048 else 2 if row_bytes >= 1024 else 1)


def old_int4_tiles(rows: int, n: int, itemsize: int) -> Int4Configuration:
    if itemsize == 4:
        return Int4Configuration(16, 32, 4, 1)
    if rows <= 8:
        block_m = next(size for size in (1, 2, 4, 8) if size >= rows)
        if n >= 8192:
            return Int4Configuration(block_m, 32, 2, 3, split=True)
        return Int4Configuration(block_m, 16, 4, 4 if rows == 1 and n < 5000 else 3, split=True)
    height, width, num_warps = (64, 128, 8) if rows > 32 else (16 if rows <= 16 else 32, 64 if n < 8192 else 128, 4)
    tiles, pieces = -(-rows // height) * -(-n // width), 1
    while pieces < 4 and tiles * pieces < 200:
        pieces *= 2
    return Int4Configuration(height, width, num_warps, 3, pieces=pieces)


def test_products_of_single_rows_and_4_bits_are_cut_as_before() -> None:
    for rows, n in product((*range(1, 10), *ROWS), (*WIDTHS, 8191, 8192)):
        for row_bytes in (16, 1008, 1024, 2032, 2048, 4080, 4096, 28672):
            expected = old_gemv_cut(rows, n, row_bytes)
            assert gemv_configuration(rows, n, row_bytes) == expected
            assert gemv_configuration(rows, n, row_bytes, gemv_table(context_of("sm_90"))) == expected
        for itemsize in (2, 4):
            wanted = old_int4_tiles(rows, n, itemsize)
            assert int4_configuration(rows, n, itemsize) == wanted
            assert int4_configuration(rows, n, itemsize, int4_table(context_of("sm_90"))) == wanted


def test_a_users_table_cuts_matrix_products(tmp_path: Path) -> None:
    (tmp_path / "gemm.toml").write_text(
        f"{RULE}when = {{ max_rows = 4, itemsize = 2 }}\n"
        "use = { block_m = 16, block_n = 16, block_k = 32, num_warps = 1, num_stages = 1 }\n"
    )
    ctx = cast(BuildContext, PluginConfigOnly({}, tuning_folders=(tmp_path,)))
    kernel = TritonGemm(ctx, LinearWorkload())
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    assert gemm_configuration(4, 48, 2, cuts=gemm_table(ctx)) == GemmConfiguration(16, 16, 32, 1, 1)
    got = kernel.apply(LinearCall(x, {"weight": weight}, None))
    torch.testing.assert_close(got.float(), x.float() @ weight.float().t(), rtol=0.02, atol=0.1)


def test_a_users_table_cuts_products_of_single_rows_and_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gemv.toml").write_text(f"{RULE}use = {{ rows = 2, block_n = 16, num_warps = 1 }}\n")
    (tmp_path / "int4.toml").write_text(f"{RULE}use = {{ block_m = 4, block_n = 32, num_warps = 2, num_stages = 1 }}\n")
    site = Site.open(discover(), "cpu")
    ctx = replace(site.context(torch.float32), config=site.config.model_copy(update={"tuning_tables": str(tmp_path)}))
    used = list[object]()
    for module, name in ((gemv, "gemv_configuration"), (weight_only, "int4_configuration")):
        chosen = getattr(module, name)

        def noted(*args: Any, chosen: Any = chosen) -> Any:
            used.append(chosen(*args))
            return used[-1]

        monkeypatch.setattr(module, name, noted)
    x, weight = torch.randn(1, 64), torch.randn(48, 64)
    got = gemv.TritonGemv(ctx, LinearWorkload()).apply(LinearCall(x, {"weight": weight}, None))
    torch.testing.assert_close(got, x @ weight.t())
    spec = QuantSpec("int4", scales=(Scale("float32", (1, 32)),))
    slots = quantize_weight(weight, spec)
    workload = LinearWorkload(dtype="float32", in_features=64, out_features=48, spec=(spec, QuantSpec("float32")))
    kernel = weight_only.TritonInt4Linear(ctx, workload)
    got = kernel.apply(LinearCall(x, kernel.prepack(slots), None))
    torch.testing.assert_close(got, x @ dequantize(slots, spec, torch.float32).t())
    assert used == [GemvConfiguration(2, 16, 1), Int4Configuration(4, 32, 2, 1)]
