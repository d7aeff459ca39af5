"""The public door, the manifest and the files agree."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hardpoint.ops
from hardpoint.ops import get, names
from hardpoint.ops.base import CustomOp
from hardpoint.ops.catalogue import describe, describe_all
from hardpoint_plugin_api import UnknownNameError
from tests.ops.manifest_context import OPS, load_target

COMPOSITES = {
    "act_and_mul_quantized",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "allreduce_add_rms_norm",
    "qk_norm_rope_store",
    "rms_norm_quantized",
    "route_topk",
}
HELPERS = {"__init__", "base", "catalogue", "draw", "each_row", "error_model", "judge", "rope_table", "routing"}


def test_the_public_door() -> None:
    assert hardpoint.ops.__all__ == ["get", "names"]
    assert all(isinstance(get(name), CustomOp) and get(name).name == name for name in names())


def test_the_table_holds_every_op_there_is() -> None:
    files = {path.stem for path in Path(hardpoint.ops.__file__).parent.glob("*.py")} - HELPERS
    modules = [importlib.import_module(f"hardpoint.ops.{file}") for file in files]
    found = {op.name for module in modules for op in vars(module).values() if isinstance(op, CustomOp)}
    assert found == set(names())


def test_unknown_ops_are_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown op 'rmsnorm'; did you mean 'rms_norm'"):
        get("rmsnorm")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, hardpoint.ops; hardpoint.ops.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_op_has_its_reference_in_the_manifest_and_the_other_way_round() -> None:
    references = {c.of: c for c in OPS if c.name == "reference"}
    assert set(references) == set(names())
    for name, contribution in references.items():
        assert load_target(contribution.target) is get(str(name)).reference
        assert (contribution.priority, contribution.form, contribution.platforms) == (0, "functional", ())


def test_every_composite_has_its_composition_in_the_manifest() -> None:
    composed = {c.of: c for c in OPS if c.name == "composed"}
    assert set(composed) == COMPOSITES
    assert {c.name for c in OPS} == {"reference", "composed", "row_by_row", "in_tiles"}
    for contribution in composed.values():
        assert (contribution.priority, contribution.form) == (10, "factory")
        assert callable(load_target(contribution.target))


def test_only_the_references_that_write_a_cache_need_its_layout() -> None:
    by_layout = {(c.of, c.name) for c in OPS for r in c.requires if getattr(r, "key", None) == "layout"}
    assert by_layout == {("qk_norm_rope_store", "reference"), ("store_kv", "reference")}


def test_what_is_there_for_batch_invariance_comes_last_where_nobody_asks_for_it() -> None:
    assert {c.priority for c in OPS if c.name == "row_by_row"} == {-10}


def test_an_op_is_described_as_data() -> None:
    info = describe("add_rms_norm")
    assert info.signature == (
        "add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]"
    )
    assert info.module == "hardpoint.ops.add_rms_norm"
    assert info.aliases == ((1, "residual"),)
    assert "random" in info.cases
    assert info.error_model.endswith("at the element's magnitude")
    assert "\n" not in info.summary


def test_every_op_says_what_it_is() -> None:
    for info in describe_all():
        assert info.summary, info.name
        assert info.cases, info.name
