"""Faults planted in communicators: each is caught, by the check that should."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from hardpoint.conformance import ranks
from hardpoint.conformance.families import communicator
from hardpoint.conformance.families.communicator import CommunicatorTrials
from hardpoint.conformance.site import Site
from hardpoint.parallel.process_group import Store
from hardpoint.reference.torch_distributed import GatherAndSum, TorchDistributed
from hardpoint_plugin_api import Communicator
from tests.conformance.trying import Caught, first_failure, subject

Tensor = torch.Tensor
Rows = Sequence[int] | None


class PassedThrough(TorchDistributed):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class LargestForSum(GatherAndSum):
    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x[None]).amax(0)


class MeanForSum(TorchDistributed):
    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x) / self._world


class LastRankLeftOut(GatherAndSum):
    """Right for two ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x[None])[:2].sum(0)


class StalePart(GatherAndSum):
    """Adds what the last rank gave the time before."""

    _before: Tensor | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        gathered = self.all_gather(x[None])
        before, self._before = self._before, gathered[-1].clone()
        if before is not None and before.shape == x.shape:
            gathered[-1] = before
        return gathered.sum(0)


class LastOfTheLastChunkMissing(GatherAndSum):
    """A sum in chunks of 256 KiB, the last of which ends one element early."""

    def all_reduce(self, x: Tensor) -> Tensor:
        own = x.flatten()[-1:].clone()
        total = super().all_reduce(x)
        if x.nbytes > 256 * 1024:
            total.view(-1)[-1:] = own
        return total


class OwnFirst(GatherAndSum):
    """Each rank begins with its own numbers, so ranks round differently."""

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x[None]).roll(-self._rank, 0)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


class RanksSwapped(TorchDistributed):
    def all_gather(self, x: Tensor, rows: Rows = None) -> Tensor:
        gathered = super().all_gather(x, rows)
        return gathered if rows is not None else torch.cat(gathered.chunk(self._world)[::-1])


class ColumnsByRows(TorchDistributed):
    """Reads the ranks' columns one below the other as if they were side by side."""

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return super().all_gather(x).view(x.shape[0], -1)


class UnevenIgnored(TorchDistributed):
    """Gives everybody's rows with the padding still between."""

    def all_gather(self, x: Tensor, rows: Rows = None) -> Tensor:
        if rows is None:
            return super().all_gather(x)
        padded = torch.cat([x, x.new_zeros(max(rows) - x.shape[0], *x.shape[1:])])
        return super().all_gather(padded)[: sum(rows)]


class Letters(Communicator):
    """Through the store alone: gloo takes the process down where its peers break the rules."""

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._number, self._has_left = 0, False

    def close(self) -> None:
        self._has_left = True

    def abort(self) -> None:
        self._has_left = True

    def all_gather(self, x: Tensor, rows: Rows = None) -> Tensor:
        if self._has_left:
            raise RuntimeError("left")
        rows = [x.shape[0]] * self._world if rows is None else rows
        self._number += 1
        self._leave(x)
        parts = [self._find(rank, x.new_empty(count, *x.shape[1:])) for rank, count in enumerate(rows)]
        return torch.cat(parts)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x[None]).sum(0)

    def _leave(self, x: Tensor) -> None:
        self._store.set(f"{self._number}/{self._rank}", bytes(x.flatten().view(torch.uint8).tolist()).hex())

    def _find(self, rank: int, into: Tensor) -> Tensor:
        name = f"{self._number}/{rank}"
        while not self._store.check([name]):
            if self._has_left:
                raise RuntimeError("left")
            time.sleep(0.001)
        found = list(bytes.fromhex(self._store.get(name).decode()))
        into.flatten().view(torch.uint8).copy_(torch.tensor(found, dtype=torch.uint8))
        return into


class EmptyRankSkips(Letters):
    """A rank without rows leaves no letter, and the others wait for it."""

    def _leave(self, x: Tensor) -> None:
        if x.numel():
            super()._leave(x)


