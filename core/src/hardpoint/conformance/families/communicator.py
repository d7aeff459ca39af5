"""Trials of communicators: every collective that one has, among ranks in threads, against its definition.

A sum's truth is that in float64, and its own error that of adding the ranks' values in turn, in the dtype. Collectives
that only move data must keep every bit in every dtype: their trials send random bytes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from hardpoint.conformance.memory import equal_bits, share_storage
from hardpoint.conformance.plan import Exclusions, Plan
from hardpoint.conformance.ranks import CommunicatorGroup, HungError, Member, too_few_devices, worlds
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.dtypes import dtype_of
from hardpoint.ops.comparison import Comparison, Fault
from hardpoint.ops.error_model import ErrorModel, compare
from hardpoint_plugin_api import Communicator, CommunicatorWorkload, Contribution, Feature, Reason
from hardpoint_plugin_api.requirements import TokensRequirement

ERRORS = ErrorModel()
SUMS = ("all_reduce", "reduce_scatter")
MOVES = ("all_gather", "all_gather_columns", "broadcast", "send_recv", "all_to_all")
_EQUAL_ROWS = ("all_reduce", "all_gather_columns", "broadcast")
"""Collectives that take as many rows on every rank."""

_NEEDED = {
    "tp": ("a model that is divided by tensors", ("all_reduce", "all_gather")),
    "pp": ("a model that is divided into stages", ("send_recv",)),
}
"""By group: who calls which collectives of a dense model."""

_MOVED = ("float8_e4m3fn", "int32", "int64", "uint8")
"""Dtypes beside those claimed: quantized tokens, ids, counts, packed weights."""

_MODEL_DTYPES = ("float32", "float16", "bfloat16")
_ROWS = {
    "one": (1, 1, 1, 1),
    "even": (6, 6, 6, 6),
    "many": (260, 260, 260, 260),
    "large": (4200, 4200, 4200, 4200),
    "none": (0, 0, 0, 0),
}
"""``large``: more than goes through most libraries' buffers at once."""

_UNEVEN = {"uneven": (2, 5, 3, 1), "some-none": (0, 3, 0, 4), "last-none": (4, 1, 0, 0)}
"""Rows of each rank."""

_WIDTHS = {"even": (64,), "odd": (33,), "flat": (), "deep": (3, 5)}
"""The shape behind the rows."""

_MATRICES = ("even", "odd")
"""The widths of tensors with two axes."""

_ENOUGH = 10.0
"""Seconds in which ``close``, and a collective after ``abort``, must have ended."""

_UNTIL_ABORT = 1.0
"""Seconds that a collective waits in vain before ``abort``: long enough for it to be in a device's queue by then."""

_SHORT = 3.0
"""Seconds after which collectives fail where a trial has one wait in vain."""

_BAND = 128
"""Bytes beside each tensor that nobody may write to."""


