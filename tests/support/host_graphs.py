"""Graphs of a device whose tensors are on the host: as torch's modules have them, of operators called again."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_iter

from tests.support.on_host import HostModule
from tests.support.recorder import CALLS_OF_THE_HOST, Recorder


class HostStream:
    """A stream of the host, which is never behind itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: HostStream) -> None:
        """There is nothing to wait for."""


class HostGraph:
    """Parameters and order of calls are those of ``torch.cuda.CUDAGraph`` (torch/cuda/graphs.py of 2.13)."""

    captured: ClassVar[int] = 0
    """Of all graphs."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recorder: Recorder | None = None
        self._pool: tuple[int, int] | None = None
        self._is_whole = False

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        assert self._recorder is None, "a graph is captured once"
        assert pool is not None
        self._recorder, self._pool = Recorder("step", frozenset()), pool
        self._recorder.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def capture_end(self) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        waits = [func for func, *_ in self._recorder.calls if func.name().partition(".")[0] in CALLS_OF_THE_HOST]
        if waits:
            raise RuntimeError(f"operation not permitted when stream is capturing: {waits[0]}")
        self._is_whole = True
        type(self).captured += 1

    def replay(self) -> None:
        assert self._recorder is not None
        assert self._is_whole, "a refused capture cannot be replayed"
        for call, arguments, options, outputs in self._recorder.calls:
            again = call(*arguments, **options)
            for old, new in zip(tree_iter(outputs), tree_iter(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> tuple[int, int]:
        assert self._pool is not None
        return self._pool


class HostModuleWithGraphs(HostModule):
    """The same module with streams, and pools of graphs' memory."""

    Stream = HostStream

    def __init__(self) -> None:
        super().__init__()
        self._pools = itertools.count(1)

    def current_stream(self, device: torch.device) -> HostStream:
        return HostStream(device)

    def stream(self, stream: HostStream) -> AbstractContextManager[None]:
        return nullcontext()

    def graph_pool_handle(self) -> tuple[int, int]:
        return next(self._pools), 0

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return []
