"""How ranks find each other's memory; CUDA's driver is replaced by one that keeps a list of what it is asked for."""

from __future__ import annotations

import ctypes
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.parallel.process_group import FileStore, PrefixStore, Store
from hardpoint_cuda import peer_memory
from hardpoint_cuda.peer_memory import PeerMemory, _Driver
from hardpoint_plugin_api import PlatformError
from tests.parallel.ranks import on_each

MAPPED = 1 << 40
"""Where another process's memory appears, beyond where it lies in its own."""


class Driver:
    """Allocations start 64 bytes before the memory that is shared; a handle is the start, written out."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012  # put in its place anew by each test

    def exported(self, address: int) -> tuple[int, str]:
        return address - 64, f"{address - 64:x}"

    def opened(self, handle: str) -> int:
        return int(handle, 16) + MAPPED

    def close(self, address: int) -> None:
        self.calls.append(("close", address))

    def enable_peer(self, device: int) -> None:
        self.calls.append(("enable", device))


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(peer_memory, "_Driver", Driver)
    monkeypatch.setattr(Driver, "calls", [])


def share(world: int, folder: Path) -> tuple[list[int], list[tuple[int, ...]]]:
    """Each rank's own address, and what each rank sees of all."""
    memory = [torch.zeros(256, dtype=torch.uint8) for _ in range(world)]

    def run(rank: int, store: Store) -> tuple[int, ...]:
        threading.current_thread().name = f"rank {rank}"
        own = PrefixStore("memory", FileStore(str(folder / "store"), world))
        peers = PeerMemory(memory[rank], own, rank, world, 30)
        peers.close()
        return tuple(peers.pointers)

    return [x.data_ptr() for x in memory], on_each(world, run)


def test_ranks_in_processes_open_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they are threads, each with a host's name of its own."""
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    own, seen = share(3, tmp_path)
    for rank, pointers in enumerate(seen):
        assert pointers == tuple(x if other == rank else x + MAPPED for other, x in enumerate(own))
    opened = [("close", x - 64 + MAPPED) for x in own]
    assert sorted(Driver.calls) == sorted(opened * 2), "each is closed by both others"


def test_ranks_of_one_process_use_addresses(tmp_path: Path) -> None:
    own, seen = share(2, tmp_path)
    assert seen == [tuple(own)] * 2
    assert {call[0] for call in Driver.calls} == {"enable"}


def test_what_the_driver_refuses_is_said() -> None:
    class Library:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                if name == "cuGetErrorName":
                    ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"
                return {"cuIpcGetMemHandle": 1, "cuCtxEnablePeerAccess": 704}.get(name, 0)

            return call

    driver = _Driver.__new__(_Driver)
    driver._library = Library()  # type: ignore[assignment]  # answers as CUDA's would
    driver.enable_peer(1)  # is on already
    said = r"cuIpcGetMemHandle fails with CUDA_ERROR_INVALID_VALUE \(1\).*expandable_segments.*=composed"
    with pytest.raises(PlatformError, match=said):
        driver.exported(4096)