class CommunicatorTrials:
    """The generator of the family ``communicator``."""

    family = "communicator"

    def serves(self, contribution: Contribution) -> bool:
        """Every contribution: all share one interface."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """Every collective that the class has, then what befalls a group as a whole."""
        missing = [name for name in (*SUMS, *MOVES) if not _has(subject, name)]
        parallel = tuple(subject.claimed("parallel") or ("tp", "ep"))
        for name in missing:
            callers = [title for group, (title, needed) in _NEEDED.items() if group in parallel and name in needed]
            if callers:
                text = f"{callers[0]} calls it, and {subject.target.__name__} does not override it"
                yield Trial(name, (Check("has", partial(Finding.failed, "missing", name, text)),))
            else:
                yield Trial(name, unsupported=Reason("collective", f"{subject.target.__name__} has no {name}"))
        dtypes = [dtype for dtype in subject.dtypes() if dtype in _MODEL_DTYPES]
        for names, moved in ((SUMS, dtypes), (MOVES, [*dtypes, *_MOVED])):
            factors: dict[str, Sequence[object]] = {
                "collective": [name for name in names if name not in missing],
                "dtype": moved,
                "world": worlds(plan),
                "rows": (*_ROWS, *_UNEVEN),
                "width": tuple(_WIDTHS),
                "parallel": parallel,
            }
            if factors["collective"]:
                for row in plan.combinations(factors, _EXCLUDED):
                    yield _trial(CommunicatorProbe(subject, plan, **row))
        for world in worlds(plan):
            workload = CommunicatorWorkload(dtype=dtypes[0], parallel=parallel[0], ranks=world)
            refused = subject.refuses(workload)
            group = CommunicatorGroup(subject, subject.target, workload)
            present = [name for name in (*SUMS, *MOVES) if name not in missing]
            for name, check in (("order", order), ("close", close), ("abort", aborted)):
                made = Check(name, partial(_where_possible, group, partial(check, group, present, plan)))
                yield Trial(f"group/{world}/{name}", (made,), unsupported=refused)


_EXCLUDED: Exclusions = {
    ("collective", "rows"): lambda name, rows: rows in _UNEVEN and name in _EQUAL_ROWS,
    ("collective", "width"): lambda name, width: name == "all_gather_columns" and width not in _MATRICES,
    ("rows", "width"): lambda rows, width: rows == "large" and width not in _MATRICES,
}
"""Some collectives need as many rows on every rank, some need tensors with two axes; large tensors have wide rows."""


def _has(subject: Subject, name: str) -> bool:
    if name == "all_gather_columns" and _has(subject, "all_gather"):
        return True  # which it calls unless it is overridden
    methods = ("send", "recv") if name == "send_recv" else (name,)
    return all(getattr(subject.target, m) is not getattr(Communicator, m) for m in methods)


def _where_possible(group: CommunicatorGroup, check: partial[Finding]) -> Finding:
    return too_few_devices(group.subject.site, group.workload.ranks or 1) or check()


def _trial(probe: CommunicatorProbe) -> Trial:
    if reason := probe.refuses():
        return Trial(probe.title, unsupported=reason, workload=probe.workload)
    checks = [Check("values", probe.values, decisive=True)]
    if too_few_devices(probe.subject.site, probe.world) is None:
        checks += [Check("inputs", probe.inputs), Check("aliases", probe.aliases)]
        if probe.subject.deterministic:
            checks.append(Check("repeat", probe.repeat))
        if probe.collective == "all_reduce":
            checks.append(Check("agree", probe.agree))
        if probe.collective in SUMS and Feature.BATCH_INVARIANT in probe.subject.features:
            checks.append(Check("batch-invariant", probe.batch_invariant))
    return Trial(probe.title, checks, workload=probe.workload)


@dataclass(frozen=True)
class Exchange:
    """One collective with its data, drawn alike on every rank: what each rank gives, and what it must get."""

    collective: str
    dtype: torch.dtype
    rows: tuple[int, ...]
    width: tuple[int, ...]
    seed: int

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def counts(self) -> list[list[int]]:
        """Of ``all_to_all``: how many rows each rank (first index) sends to each.

        Ranks without rows get none, and with every other seed send none instead.
        """
        got = [[max(0, rows + i - j) if rows else 0 for j, rows in enumerate(self.rows)] for i in range(self.world)]
        return [list(column) for column in zip(*got, strict=True)] if self.seed % 2 else got

    @cached_property
    def given(self) -> list[torch.Tensor]:
        """The input of each rank, on the host."""
        sizes = list(self.rows)
        if self.collective == "reduce_scatter":
            sizes = [sum(self.rows)] * self.world
        elif self.collective == "all_to_all":
            sizes = [sum(row) for row in self.counts]
        generator = torch.Generator().manual_seed(self.seed)
        return [self._draw(generator, size) for size in sizes]

    def _draw(self, generator: torch.Generator, rows: int) -> torch.Tensor:
        shape = (rows, *self.width)
        if self.collective in SUMS:
            return torch.randn(shape, generator=generator).to(self.dtype)
        size = (*shape, self.dtype.itemsize)
        drawn = torch.randint(256, size, generator=generator, dtype=torch.uint8)
        return drawn.view(self.dtype).view(shape) if self.width or rows else drawn.view(self.dtype).reshape(shape)

    def run(self, comm: Communicator, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Take part as ``rank`` with ``x``, this rank's of what is given; returns what came of it."""
        rows = list(self.rows)
        given = None if len(set(rows)) == 1 else rows
        if self.collective == "all_reduce":
            return [comm.all_reduce(x)]
        if self.collective == "reduce_scatter":
            return [comm.reduce_scatter(x, given)]
        if self.collective == "all_gather":
            return [comm.all_gather(x, given)]
        if self.collective == "all_gather_columns":
            return [comm.all_gather_columns(x)]
        if self.collective == "all_to_all":
            return [comm.all_to_all(x, self.counts[rank], [row[rank] for row in self.counts])]
        if self.collective == "broadcast":
            comm.broadcast(x, self.world - 1)
            return [x]
        got = []
        for source in range(self.world):
            for to in range(self.world):
                if source != to and rank == source:
                    comm.send(x, to)
                elif source != to and rank == to:
                    into = x.new_empty(self.given[source].shape)
                    comm.recv(into, source)
                    got.append(into)
        return got

    @property
    def writes_input(self) -> bool:
        """Whether the collective may write to its input."""
        return self.collective in ("all_reduce", "broadcast")

    def expected(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The expected result of ``rank``: summed in the order of ranks, and the truth."""
        if self.collective in SUMS:
            own, true = self.given[0].clone(), self.given[0].double()
            for x in self.given[1:]:
                own, true = own + x, true + x.double()
            if self.collective == "reduce_scatter":
                own, true = own.split(self.rows)[rank], true.split(self.rows)[rank]
            return [(own, true)]
        if self.collective == "all_gather":
            wanted = [torch.cat(self.given)]
        elif self.collective == "all_gather_columns":
            wanted = [torch.cat(self.given, 1)]
        elif self.collective == "all_to_all":
            parts = [x.split(sent)[rank] for x, sent in zip(self.given, self.counts, strict=True)]
            wanted = [torch.cat(parts)]
        elif self.collective == "broadcast":
            wanted = [self.given[-1]]
        else:
            wanted = [x for source, x in enumerate(self.given) if source != rank]
        return [(x, x) for x in wanted]

    def judge(self, rank: int, got: Sequence[torch.Tensor], found: Comparison) -> None:
        """Compare the tensors that ``rank`` received, on the host, with the expected ones."""
        for number, (actual, (own, true)) in enumerate(zip(got, self.expected(rank), strict=True)):
            where = f"{self.collective} {list(self.rows)}, rank {rank}" + (f", {number}" if number else "")
            if self.collective in MOVES and actual.dtype == own.dtype and actual.shape == own.shape:
                actual, own, true = (x.contiguous().flatten().view(torch.uint8) for x in (actual, own, true))
            found.add(compare(where, actual, own, true, ERRORS, torch.device("cpu")))


def banded(x: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``x``, and the memory [nbytes + 2 bands] that it lies in the middle of."""
    raw = torch.full((x.nbytes + 2 * _BAND,), 0xFF, dtype=torch.uint8, device=device)
    held = raw[_BAND : _BAND + x.nbytes].view(x.dtype).view(x.shape)
    return held.copy_(x), raw


@dataclass(frozen=True)
class Seen:
    """Results of one rank for a trial's four calls: two draws, the first again, and its inner rows."""

    results: list[list[torch.Tensor]]
    faults: list[Fault]
    kept: bool


class CommunicatorProbe:
    """One collective in one situation. Ranks meet once for all of its checks."""

    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        collective: str,
        dtype: str,
        world: int,
        rows: str,
        width: str,
        parallel: str,
    ) -> None:
        self.subject, self.collective, self.world = subject, collective, world
        self.title = f"{collective}/{dtype}/{world}/{rows}/{width}/{parallel}"
        named = dtype if collective in SUMS else subject.dtypes()[0]
        self._group = CommunicatorGroup(
            subject,
            subject.target,
            CommunicatorWorkload(
                dtype=named,
                parallel=parallel,
                ranks=world,
                features=frozenset({Feature.BATCH_INVARIANT} & subject.features),
            ),
        )
        seed = plan.seed_of(f"{subject.offer.contribution}/{self.title}")
        self._rows = (_ROWS | _UNEVEN)[rows][:world]
        self._exchanges = [
            Exchange(collective, dtype_of(dtype), self._rows, _WIDTHS[width], seed + n) for n in range(2)
        ]

    def refuses(self) -> Reason | None:
        """Why this is not for the contribution."""
        for need in self.subject.offer.contribution.requires:
            if isinstance(need, TokensRequirement) and self.collective != "all_to_all":
                size = sum(self._rows) if self.collective == "reduce_scatter" else max(self._rows)
                if size < need.min or (need.max is not None and size > need.max):
                    return Reason("tokens", "another size", wanted=str(size), supported=f"{need.min} to {need.max}")
        return self.subject.refuses(self.workload)

    @property
    def workload(self) -> CommunicatorWorkload:
        """The workload of the group."""
        return self._group.workload

    @cached_property
    def _seen(self) -> list[Seen]:
        return self._group.run(self._act)

    def _act(self, member: Member) -> Seen:
        first, second = self._exchanges
        results: list[list[torch.Tensor]] = []
        faults: list[Fault] = []
        held: list[list[torch.Tensor]] = []
        where = f"rank {member.rank}"
        for number, exchange in enumerate((first, second, first)):
            drawn = exchange.given[member.rank]
            x, raw = banded(drawn, member.device)
            before = raw.clone()
            time.sleep(0.001 * ((member.rank + number) % member.world))  # ranks are never at the same place
            got = exchange.run(member.communicator, member.rank, x)
            copies = [y.cpu().clone() for y in got]
            results.append(copies)
            held.append(got)
            inner = slice(_BAND, _BAND + drawn.nbytes)
            if not exchange.writes_input and not torch.equal(raw[inner], before[inner]):
                faults.append(Fault("mutated", where, "the input has changed"))
            raw[inner] = before[inner]
            if not torch.equal(raw, before):
                faults.append(Fault("out-of-bounds", where, "memory beside the tensor was written to"))
            if not exchange.writes_input and any(share_storage(y, x) for y in got):
                faults.append(Fault("aliases", where, "the result shares memory with the input"))
        kept = all(
            equal_bits(y.cpu(), copy)
            for got, copies in zip(held, results, strict=True)
            for y, copy in zip(got, copies, strict=True)
            if not first.writes_input
        )
        if self.collective == "all_reduce" and self._rows[0] > 1:
            row = self._rows[0] // 2
            x = first.given[member.rank][row : row + 1].to(member.device, copy=True)
            results.append([member.communicator.all_reduce(x).cpu().clone()])
        return Seen(results, faults, kept)

    def values(self) -> Finding:
        """``values``: every rank gets what the collective's definition says, in two calls on unlike data."""
        if skipped := too_few_devices(self.subject.site, self.world):
            return skipped
        found = Comparison()
        for rank, seen in enumerate(self._seen):
            for exchange, got in zip(self._exchanges, seen.results[:2], strict=True):
                exchange.judge(rank, got, found)
        return Finding.of(found)

    def inputs(self) -> Finding:
        """``inputs``: nothing is written to that may not be."""
        return Finding(tuple(f for seen in self._seen for f in seen.faults if f.code != "aliases"))

    def aliases(self) -> Finding:
        """``aliases``: a result is memory of its own, and a later call leaves it alone."""
        faults = [f for seen in self._seen for f in seen.faults if f.code == "aliases"]
        for rank, seen in enumerate(self._seen):
            if not seen.kept:
                faults.append(Fault("overwritten", f"rank {rank}", "a later call has overwritten an earlier result"))
        return Finding(tuple(faults))

    def repeat(self) -> Finding:
        """``repeat``: equal inputs give equal bits."""
        for rank, seen in enumerate(self._seen):
            if not all(equal_bits(a, b) for a, b in zip(seen.results[0], seen.results[2], strict=True)):
                return Finding.failed("repeat", f"rank {rank}", "the same call gives other bits the second time")
        return Finding()

    def agree(self) -> Finding:
        """``agree``: every rank has the same bits of a sum. Where ranks differ, they go on to sample unlike tokens."""
        first, *others = (seen.results[0][0] for seen in self._seen)
        for rank, other in enumerate(others, 1):
            if not equal_bits(first, other):
                return Finding.failed("agree", f"ranks 0 and {rank}", "have unlike sums of the same numbers")
        return Finding()

    def batch_invariant(self) -> Finding:
        """``batch-invariant``: a row by itself has the bits that it has among others."""
        for rank, seen in enumerate(self._seen):
            if len(seen.results) == 4:
                row = self._rows[0] // 2
                if not equal_bits(seen.results[3][0], seen.results[0][0][row : row + 1]):
                    return Finding.failed("batch-invariant", f"rank {rank}", f"row {row} by itself has other bits")
        return Finding()