class WrongShare(TorchDistributed):
    """Each rank is given its neighbour's rows."""

    def reduce_scatter(self, x: Tensor, rows: Rows = None) -> Tensor:
        rows = [x.shape[0] // self._world] * self._world if rows is None else rows
        parts: list[Tensor] = list(self.all_reduce(x.clone()).split(list(rows)))  # split() is untyped
        return parts[self._rank] if len(set(rows)) > 1 else parts[self._rank - 1]


class RootIgnored(TorchDistributed):
    def broadcast(self, x: Tensor, root: int) -> None:
        super().broadcast(x, 0)


class SumsInPlace(TorchDistributed):
    def reduce_scatter(self, x: Tensor, rows: Rows = None) -> Tensor:
        rows = [x.shape[0] // self._world] * self._world if rows is None else rows
        share: Tensor = self.all_reduce(x).split(list(rows))[self._rank].clone()
        return share


class OneBuffer(TorchDistributed):
    """Every result lies in the same memory."""

    def init(self, *args: object) -> None:
        super().init(*args)  # type: ignore[arg-type]
        self._buffer = torch.empty(1 << 23, dtype=torch.uint8)

    def all_gather(self, x: Tensor, rows: Rows = None) -> Tensor:
        result = super().all_gather(x, rows)
        kept: Tensor = self._buffer[: result.nbytes].view(result.dtype).view(result.shape).copy_(result)
        return kept


class TruncatedToFloats(TorchDistributed):
    """Numbers survive, the bits of a NaN or of a large integer do not."""

    def all_gather(self, x: Tensor, rows: Rows = None) -> Tensor:
        return super().all_gather(x.float(), rows).to(x.dtype)


class RepliesLate(TorchDistributed):
    """Hands a result out before it is there."""

    def all_gather(self, x: Tensor, rows: Rows = None) -> Tensor:
        result = getattr(self, "_last", None)
        self._last = super().all_gather(x, rows)
        return result if result is not None and result.shape == self._last.shape else self._last


class RowsTogether(GatherAndSum):
    """Sums each row a little differently by how many there are; claims that it does not."""

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x[None]).roll(x.shape[0] % 2, 0)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


class StaysAfterClose(TorchDistributed):
    def close(self) -> None:
        pass


class DeafToAbort(Letters):
    """A call that waits goes on waiting."""

    def abort(self) -> None:
        pass


class Later(torch.Tensor):
    """A result that a thread still works at, as a device's queue would: reading it on the host waits."""

    worker: threading.Thread

    def cpu(self, *args: object, **named: object) -> Tensor:
        self.worker.join()
        return self.as_subclass(torch.Tensor)


class Queued(Letters):
    """Comes back before the others have come."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self._ask()
        result = torch.full_like(x, torch.nan).as_subclass(Later)
        result.worker = threading.Thread(target=self._sum, args=(x, result.as_subclass(torch.Tensor)), daemon=True)
        result.worker.start()
        return result

    def _ask(self) -> None:
        if self._has_left:
            raise RuntimeError("left")

    def _sum(self, x: Tensor, result: Tensor) -> None:
        with contextlib.suppress(RuntimeError), torch.inference_mode():  # a queue has nobody to raise it to
            result.copy_(self._found(x))

    def _found(self, x: Tensor) -> Tensor:
        return self.all_gather(x[None]).sum(0)


class QueuedAndDeafToAbort(Queued):
    def abort(self) -> None:
        pass


class QueuedAndNeverWaits(Queued):
    def _found(self, x: Tensor) -> Tensor:
        return x


class QueuedAndServesAfterAbort(Queued):
    def _ask(self) -> None:
        pass


class NoSum(Communicator):
    init, close, abort = TorchDistributed.init, TorchDistributed.close, TorchDistributed.abort


PLANTED: dict[str, tuple[type[Communicator], str, str]] = {
    "passed through": (PassedThrough, "all_reduce/*", "values"),
    "largest for sum": (LargestForSum, "all_reduce/*", "values"),
    "mean for sum": (MeanForSum, "all_reduce/*", "values"),
    "third rank left out": (LastRankLeftOut, "all_reduce/*", "values"),
    "an earlier part": (StalePart, "all_reduce/*", "values"),
    "last element of the last chunk": (LastOfTheLastChunkMissing, "all_reduce/*/large/*", "values"),
    "sums that differ by rank": (OwnFirst, "all_reduce/*", "agree"),
    "ranks swapped": (RanksSwapped, "all_gather/*", "values"),
    "uneven rows ignored": (UnevenIgnored, "all_gather/*", "values"),
    "columns not side by side": (ColumnsByRows, "all_gather_columns/*", "values"),
    "neighbour's share": (WrongShare, "reduce_scatter/*", "values"),
    "root ignored": (RootIgnored, "broadcast/*", "values"),
    "input summed in place": (SumsInPlace, "reduce_scatter/*", "inputs"),
    "one buffer for all results": (OneBuffer, "all_gather/*", "aliases"),
    "bits lost": (TruncatedToFloats, "all_gather/int*", "values"),
    "an earlier result": (RepliesLate, "all_gather/*", "values"),
    "rows depend on each other": (RowsTogether, "all_reduce/*", "batch-invariant"),
    "serves after close": (StaysAfterClose, "group/2/close", "close"),
    "no all_reduce": (NoSum, "all_reduce*", "has"),
    "queued, hands data through": (QueuedAndNeverWaits, "group/2/abort", "abort"),
    "queued, serves after abort": (QueuedAndServesAfterAbort, "group/2/abort", "abort"),
}


def tried(site: Site, kind: type[Communicator], cases: str) -> Caught | None:
    claims = [{"dtype": ["float32", "bfloat16"]}, {"feature": ["batch_invariant"]}]
    claims = claims[: 2 if issubclass(kind, GatherAndSum) else 1]
    return first_failure(
        subject(site, kind, "communicator", name="torch_distributed", requires=claims), CommunicatorTrials(), cases
    )


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_caught_by_its_check(site: Site, title: str) -> None:
    kind, cases, check = PLANTED[title]
    caught = tried(site, kind, cases)
    assert caught, f"{title} was not caught"
    assert caught.check == check, str(caught)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kit waits a moment for what hangs."""
    monkeypatch.setattr(ranks, "SECONDS", 0.5)
    monkeypatch.setattr(ranks, "_GRACE", 0.1)
    monkeypatch.setattr(communicator, "_ENOUGH", 0.5)


@pytest.mark.parametrize(
    ("kind", "cases", "check"),
    [
        (EmptyRankSkips, "all_gather/*-none/*", "values"),
        (DeafToAbort, "group/2/abort", "abort"),
        (QueuedAndDeafToAbort, "group/2/abort", "abort"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_what_hangs_is_caught(site: Site, kind: type[Communicator], cases: str, check: str) -> None:
    caught = tried(site, kind, cases)
    assert caught is not None
    assert caught.check == check, str(caught)
    assert "did not come back" in str(caught)


@pytest.mark.nightly
def test_it_was_not_the_letters(site: Site) -> None:
    caught = tried(site, Letters, "*")
    assert caught is None, str(caught)


def test_what_waits_in_a_queue_need_not_raise(site: Site) -> None:
    caught = tried(site, Queued, "group/2/abort")
    assert caught is None, str(caught)


@pytest.mark.parametrize("kind", [TorchDistributed, pytest.param(GatherAndSum, marks=pytest.mark.nightly)])
def test_a_healthy_communicator_passes(site: Site, kind: type[Communicator]) -> None:
    caught = tried(site, kind, "*")
    assert caught is None, str(caught)


_RECORDED = """
import torch
import torch._C._distributed_c10d as c10d

from hardpoint.conformance.ranks import together
from hardpoint.parallel.process_group import PrefixStore, process_group

store = c10d.HashStore()


def reduce(rank):
    group = process_group("gloo", PrefixStore("ranks", store), rank, 2, 20.0, on_one_host=True)
    group.allreduce([torch.ones(3)]).wait()
    group.shutdown()


together(2, reduce, lambda: None)
print(c10d._dump_fr_trace_json().count(b"record_id"))
"""


@pytest.mark.parametrize(("wanted", "recorded"), [(None, False), ("2000", True)])
def test_torch_records_no_collectives_of_ranks_in_threads(wanted: str | None, recorded: bool) -> None:
    """Its recorder is not safe for threads in every release; one who asks for it has it."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_FR_BUFFER_SIZE"}
    if wanted is not None:
        environment["TORCH_FR_BUFFER_SIZE"] = wanted
    done = subprocess.run(
        [sys.executable, "-c", _RECORDED], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 0) is recorded
