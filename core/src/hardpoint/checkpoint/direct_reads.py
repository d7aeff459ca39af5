"""Files read past the page cache (``O_DIRECT``), by several threads, ahead of whoever wants the bytes.

Mapped pages are read one after the other as they are touched. That is best where another process has read them before,
and slow where the disk has to be asked. ``reads_faster`` measures which of both a file is read by.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

PAGE = mmap.PAGESIZE
"""Offsets, lengths and addresses of direct reads are multiples of it."""

_THREADS = 4
_CHUNK = 8 << 20
"""Bytes of one read."""
_AHEAD = 256 << 20
"""Bytes that are read before they are wanted, unless one span has more."""
_KEPT = 64 << 20
"""Bytes of a buffer that stay in memory while another span is read."""
_TRIAL = 16 << 20
"""Bytes that are read in either way to measure it."""


class Span(NamedTuple):
    """The part of a tensor that is wanted: ``nbytes`` of the file from ``start`` on.

    The tensor has ``whole`` bytes from ``origin`` on.
    """

    start: int
    nbytes: int
    origin: int
    whole: int


class NoRoomError(Exception):
    """The process may not have the addresses that direct reads take."""


class _Buffer:
    """Room for one span, in the middle of addresses that are never touched: a tensor of which a part is read has its
    whole shape, and takes the memory of that part."""

    def __init__(self, longest: int, largest: int) -> None:
        """``longest`` is the most bytes of a span, ``largest`` those of a tensor.

        Raises OSError where the process may not have as many addresses: a limit on them (RLIMIT_AS, ``ulimit -v``) and
        strict overcommit (vm.overcommit_memory=2) count those that are never touched, too.
        """
        self._window = -(-largest // PAGE) * PAGE
        size = 2 * self._window + -(-longest // PAGE) * PAGE + 2 * PAGE
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def view(self, span: Span) -> tuple[int, memoryview]:
        """The file's offset to read from, and where to: all pages that ``span`` touches."""
        first = span.start // PAGE * PAGE
        count = -(-(span.start + span.nbytes - first) // PAGE) * PAGE
        return first, memoryview(self.memory)[self._window : self._window + count]

    def origin(self, span: Span) -> int:
        """Where in ``memory`` the tensor of ``span`` begins."""
        return self._window + span.start % PAGE - (span.start - span.origin)

    def forget(self, span: Span) -> None:
        """Give back the memory of a long span that was read."""
        _, view = self.view(span)
        if (more := len(view) - _KEPT) > 0:
            self.memory.madvise(mmap.MADV_DONTNEED, self._window + _KEPT, more)


class DirectFile:
    """One file, opened for direct reads. Raises OSError where its file system has none."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._size = os.fstat(self._file).st_size
        self._pool = ThreadPoolExecutor(_THREADS, "hardpoint-reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)

    def read(self, offset: int, into: memoryview) -> list[Future[None]]:
        """Begin to read the bytes from ``offset`` on, in parts."""
        return [
            self._pool.submit(self._read, offset + at, into[at : at + _CHUNK]) for at in range(0, len(into), _CHUNK)
        ]

    def spans(self, spans: Sequence[Span]) -> Iterator[tuple[mmap.mmap, int]]:
        """Read ``spans`` in their order; yields memory, and where in it each span's tensor begins.

        Of the tensor nothing but the span may be looked at, and nothing when the next one is asked for. Raises
        NoRoomError at once where there is no room for one span; where there is room for few, few are read ahead.
        """
        longest, largest = max(span.nbytes for span in spans), max(span.whole for span in spans)
        try:
            first = _Buffer(longest, largest)
        except OSError as error:
            raise NoRoomError(f"no room for a tensor of {largest:,} bytes: {error}") from error
        return self._spans(spans, longest, largest, first)

    def _spans(
        self, spans: Sequence[Span], longest: int, largest: int, first: _Buffer
    ) -> Iterator[tuple[mmap.mmap, int]]:
        free, waiting = [first], deque[tuple[_Buffer, list[Future[None]]]]()
        begun = ahead = 0
        for span in spans:
            while begun < len(spans) and (not waiting or ahead + spans[begun].nbytes <= _AHEAD):
                try:
                    buffer = free.pop() if free else _Buffer(longest, largest)
                except OSError:  # the buffers that are there suffice: one at least is waited for
                    break
                waiting.append((buffer, self.read(*buffer.view(spans[begun]))))
                ahead += spans[begun].nbytes
                begun += 1
            buffer, reads = waiting.popleft()
            for each in reads:
                each.result()
            yield buffer.memory, buffer.origin(span)
            buffer.forget(span)
            free.append(buffer)
            ahead -= span.nbytes

    def _read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` as far as the file reaches. Raises OSError where it ends before."""
        done, wanted = 0, min(len(into), self._size - offset)
        while done < wanted:
            count = os.preadv(self._file, [into[done:]], offset + done)
            done += count
            if done < wanted and (not count or count % PAGE):
                raise OSError(f"{wanted - done} bytes at {offset + done} could not be read")


def reads_faster(path: Path, spans: Sequence[Span]) -> bool:
    """Whether direct reads of ``spans`` are faster than mapped pages of the file: some of them are read either way."""
    if len(spans) < 2 or sum(span.nbytes for span in spans) < 8 * _TRIAL:
        return False
    mapped, direct = spans[len(spans) // 3], spans[2 * len(spans) // 3]
    with suppress(OSError), DirectFile(path) as file:
        room = mmap.mmap(-1, _TRIAL)  # not closed: an error's traceback, and a thread for moments, have views of it
        return _rate_of_direct(file, direct, room) > _rate_of_mapped(path, mapped)
    return False


def _rate_of_direct(file: DirectFile, span: Span, room: mmap.mmap) -> float:
    first = span.start // PAGE * PAGE
    count = min(_TRIAL, -(-span.nbytes // PAGE) * PAGE)
    room[::PAGE] = bytes(len(room[::PAGE]))  # its pages are there, as those of a buffer that is used again
    began = time.perf_counter()
    with memoryview(room) as view:
        part = count // _THREADS // PAGE * PAGE or PAGE
        reads = [each for at in range(0, count, part) for each in file.read(first + at, view[at : at + part])]
        for each in reads:
            each.result()
        del reads
    return count / (time.perf_counter() - began)


def _rate_of_mapped(path: Path, span: Span) -> float:
    count = min(_TRIAL, span.nbytes)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
        began = time.perf_counter()
        pages[span.start : span.start + count : PAGE]  # one byte of each
        return count / (time.perf_counter() - began)