def order(group: CommunicatorGroup, present: Sequence[str], plan: Plan) -> Finding:
    """``order``: all collectives in a mixed order, of all sizes, while ranks come early and late."""
    drawn = random.Random(plan.seed)
    world, dtype = group.workload.ranks or 1, dtype_of(group.workload.dtype or "float32")
    calls = []
    for number in range(5 * len(present)):
        name = present[number % len(present)] if number < len(present) else drawn.choice(present)
        rows = drawn.choice([*_ROWS.values(), *([] if name in _EQUAL_ROWS else _UNEVEN.values())])
        most = min((r.max for r in _ranges(group.subject) if r.max is not None), default=None)
        least = max((r.min for r in _ranges(group.subject)), default=0)
        if most is None and least <= 1:
            width = _WIDTHS[drawn.choice([*(_MATRICES if name == "all_gather_columns" else _WIDTHS)])]
            calls.append(Exchange(name, dtype, rows[:world], width, plan.seed + number))
        else:
            size = drawn.randint(max(1, least), min(most or least + 7, least + 7))
            calls.append(Exchange(name, dtype, (size,) * world, (world * 8,), plan.seed + number))
    for call in calls:
        assert call.given  # drawn here, once for all ranks

    def act(member: Member) -> list[list[torch.Tensor]]:
        own = random.Random(member.rank)
        got = []
        for call in calls:
            if own.random() < 0.3:
                time.sleep(own.random() / 500)
            x = call.given[member.rank].to(member.device, copy=True)
            got.append([y.cpu().clone() for y in call.run(member.communicator, member.rank, x)])
        return got

    found = Comparison()
    for rank, results in enumerate(group.run(act)):
        for call, got in zip(calls, results, strict=True):
            call.judge(rank, got, found)
    return Finding.of(found)


