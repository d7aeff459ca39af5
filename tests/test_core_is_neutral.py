"""Core knows no device and no vendor, and dependencies point one way."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import hardpoint.layers
import hardpoint_plugin_api

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "src" / "hardpoint"
NAMES = re.compile(r"\b(cuda|hip|rocm|xpu|nvidia|amd|intel|aiter|flashinfer|nccl|rccl)\b", re.IGNORECASE)
FLAGS_OF_VLLM = re.compile(r'"--[a-z0-9-]+"')
"""In the table of vLLM's names, which answers flags that core has not."""
SOURCES = [path for path in sorted(CORE.rglob("*")) if path.suffix in {".py", ".toml", ".jinja"}]


def test_core_names_no_device_or_vendor() -> None:
    assert len(SOURCES) > 50
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMES.search(FLAGS_OF_VLLM.sub("", line) if path.name == "vllm_names.toml" else line)
    ]
    assert not found, "\n".join(found)


def test_core_imports_no_plugin_and_the_api_imports_neither() -> None:
    plugins = re.compile(r"^\s*(from|import) hardpoint_(cpu|cuda|rocm|xpu)\b", re.MULTILINE)
    core = re.compile(r"^\s*(from|import) (hardpoint|torch)\b(?!_)", re.MULTILINE)
    assert not [p for p in SOURCES if plugins.search(p.read_text(encoding="utf-8"))]
    lines = [
        line
        for path in (ROOT / "plugin_api" / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if core.match(line) and not line.startswith((" ", "\t"))
    ]
    assert not lines, lines


def test_importing_resolves_nothing() -> None:
    """Neither package imports torch, a plugin, or pydantic when it is imported."""
    code = (
        "import sys, hardpoint, hardpoint_plugin_api; "
        "heavy = {'torch', 'transformers', 'pydantic', 'hardpoint_cpu'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_engine_reads_no_config_of_hugging_face() -> None:
    """Families do, and say what the engine must know (ModelFacts); what all checkpoints say is in Checkpoint."""
    reads = re.compile(r"hf_config|HFConfig|checkpoint\.config\b|\.from_pretrained")
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in _sources("engine", "server") for m in reads.finditer(_text(p))]
    assert not found, found


def test_the_block_and_the_engine_ask_no_layer_for_its_type() -> None:
    """Layers are built by the names that arguments give, and what differs between them is a method of theirs."""
    layers = {name for name in hardpoint.layers.__all__ if name[0].isupper()}
    arguments = {name for name in hardpoint_plugin_api.__all__ if name.endswith("Args")}
    block = [CORE / "layers" / name for name in ("decoder_block.py", "causal_lm.py")]
    asked = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path in [*_sources("engine"), *block]
        for call in ast.walk(ast.parse(_text(path)))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("isinstance", "issubclass")
        if {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)} & (layers | arguments)
    ]
    assert not asked, asked
    sublayers = re.compile(r"hardpoint\.layers\.(attention|mlp|moe)|(Attention|MLP|MoE)Args")
    assert not sublayers.search(_text(block[0]))


def test_the_topology_alone_reads_sizes_of_worlds() -> None:
    """Settings hold the sizes that users give, and the config makes one topology of them."""
    sizes = re.compile(
        r"\b(tensor|pipeline|expert)_parallel_size\b|WORLD_SIZE|\bget_world_size\b|\benable_expert_parallel\b"
    )
    readers = {str(p.relative_to(CORE)) for p in CORE.rglob("*.py") if sizes.search(_text(p))}
    assert readers == {"config/engine_config.py", "config/settings.py", "parallel/topology.py"}


def test_one_file_finds_and_runs_captured_graphs() -> None:
    finds = re.compile(r"\bKeptGraphs\(|\bReplayCheck\(|\.graph\.run\(")
    assert {p.name for p in _sources("engine") if finds.search(_text(p))} == {"graphs.py"}
    prepares = re.compile(r"\.prepare\(|\binterrupt\(")
    assert {p.name for p in _sources("engine") if prepares.search(_text(p))} <= {
        "graphs.py",
        "replay_check.py",
        "forward.py",
        "step_memory.py",  # measures what layers take where they interrupt a step
    }


def _sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((CORE / package).rglob("*.py"))]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
