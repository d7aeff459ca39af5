"""Engines over small checkpoints, and their logits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hardpoint import LLM
from hardpoint.engine.execution.executor import InProcessExecutor
from hardpoint.engine.scheduling.paged_cache import Prefix
from hardpoint.engine.scheduling.step import NewRequest, ScheduledRequest, SlotSampling, StepInput

SMALL: dict[str, Any] = {
    "platform": "cpu",
    "kv_cache_memory": "16MiB",
    "max_num_seqs": 16,
    "plugin_config": {"cpu": {"threads": 1}},
}
"""Settings for a quick engine on the CPU."""


def small_llm(folder: Path, **settings: Any) -> LLM:
    """An engine for a tiny checkpoint; ``settings`` override SMALL."""
    return LLM(str(folder), **(SMALL | settings))


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what another thread or process brings about, asking less and less often: up to every 50 ms."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)


def counted(llm: LLM) -> dict[str, float]:
    """Steps by how they ran, and what else the engine counts of it."""
    samples = [sample for family in llm.metrics.families for sample in family.samples]
    wanted = ("hardpoint_graph", "hardpoint_eager", "hardpoint_padding")
    found = {
        s.labels.get("reason", s.name.removeprefix("hardpoint_")): s.value for s in samples if s.name.startswith(wanted)
    }
    found.pop("graph_preparation_seconds_total")
    return found


@torch.inference_mode()
def prompt_logits(llm: LLM, ids: list[int], chunk: int | None = None) -> torch.Tensor:
    """The engine's logits for every position of one prompt, float32 [T, vocab], read in chunks of ``chunk`` tokens."""
    executor = llm.core.executor
    assert isinstance(executor, InProcessExecutor)
    runner = executor._runner
    assert runner is not None
    cache = llm.core.scheduler.cache
    held = cache.start(Prefix())
    rows, new = [], (NewRequest(0, tuple(ids), SlotSampling(0.0, 0, 1.0, 0.0, 0), len(ids)),)
    for number, start in enumerate(range(0, len(ids), chunk or len(ids))):
        count = min(chunk or len(ids), len(ids) - start)
        grown = cache.grow(held, start, start + count)
        assert grown is not None
        share = ScheduledRequest(0, start, count, grown.pages, samples=False)
        freed, taken = ((0,), new) if start == 0 else ((), ())
        hidden, _ = runner.forward(StepInput(number, freed, taken, (share,), grown.copies))
        rows.append(llm.core.blueprint.model.logits(hidden[:count]).float().cpu())  # the rest is padding
    cache.free(held.held())
    return torch.cat(rows)