def close(group: CommunicatorGroup, present: Sequence[str], plan: Plan) -> Finding:
    """``close``: ends in time, leaves no thread behind, and a later call raises."""

    def act(member: Member) -> str | None:
        first = _call(present, member)
        first()
        started = time.monotonic()
        member.communicator.close()
        took = time.monotonic() - started
        if took > _ENOUGH:
            return f"took {took:.1f} s"
        try:
            first()
        except RuntimeError:
            return None
        return "a collective after it returned a result; it must raise RuntimeError"

    group.run(act, close=False)
    before = _threads()
    for _ in range(3):
        for rank, fault in enumerate(group.run(act, close=False)):
            if fault:
                return Finding.failed("close", f"rank {rank}", fault)
    deadline = time.monotonic() + 2
    while _threads() >= before + 3:
        if time.monotonic() > deadline:
            return Finding.failed("thread", "close", f"{_threads() - before} threads are left by three groups")
        time.sleep(0.02)
    return Finding()


def aborted(group: CommunicatorGroup, present: Sequence[str], plan: Plan) -> Finding:
    """``abort``: called from another thread, it ends a collective that waits for a rank in vain, or lets it time out.

    Some libraries cannot interrupt what waits: then ``ctx.parallel.timeout`` ends it, and here that is short. A
    collective that returned before the abort, since the device's queue waits in its place, need not raise: a wait for
    it returns in time, and the next call raises.
    """
    group = replace(group, timeout=_SHORT)
    released, waiting, somebody_left = threading.Event(), list[int](), threading.Event()

    def act(member: Member) -> str | None:
        call = _call(present, member)
        call().cpu()  # all have come
        if member.rank == 0:  # the rank that never comes
            released.wait(3 * _ENOUGH)
            member.communicator.abort()
            return None
        waiting.append(member.rank)
        has_left = threading.Event()

        def leave() -> None:
            somebody_left.set()
            try:
                member.communicator.abort()
            finally:
                has_left.set()

        timer = threading.Timer(_UNTIL_ABORT, leave)
        timer.daemon = True  # whatever abort() waits for
        timer.start()
        try:
            return _in_vain(call, somebody_left, has_left)
        finally:
            waiting.pop()
            if not waiting:
                released.set()

    try:
        said = group.run(act, close=False, seconds=2 * _ENOUGH)
    except HungError as error:
        return Finding.failed("hang", "abort", f"a collective under way goes on: {error}")
    faults = [Fault("abort", f"rank {rank}", text) for rank, text in enumerate(said) if text]
    return Finding(tuple(faults))


