"""``bench communicator`` and ``bench all2all``: two ranks in processes of their own, and what is refused before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardpoint.bench.rank_group import RankSettings
from hardpoint.cli.main import run
from hardpoint.config import EngineConfig
from hardpoint_cpu import compiled

NATIVE = pytest.mark.skipif(compiled.missing() is not None, reason="no compiled kernels")
SMALL = ["--platform", "cpu", "--rounds", "3", "--json", "-"]


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["bench", *arguments, *SMALL]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@NATIVE
def test_collectives_are_measured_beside_the_link_and_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(capsys, "communicator", "--sizes", "1k,3000", "--dtype", "float32", "--only", "all_")
    assert result["name"] == "communicator: cpu_shared_memory, 2 ranks"
    assert result["peer"] == "torch.distributed by gloo"
    names = [f"{name} {size}" for name in ("all_reduce", "all_gather", "all_to_all") for size in ("1 KiB", "3000 B")]
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert row["unit"] == "us"
        assert min(row["value"], row["roofline"], row["peer"]) > 0
    assert result["rows"][1]["note"].startswith("3,000 bytes, ")
    summed, gathered = (row["roofline"] for row in result["rows"][:4:2])
    assert summed == pytest.approx(2 * gathered, abs=0.011), "of a sum a rank gets its share twice"


@NATIVE
def test_an_exchange_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--tokens", "1,5", "--experts", "4", "--top-k", "2", "--hidden-size", "64"]
    result = measured(capsys, "all2all", *shape)
    assert result["name"] == "all2all: cpu_shared_memory, 2 ranks"
    assert [(row["name"], row["note"].split(",")[0]) for row in result["rows"]] == [
        ("1 tokens", "128 bytes"),
        ("5 tokens", "640 bytes"),
    ]
    assert all(row["value"] > 0 and row["peer"] > 0 for row in result["rows"])


def test_there_is_room_for_the_tokens_that_are_measured() -> None:
    """All-to-alls size their memory by the engine's largest step."""
    assert RankSettings(4, "bfloat16", tokens=5000).config.max_num_batched_tokens == 20000
    usual = EngineConfig.create(model="demo").max_num_batched_tokens
    assert RankSettings(4, "bfloat16", tokens=1).config.max_num_batched_tokens == usual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["communicator", "--sizes", "64q"], "--sizes 64q: must be bytes such as 1k,64k,1m"),
        (["communicator", "--sizes", "0"], "--sizes 0: every size must be above 0"),
        (["communicator", "--only", "scan"], "--only scan: in the name of no collective; they are all_reduce,"),
        (["all2all", "--tokens", "1,x"], "--tokens 1,x: must be numbers above 0"),
        (["all2all", "--experts", "5"], "--experts 5: must be a multiple of --ranks 2"),
        (["communicator", "--communicator", "acme"], "acme"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *arguments, *SMALL]) != 0
    assert message in capsys.readouterr().err
