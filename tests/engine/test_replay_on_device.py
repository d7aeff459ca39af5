"""Replays are compared on real accelerators, and on the simulated one: see test_replay_check.py for what is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hardpoint import LLM, SamplingParams
from tests.out_of_tree.build import Dist, importable, install
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import counted

pytestmark = pytest.mark.accelerator

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# Torch's operators alone, so that it runs on any device.
KERNELS = """
import torch

calls = 0

def right(x, weight, *, eps):
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight

def in_pieces(x, weight, *, eps):
    return right(x, weight, eps=eps)

in_pieces.capturable = False

def baking(x, weight, *, eps):
    global calls
    calls += 1
    out = right(x, weight, eps=eps)
    out[..., -1:].add_(float(calls))
    return out
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[None]:
    """Three kernels of one op, which come into play when they are asked for, or others are denied."""
    entries = "".join(
        f'[[contribution]]\nfamily = "op"\nof = "rms_norm"\nname = "{name}"\ntarget = "hp_replayed.kernels:{name}"\n'
        f"priority = {priority}\n"
        for name, priority in (("baking", 3000), ("in_pieces", 2000), ("right", 1000))
    )
    manifest = f'schema = 1\napi = "0.2"\n[plugin]\nname = "replayed"\n{entries}'
    files = {"__init__.py": "", "plugin.py": "", "kernels.py": KERNELS, "hardpoint.toml": manifest}
    named = {f"hp_replayed/{name}": text for name, text in files.items()}
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    install([Dist("replayed-hardpoint", named, {"replayed": "hp_replayed.plugin"})], tmp_path / "site", wheels)
    with importable(tmp_path / "site"):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, "llama")


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("denied", "serves"),
    [(("baking", "in_pieces"), "right"), (("baking",), "in_pieces"), ((), "in_pieces")],
    ids=["right", "in-pieces", "baking"],
)
def test_tokens_are_the_references_whoever_serves(
    checkpoint: tuple[Path, PreTrainedModel], denied: tuple[str, ...], serves: str
) -> None:
    """A kernel that bakes the number of its calls into one column is denied, and the next one serves."""
    settings: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_num_seqs": 8, "dtype": "float32"}
    folder, model = checkpoint
    given = tuple(f"op.rms_norm={name}" for name in denied)
    with LLM(str(folder), deny=given, **settings) as llm:
        assert llm.core.blueprint.ctx.device.accelerator
        prompts = random_prompts(3, 20, seed=4)
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        assert counted(llm)["graph_replays_total"] >= 10
        assert llm.config.deny == (given or ("op.rms_norm=baking",))
        assert serves in {row.chosen for row in llm.table.rows}
