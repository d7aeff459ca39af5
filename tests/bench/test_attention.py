"""The attention benchmark: how batches are written, what is counted, and a run on the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hardpoint.bench.attention import _Work, parse_batch
from hardpoint.bench.attention_kinds import CausalKind, LatentKind, Requests
from hardpoint.cli.main import run
from hardpoint_plugin_api import AttentionSpec, ConfigError, LatentSpec


def test_batches_are_short_texts() -> None:
    assert parse_batch("8q1s4k") == (Requests(8, 1, 4096),)
    assert parse_batch("2q512") == (Requests(2, 512, 512),)
    assert parse_batch("q2k_4q1s1k") == (Requests(4, 1, 1024), Requests(1, 2048, 2048)), "decodes come first"


@pytest.mark.parametrize("text", ["", "4q", "8q1s4m", "q1s4k,q2", "0q1", "q0", "q5s4"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="in the batch"):
        parse_batch(text)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("text", ["q1s40", "3q7s40", "2q40"])
def test_what_is_read_is_counted(text: str, window: int | None) -> None:
    spec = AttentionSpec(4, 2, 8, 1.0, "bfloat16", "bfloat16", 16, window)
    (one,) = batch = parse_batch(text)
    queries_at, keys_at = torch.arange(one.total - one.query, one.total)[:, None], torch.arange(one.total)
    read = ~spec.span.hides(queries_at, keys_at)
    work = _Work.of(CausalKind(spec), batch)
    assert work.flops == one.count * 2 * 2 * int(read.sum()) * 4 * 8
    keys, tokens = int(read.any(0).sum()), one.query
    assert work.nbytes == one.count * 2 * 2 * (keys * 2 * 8 + tokens * 4 * 8)


def test_what_latent_attention_reads_is_counted() -> None:
    """Axes of the sizes: 4 heads, latents of 8, rotated keys of 2."""
    work = _Work.of(LatentKind(LatentSpec(4, 8, 2, 1.0, "bfloat16", "float32", 16)), parse_batch("3q1s40_q7"))
    assert work.nbytes == (3 * 40 + 7) * 4 * 10 + (3 + 7) * 2 * 4 * 18
    assert work.flops == (3 * 40 + 28) * 4 * 2 * 18


def test_latent_backends_run_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ["--heads", "3", "--latent-size", "24", "--rope-size", "8", "--rounds", "3"]
    wanted = ["bench", "attention", "2q1s40_q9", "--kind", "latent", "--platform", "cpu", *sizes]
    assert run([*wanted, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["name"] for row in rows} >= {"2q1s40_q9 cpu_native_latent", "2q1s40_q9 reference"}
    assert all(row["value"] > 0 and row["roofline"] > 0 and row["peer"] > 0 for row in rows)


def test_backends_run_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    wanted = [
        "bench",
        "attention",
        "2q1s40_q9",
        "--platform",
        "cpu",
        "--rounds",
        "3",
        "--heads",
        "4",
        "--kv-heads",
        "2",
    ]
    assert run([*wanted, "--head-size", "32", "--only", "cpu", "--variants", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert "2q1s40_q9 cpu_paged" in [row["name"] for row in rows]
    assert all(row["value"] > 0 and row["roofline"] > 0 and row["peer"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-dtype", "foo"], "unknown dtype 'foo'"),
        (["--kv-cache-dtype", "float64"], "kv_dtype not supported (wanted float64, supported"),
        (["--only", "nobody"], "--only nobody: found in the name of no attention backend that serves here: reference"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_nothing_to_measure(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "attention", "q1s40", "--platform", "cpu", *flags]) == 2
    assert message in capsys.readouterr().err
