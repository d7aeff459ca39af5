"""Ranks that share memory: what the conformance kit does not try, such as processes that die, and calls that differ."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from hardpoint import SamplingParams
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint.parallel.process_group import Store
from hardpoint_cpu import compiled, shared_ranks
from hardpoint_cpu.shared_ranks import MOST_RANKS, SharedMemory
from hardpoint_plugin_api import CommunicatorWorkload, Feature, PlatformError
from tests.parallel.ranks import on_each
from tests.support.checkpoints import check_tokens_equal, write_checkpoint
from tests.support.engines import small_llm

pytestmark = pytest.mark.skipif(compiled.missing() is not None, reason="no compiled kernels")

HALF = 256 * 1024
"""Bytes that travel in one phase (csrc/shared_ranks.cpp)."""


def joined(rank: int, world: int, store: Store, timeout: float = 20.0) -> SharedMemory:
    ctx = cast(Any, SimpleNamespace(parallel=SimpleNamespace(timeout=timeout)))
    made = SharedMemory(ctx, CommunicatorWorkload(dtype="float32", parallel="tp", ranks=world))
    made.init(store, rank, world, "tp")
    return made


@pytest.mark.parametrize("elements", [HALF // 4 - 1, HALF // 4 + 1, 3 * HALF // 4 + 5])
def test_every_element_of_what_takes_several_phases_arrives(elements: int) -> None:
    """Sums, gathers and exchanges of unequal parts around the size of a phase, at addresses that are no multiples."""
    world, rows = 3, [elements, 0, elements // 2]
    generator = torch.Generator().manual_seed(elements)
    given = [torch.randn(elements + 1, generator=generator)[1:] for _ in range(world)]
    total = given[0] + given[1] + given[2]
    sent = [[elements, 7, 0], [0, 1, HALF], [elements // 3, 0, 0]]
    parts = [torch.randn(sum(row), generator=generator) for row in sent]

    def run(rank: int, store: Store) -> None:
        made = joined(rank, world, store)
        assert torch.equal(made.all_reduce(given[rank].clone()), total)
        gathered = made.all_gather(given[rank][: rows[rank]], rows)
        assert torch.equal(gathered, torch.cat([x[:n] for x, n in zip(given, rows, strict=True)]))
        shares = [elements // 3, elements - elements // 3, 0]
        assert torch.equal(made.reduce_scatter(given[rank], shares), total.split(shares)[rank])
        got = made.all_to_all(parts[rank], sent[rank], [row[rank] for row in sent])
        assert torch.equal(got, torch.cat([x.split(row)[rank] for x, row in zip(parts, sent, strict=True)]))
        if rank == 0:
            made.send(given[0], 2)
        elif rank == 2:
            into = torch.empty(elements)
            made.recv(into, 0)
            assert torch.equal(into, given[0])

    on_each(world, run)


def test_ranks_that_call_unlike_collectives_are_told() -> None:
    def run(rank: int, store: Store) -> str:
        made = joined(rank, 2, store)
        with pytest.raises(RuntimeError) as caught:
            made.all_reduce(torch.ones(5)) if rank else made.all_gather(torch.ones(5))
        return str(caught.value)

    first, second = on_each(2, run)
    assert first == "rank 0 is in all_gather of 40 bytes, and rank 1 in all_reduce of 20 bytes"
    assert second == "rank 1 is in all_reduce of 20 bytes, and rank 0 in all_gather of 40 bytes"


def test_rows_that_do_not_fit_are_refused_before_anybody_reads_them() -> None:
    def run(rank: int, store: Store) -> None:
        made = joined(rank, 2, store)
        x = torch.ones(3, 2)
        calls: list[Callable[[], object]] = [
            lambda: made.all_gather(x, [4, 4]),
            lambda: made.reduce_scatter(x, [3, 1]),
            lambda: made.reduce_scatter(x),
            lambda: made.all_to_all(x, [3, 3], [0, 0]),
            lambda: made.all_to_all(x, [4, -1], [0, 0]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="do not fit a tensor of shape"):
                call()
        with pytest.raises(TypeError, match=r"not of torch\.int64"):
            made.all_reduce(torch.ones(2, dtype=torch.int64))
        with pytest.raises(ValueError, match="must be contiguous"):
            made.broadcast(x.t(), 0)
        with pytest.raises(RuntimeError, match=f"rank {1 - rank} sends 8 bytes to rank {rank}, which expects 16"):
            made.all_to_all(x[:2], [1, 1], [2, 2] if rank else [1, 2])

    on_each(2, run)


OTHER_RANK = """
import os, sys, time
from hardpoint_cpu import _native