def _in_vain(call: Callable[[], torch.Tensor], somebody_left: threading.Event, has_left: threading.Event) -> str | None:
    """Faults in how a collective ends that waits until its own rank, or another that waits, has left."""
    started = time.monotonic()
    try:
        result = call()
        is_queued = not somebody_left.is_set()
        result.cpu()
        if not is_queued or not somebody_left.is_set():
            return "the collective under way returned a result; it must raise RuntimeError"
    except RuntimeError:
        pass
    if (took := time.monotonic() - started) > _ENOUGH:
        return f"the collective under way took {took:.1f} s to end"
    has_left.wait(_ENOUGH)
    try:
        call()
    except RuntimeError:
        return None
    return "a collective after it returned a result; it must raise RuntimeError"


def _call(present: Sequence[str], member: Member) -> Callable[[], torch.Tensor]:
    """A collective that waits for every rank."""
    comm, ones = member.communicator, torch.ones(4, 8, dtype=member.context.dtype, device=member.device)
    return partial(comm.all_reduce if "all_reduce" in present else comm.all_gather, ones)


def _ranges(subject: Subject) -> list[TokensRequirement]:
    return [need for need in subject.offer.contribution.requires if isinstance(need, TokensRequirement)]


def _threads() -> int:
    """The process's threads, those that Python knows nothing of too where the system lists them."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
