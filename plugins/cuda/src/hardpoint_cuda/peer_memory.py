"""Memory of one GPU that the ranks of a group write to directly: CUDA's interprocess handles, exchanged by the store.

Ranks in processes of their own open each other's handles; ranks in threads of one process, as the conformance kit has
them, use the addresses as they are. Neither multicast nor a fabric is involved: all that is needed is that each GPU can
reach the others (the device feature ``p2p``).
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from hardpoint_plugin_api import PlatformError, Reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LAZY_PEER_ACCESS = 1
_PEER_ACCESS_IS_ON = 704
_COMPOSED = "--use op.allreduce_add_rms_norm=composed"


def segments_expand() -> bool:
    """Whether torch's allocator is told to map its memory piece by piece, which has no interprocess handle.

    By the variables of torch's documentation, "CUDA semantics", "Optimizing memory usage".
    """
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def allocator_reasons() -> list[Reason]:
    """Reasons against memory that torch's allocator keeps to its process."""
    if not segments_expand():
        return []
    fix = "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
    return [Reason("allocator", "memory of expandable segments has no handle for other processes", fix=fix)]


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("data", ctypes.c_ubyte * 64),)


class PeerMemory:
    """``pointers`` are the addresses of every rank's memory, as this rank's GPU reaches them, in the ranks' order."""

    def __init__(
        self, own: torch.Tensor, store: Store, rank: int, world: int, seconds: float, instead: str = _COMPOSED
    ) -> None:
        """Meet the other ranks: each gives ``own``, equally much, filled and in place. Waits for them ``seconds``.

        Raises PlatformError where a GPU cannot reach another's memory; ``instead`` are the options of an engine that
        does without.
        """
        self._device, self._store, self._rank, self._world = own.device, store, rank, world
        self._timeout, self._opened = timedelta(seconds=seconds), list[int]()
        with torch.cuda.device(own.device):
            torch.cuda.synchronize()
            self._driver = _Driver()
            self._driver.instead = instead
            base, handle = self._driver.exported(own.data_ptr())
            place = f"{socket.gethostname()}/{os.getpid()}"
            store.set(f"memory/{rank}", json.dumps([place, handle, own.data_ptr(), base, own.device.index]))
            self.pointers: Sequence[int] = tuple(
                own.data_ptr() if other == rank else self._reach(other, place) for other in range(world)
            )

    def _reach(self, other: int, place: str) -> int:
        name = f"memory/{other}"
        self._store.wait([name], self._timeout)
        found, handle, address, base, device = json.loads(self._store.get(name))
        if found == place:
            self._driver.enable_peer(device)
            return int(address)
        opened = self._driver.opened(handle)
        self._opened.append(opened)
        return int(opened + address - base)

    def close(self) -> None:
        """Let go of the others' memory once all are about to; afterwards each may free its own."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._store.set(f"left/{self._rank}", "yes")
            self._store.wait([f"left/{rank}" for rank in range(self._world)], self._timeout)
            for opened in self._opened:
                self._driver.close(opened)
            self._opened.clear()


class LeavingWord:
    """An int32 of the host's memory, by which its kernels that wait on the device learn that a rank has left its group.

    The device reads it where it lies, so that ``write`` calls no driver: calls of a process may wait for a copy to the
    host, which waits for such a kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    @property
    def address(self) -> int:
        """Where the word lies, for the host and for the device."""
        return self._word.data_ptr()

    def write(self) -> None:
        """Write a one, from any thread."""
        with torch.inference_mode():  # the word may have been made in it, and this thread may not be
            self._word.fill_(1)


def addresses(pointers: Sequence[int], leaving: LeavingWord, device: torch.device) -> torch.Tensor:
    """int64 [N + 1], as the kernels read it: every rank's memory, and the leaving word of this one."""
    return torch.tensor([*pointers, leaving.address], dtype=torch.int64, device=device)


class _Driver:
    """Calls of CUDA's driver, in the calling thread's current context."""

    instead = _COMPOSED
    """Options of an engine that does without."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def exported(self, address: int) -> tuple[int, str]:
        """The start of the allocation that ``address`` lies in, and its handle."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return base.value, bytes(handle.data).hex()

    def opened(self, handle: str) -> int:
        """The address at which another process's allocation is seen here."""
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        """Undo ``opened``."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def enable_peer(self, device: int) -> None:
        """Let the current device reach the memory of ``device``, which this process uses too."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        self._call("cuCtxEnablePeerAccess", context, ctypes.c_uint(0), allowed=_PEER_ACCESS_IS_ON)

    def _call(self, name: str, *arguments: object, allowed: int = 0) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (0, allowed):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise PlatformError(
                f"GPUs cannot share memory: {name} fails with {(text.value or b'?').decode()} ({code}); it needs GPUs "
                "that reach each other (nvidia-smi topo -p2p r), and PYTORCH_CUDA_ALLOC_CONF without "
                f"expandable_segments. To do without: {self.instead}"
            )