process, number = sys.argv[1:]
group = _native.ranks_open(os.open(f"/proc/{process}/fd/{number}", os.O_RDWR), 2, 1, 20.0)
_native.ranks_meet(group)
print("met", flush=True)
time.sleep(60)
"""


def test_a_rank_that_is_killed_ends_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a moment, not at the time limit; and nothing of the memory is left."""
    before = _mappings()  # of ranks that other tests left, or that a failure of theirs holds
    others: list[subprocess.Popen[str]] = []
    created = shared_ranks._created

    def create(store: Store, world: int) -> int:
        descriptor = created(store, world)
        command = [sys.executable, "-c", OTHER_RANK, str(os.getpid()), str(descriptor)]
        others.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return descriptor

    monkeypatch.setattr(shared_ranks, "_created", create)
    made = joined(0, 2, HashStore())
    (other,) = others
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "met\n"
        other.send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"rank 1 \(process {other.pid}\) has ended"):
            made.all_reduce(torch.ones(4))
        assert _mappings() - before
        assert not any("hardpoint-ranks" in os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors())
        del made
        gc.collect()
        assert not _mappings() - before


def _mappings() -> set[str]:
    """This process's mappings of memory that ranks share."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "hardpoint-ranks" in line}


def _descriptors() -> list[str]:
    """The open descriptors, but for the one that lists them."""
    folder = "/proc/self/fd"
    return [name for name in os.listdir(folder) if os.path.islink(f"{folder}/{name}")]


def test_a_rank_that_never_comes_is_waited_for_as_long_as_the_group_allows() -> None:
    has_waited = threading.Event()

    def run(rank: int, store: Store) -> None:
        made = joined(rank, 2, store, timeout=0.3)
        if rank == 1:
            assert has_waited.wait(20)
            return
        before = time.thread_time()
        with pytest.raises(RuntimeError, match=r"rank 1 did not come within 0\.3 s"):
            made.recv(torch.empty(4), 1)
        assert time.thread_time() - before < 0.1, "a wait sleeps"
        has_waited.set()

    on_each(2, run)


def test_memory_that_another_rank_cannot_open_is_an_error_that_says_what_to_do() -> None:
    store = HashStore()
    store.set("memory", f'[{os.getpid()}, 999, "00"]')
    with pytest.raises(PlatformError, match=r"/proc/\d+/fd/999: .*No such file.*--communicator torch_distributed"):
        joined(1, 2, store)
    with open(os.devnull, "rb+") as other:
        store.set("memory", f'[{os.getpid()}, {other.fileno()}, "00"]')
        with pytest.raises(PlatformError, match="it is another file"):
            joined(1, 2, store)


def test_it_is_chosen_on_one_host_and_refused_on_several() -> None:
    ctx = draw(EngineConfig.create(model="demo", platform="cpu")).ctx
    workload = CommunicatorWorkload(dtype="bfloat16", parallel="tp", ranks=2)
    assert ctx.select(workload).offer.contribution.name == "cpu_shared_memory"
    apart = CommunicatorWorkload(dtype="bfloat16", parallel="tp", ranks=2, features=frozenset({Feature.SEVERAL_HOSTS}))
    plan = ctx.select(apart)
    assert plan.offer.contribution.name == "torch_distributed"
    many = ctx.select(CommunicatorWorkload(dtype="bfloat16", parallel="tp", ranks=MOST_RANKS + 1))
    assert many.offer.contribution.name == "torch_distributed"
    config = EngineConfig.create(model="demo", platform="cpu", use={"communicator": "gather_and_sum"})
    assert draw(config).ctx.select(workload).offer.contribution.name == "gather_and_sum"


def test_experts_in_processes_get_their_tokens_through_shared_memory(tmp_path: Path) -> None:
    """Prompts of few tokens: a rank has none of some steps. Sums of layers go through shared memory, too."""
    model = write_checkpoint(tmp_path, "qwen3_moe", num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)
    prompts = [[5], [6, 7, 8], [9] * 30]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"enable_expert_parallel": True, "all2all_backend": "cpu_shared_memory"}
    with small_llm(tmp_path, tensor_parallel_size=2, **settings) as llm:
        taken = {row.family: row.chosen for row in llm.table.rows if row.family in ("communicator", "all2all")}
        for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
    assert taken == dict.fromkeys(("communicator", "all2all"), "cpu_shared_memory")
