"""Direct reads give the weights that mapped files give, and nothing is read that a rank does not hold."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hardpoint.checkpoint import direct_reads, safetensors_files, safetensors_header
from hardpoint.checkpoint.direct_reads import PAGE, DirectFile, Span, reads_faster
from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.layers.base import walk
from hardpoint.layers.loading import load_weights
from hardpoint_plugin_api import CheckpointError
from tests.support.checkpoints import DEEPSEEK_V3, write_checkpoint
from tests.support.engines import SMALL

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def has_direct_reads(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(b"")
    try:
        with DirectFile(probe):
            pass
    except OSError:
        pytest.skip("the file system has no direct reads")


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, has_direct_reads: None) -> list[Span]:
    """Every tensor is read directly, in small parts, a few ahead. Returns what was read."""
    read: list[Span] = []

    def begin(file: DirectFile, spans: Any) -> Any:
        read.extend(spans)
        return unpatched(file, spans)

    unpatched = DirectFile.spans
    monkeypatch.setattr(DirectFile, "spans", begin)
    monkeypatch.setattr(safetensors_files, "reads_faster", lambda path, spans: bool(spans))
    monkeypatch.setattr(safetensors_header, "_LEAST", 64)
    for name, size in {"_CHUNK": PAGE, "_AHEAD": 16 * PAGE, "_KEPT": 2 * PAGE}.items():
        monkeypatch.setattr(direct_reads, name, size)
    return read


def weights(config: EngineConfig, rank: int) -> dict[str, torch.Tensor]:
    """The tensors that a rank holds."""
    blueprint = draw(config, place=config.topology.on_this_host(rank))
    files = SafetensorsFiles(blueprint.checkpoint.folder)
    load_weights(blueprint.model, blueprint.model.weight_names, files, torch.device("cpu"))
    return {
        f"{path}.{name}": x for path, layer in walk(blueprint.model) for name, x in layer.weights.items() if x.numel()
    }


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("qwen3", {"vocab_size": 261}, {"tensor_parallel_size": 2}),
        ("llama", {"tie_word_embeddings": True}, {"pipeline_parallel_size": 2}),
        ("qwen3_moe", EXPERTS, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("gpt_oss", {"num_local_experts": 4}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("gpt_oss", {"num_local_experts": 4}, {"tensor_parallel_size": 2}),
        ("deepseek_v3", DEEPSEEK_V3, {"tensor_parallel_size": 2}),
    ],
    ids=["columns-and-rows", "stages", "experts", "stacked-experts", "slices-of-a-stack", "latents"],
)
def test_each_rank_gets_its_weights(
    family: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    direct: list[Span],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(tmp_path, family, **changes)
    config = EngineConfig.create(model=str(tmp_path), **(SMALL | settings))
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    for rank in range(2):
        direct.clear()
        found = weights(config, rank)
        assert 0 < sum(span.nbytes for span in direct) < size
        with monkeypatch.context() as mapped:
            mapped.setattr(safetensors_files, "reads_faster", lambda path, spans: False)
            expected = weights(config, rank)
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert torch.equal(found[name].view(torch.uint8), x.view(torch.uint8)), name


def test_parts_of_tensors(tmp_path: Path, direct: list[Span]) -> None:
    """Of a tensor nothing but the wanted rows is there, and it has the whole shape. None is read twice."""
    draw_size = random.Random(1)
    stored = {
        f"t{number}": torch.randint(0, 2**15, (draw_size.randint(1, 40), draw_size.randint(1, 3000)), dtype=kind)
        for number, kind in enumerate([torch.int16, torch.int32, torch.int64] * 8)
    }
    save_file(stored, tmp_path / "model.safetensors")
    rows: dict[str, range] = {}
    for name, x in stored.items():
        first = draw_size.randint(0, len(x) - 1)
        rows[name] = range(first, draw_size.randint(first + 1, len(x)))
    seen = {}
    for name, x in SafetensorsFiles(tmp_path).of_rows(rows):
        own = slice(rows[name].start, rows[name].stop)
        assert x.shape == stored[name].shape
        assert torch.equal(x[own], stored[name][own]), name
        seen[name] = x.nbytes
    assert seen.keys() == stored.keys()
    assert sum(span.nbytes for span in direct) <= sum(stored[n][: len(r)].nbytes for n, r in rows.items())


@pytest.mark.usefixtures("has_direct_reads")
def test_the_memory_of_a_few_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a file is, and though tensors have their whole shapes."""
    monkeypatch.setattr(direct_reads, "_AHEAD", 64 * PAGE)
    (tmp_path / "file").write_bytes(os.urandom(PAGE) * 2048)
    spans = [Span(number * 32 * PAGE + 100, 31 * PAGE, 0, 2048 * PAGE) for number in range(60)]
    memories = set()
    with DirectFile(tmp_path / "file") as file:
        for span, (memory, origin) in zip(spans, file.spans(spans), strict=True):
            at = origin + span.start - span.origin
            assert memory[at : at + PAGE] == (tmp_path / "file").read_bytes()[span.start : span.start + PAGE]
            memories.add(id(memory))
    assert len(memories) <= 3


