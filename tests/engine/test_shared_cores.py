"""Threads of an engine whose cores others use: a thread that waits for another leaves it the core."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hardpoint import SamplingParams
from tests.support.checkpoints import random_prompts, write_checkpoint
from tests.support.engines import small_llm

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)


def processor_seconds(pid: int) -> float:
    """The processor time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


def share_one_core(pid: int) -> None:
    """Have all threads of a process run on the same core: each is the neighbour of the others."""
    core = {min(os.sched_getaffinity(0))}
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), core)


def processor_seconds_of_tokens(folder: Path, threads: int) -> float:
    """The processor time that an engine of eager steps with so many threads takes for tokens, on one core."""
    plugin = {"cpu": {"threads": threads}}
    with small_llm(folder, core_process=True, enforce_eager=True, plugin_config=plugin) as llm:
        pid = llm.client.facts.pid
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(4, 100)]
        llm.generate(prompts, PARAMS)
        share_one_core(pid)
        before = processor_seconds(pid)
        llm.generate(prompts, PARAMS)
        return processor_seconds(pid) - before


def test_waiting_takes_no_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that spun would take its share of the core before the other one went on: 5 times as much, and more."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    write_checkpoint(tmp_path, "qwen3", hidden_size=512, intermediate_size=2048)
    one, two = (processor_seconds_of_tokens(tmp_path, threads) for threads in (1, 2))
    assert two < 2.5 * one
