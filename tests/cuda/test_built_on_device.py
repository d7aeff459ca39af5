"""The engine goes over to a kernel that nvcc built beside it, while it decodes from CUDA graphs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.engine.core import EngineCore
from tests.out_of_tree.build import Dist, importable, install
from tests.support import nvcc_kernels
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted, until

pytestmark = pytest.mark.accelerator

MANIFEST = """schema = 1
api = "0.2"
[plugin]
name = "nvcc"
[[contribution]]
family = "linear"
name = "nvcc"
target = "hp_nvcc.kernels:NvccLinear"
priority = 1000
requires = [{ spec = ["float32/float32"] }]
"""
LOGIT_TOLERANCE = 1e-4


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin, whose kernel was not built yet."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    site, wheels, folder = (tmp_path / name for name in ("site", "wheels", "builds"))
    for path in (site, wheels, folder):
        path.mkdir()
    files = {
        "hp_nvcc/__init__.py": "",
        "hp_nvcc/plugin.py": "",
        "hp_nvcc/kernels.py": Path(nvcc_kernels.__file__).read_text(),
        "hp_nvcc/hardpoint.toml": MANIFEST,
    }
    install([Dist("nvcc-hardpoint", files, {"nvcc": "hp_nvcc.plugin"})], site, wheels)
    monkeypatch.setenv("HP_BUILD_FOLDER", str(folder))
    with importable(site):
        yield


def test_the_engine_goes_over_between_two_replays(plugin: None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write_checkpoint(folder, "llama")
    running, *prompts = random_prompts(4, 20, seed=4)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    endless = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    def check(llm: LLM) -> None:
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids, LOGIT_TOLERANCE)

    with LLM(str(folder), dtype="float32", kv_cache_memory="64MiB", max_num_seqs=8) as llm:
        assert isinstance(llm.client, EngineCore)
        builds = llm.client._builds
        assert "nvcc" not in {row.chosen for row in llm.table.rows}
        stream = llm.stream(running, endless)
        for _ in range(5):
            next(stream)
        until(lambda: not builds._thread.is_alive(), seconds=120)
        *_, last = stream
        check_tokens_equal(model, running, last.outputs[0].token_ids, LOGIT_TOLERANCE)
        assert "nvcc" in {row.chosen for row in llm.table.rows}
        before = counted(llm)["graph_replays_total"]
        check(llm)
        assert counted(llm)["graph_replays_total"] > before, "the new kernel is replayed, too"