def test_a_file_that_has_become_shorter(tmp_path: Path, direct: list[Span]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64 * PAGE), "b": torch.ones(64 * PAGE)}, path)
    files = SafetensorsFiles(tmp_path)
    stream = files.of_rows({"a": range(64 * PAGE), "b": range(64 * PAGE)})
    next(stream)
    os.truncate(path, 70 * PAGE * 4)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read: .* could not be read"):
        list(stream)


@pytest.mark.usefixtures("has_direct_reads")
def test_both_ways_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_reads, "_TRIAL", 16 * PAGE)
    (tmp_path / "file").write_bytes(os.urandom(512 * PAGE))
    spans = [Span(at, 64 * PAGE, at, 64 * PAGE) for at in range(0, 512 * PAGE, 64 * PAGE)]
    rates = {"direct": 2.0, "mapped": 1.0}
    for name in rates:
        measure = getattr(direct_reads, f"_rate_of_{name}")

        def rate(*given: Any, name: str = name, measure: Any = measure) -> float:
            assert measure(*given) > 0
            return rates[name]

        monkeypatch.setattr(direct_reads, f"_rate_of_{name}", rate)
    assert reads_faster(tmp_path / "file", spans)
    rates["mapped"] = 3.0
    assert not reads_faster(tmp_path / "file", spans)
    assert not reads_faster(tmp_path / "file", spans[:1]), "too little to measure"
    rates["mapped"] = 0.0
    assert not reads_faster(Path("/proc/self/maps"), spans), "of a file system without direct reads"


@pytest.mark.usefixtures("has_direct_reads")
def test_a_file_system_that_opens_files_for_direct_reads_and_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose blocks are larger than a page: files are mapped then."""
    monkeypatch.setattr(direct_reads, "_TRIAL", 16 * PAGE)
    (tmp_path / "file").write_bytes(os.urandom(512 * PAGE))
    # Reads that begin within a page are refused by the kernel itself, and the span's pages begin at none.
    monkeypatch.setattr(direct_reads, "PAGE", 100)
    spans = [Span(at + 100, 64 * PAGE, at, 65 * PAGE) for at in range(0, 256 * PAGE, 64 * PAGE)]
    assert not reads_faster(tmp_path / "file", spans)


LIMITED = """
import logging, os, resource, sys
from pathlib import Path
import torch
from hardpoint.checkpoint import direct_reads, safetensors_files
from hardpoint.checkpoint.safetensors_files import SafetensorsFiles

safetensors_files.reads_faster = lambda path, spans: bool(spans)
logging.basicConfig(level=logging.INFO, format="%(message)s")
files = SafetensorsFiles(Path(sys.argv[1]))
rows = {name: range(files.info(name).shape[0]) for name in sorted(files.names)}
torch.ones(2).sum()
used = int(Path("/proc/self/statm").read_text().split()[0]) * direct_reads.PAGE
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), resource.RLIM_INFINITY))
print(sorted(float(x[0]) + float(x[-1]) for _, x in files.of_rows(rows)))
"""


@pytest.mark.usefixtures("has_direct_reads")
@pytest.mark.parametrize(
    ("addresses", "falls_back"), [(300 << 20, False), (170 << 20, True)], ids=["of one buffer", "of none"]
)
def test_a_process_with_few_addresses(addresses: int, falls_back: bool, tmp_path: Path) -> None:
    """A buffer takes three times a tensor's addresses, here 192 MiB. Where there is room for one, nothing is read
    ahead; where there is none, the file is mapped, which takes less."""
    stored = {"a": torch.full((1 << 20,), 1.0), "b": torch.full((16 << 20,), 2.0)}
    save_file(stored, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(addresses)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 4.0]\n"
    assert ("mapped, though direct reads were faster: no room for a tensor of" in done.stderr) is falls_back
    assert ("direct reads were faster for 1 of 1 files" in done.stderr) is not falls_back
