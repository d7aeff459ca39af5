"""AITER's quick all-reduce: AMD GPUs of one host write partial sums to each other, quantized on the way or as they are.

Sums that are too small or too large for it, of other dtypes, and every other collective go through RCCL. None of this
ran on hardware. Limits and sizes: ``csrc/kernels/quick_all_reduce.cu`` (0bfb047d), ``quick_all_reduce.cuh`` in
``csrc/include`` (0187b44a) and ``aiter/dist/device_communicators/quick_all_reduce.py`` (0c3e72b7) of
github.com/ROCm/aiter.

Its kernels wait on the device for the other ranks, without end: where one dies, an engine ends each rank's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.parallel.store_comm import StoreComm
from hardpoint_plugin_api import BuildContext, CommunicatorWorkload, ConfigError, DeviceInfo, Reason
from hardpoint_rocm.aiter_library import function, reasons_against
from hardpoint_rocm.communicator import Rccl

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LEVELS = ("fp", "fp8", "int6", "int4", "int3")
"""Values of ``--rocm.quick_reduce``; places are AITER's numbers of them (``QuickReduceQuantLevel``)."""

RANKS = (2, 4, 8)
_FUNCTIONS = ("init_custom_qr", "qr_get_handle", "qr_open_handles", "qr_all_reduce", "qr_destroy")
_HANDLE_BYTES = 64
"""Of a hipIpcMemHandle_t."""

_VECTOR = 16
_MIB = 2**20
_SMALLEST_MIB = {
    (torch.float16, 2): (1, 2, 2, 1, 1),
    (torch.float16, 4): (1, 16, 4, 2, 2),
    (torch.float16, 8): (16, 4, 4, 8, 8),
    (torch.bfloat16, 2): (2, 8, 8, 8, 8),
    (torch.bfloat16, 4): (8, 64, 64, 16, 16),
    (torch.bfloat16, 8): (16, 2048, 2048, 2048, 2048),
}
"""By level: from so many MiB on AITER's authors measured it to be faster (``_QR_MIN_SIZE``)."""


class QuickAllReduce(Rccl):
    """Sums of whole vectors in 16-bit floats, from ``smallest`` to ``largest`` bytes, by AITER.

    The library takes twice ``largest`` bytes of the device's memory by itself.
    """

    def __init__(self, ctx: BuildContext, workload: CommunicatorWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.ranks is not None
        assert workload.dtype is not None
        config, dtype = ctx.plugin_config("rocm"), getattr(torch, workload.dtype)
        name, least = str(config["quick_reduce"]), str(config["quick_reduce_min_bytes"])
        if name not in LEVELS:
            raise ConfigError(f"--rocm.quick_reduce {name}: it is not one of {', '.join(LEVELS)}")
        if name == "int3" and workload.ranks != 2:
            raise ConfigError(f"--rocm.quick_reduce int3: serves 2 ranks, not {workload.ranks}; take int4")
        if least != "auto" and not least.isdigit():
            raise ConfigError(f"--rocm.quick_reduce_min_bytes {least}: must be auto or a number of bytes")
        self.level, self._dtype = LEVELS.index(name), dtype
        self.largest = int(str(config["quick_reduce_max_mib"])) * _MIB
        if self.largest <= 0:
            raise ConfigError(f"--rocm.quick_reduce_max_mib {self.largest // _MIB}: must be above 0")
        self.smallest = _SMALLEST_MIB[dtype, workload.ranks][self.level] * _MIB if least == "auto" else int(least)
        self._made: int | None = None

    @classmethod
    def supports(cls, workload: CommunicatorWorkload, device: DeviceInfo) -> list[Reason]:
        found = []
        if workload.ranks not in (None, *RANKS):
            supported = ", ".join(map(str, RANKS))
            found.append(Reason("ranks", "groups of other sizes only", wanted=str(workload.ranks), supported=supported))
        return found + reasons_against(*_FUNCTIONS)

    def init(self, store: Store, rank: int, world: int, group: str) -> None:
        super().init(store, rank, world, group)
        self._made = int(function("init_custom_qr")(rank=rank, world_size=world, qr_max_size=self.largest))
        own = torch.empty(_HANDLE_BYTES, dtype=torch.uint8)  # the library copies to and from memory of the host
        function("qr_get_handle")(fa=self._made, out_ptr=own.data_ptr())
        found = StoreComm(store, rank, world, self.ctx.parallel.timeout).allgather(own.tolist())
        handles = [torch.tensor(handle, dtype=torch.uint8) for handle in found]
        function("qr_open_handles")(fa=self._made, handle_ptrs=[handle.data_ptr() for handle in handles])

    def close(self) -> None:
        made, self._made = self._made, None
        super().close()
        if made is not None:
            function("qr_destroy")(fa=made)

    def abort(self) -> None:
        self._made = None
        super().abort()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._made is None or not self._fits(x):
            return super().all_reduce(x)
        out = torch.empty_like(x)
        function("qr_all_reduce")(fa=self._made, inp=x, out=out, quant_level=self.level, cast_bf2half=False)
        return out

    def _fits(self, x: torch.Tensor) -> bool:
        """Whether the library sums tensors like ``x``, which are alike on all ranks."""
        is_whole = x.is_contiguous() and x.nbytes % _VECTOR == 0 and x.data_ptr() % _VECTOR == 0
        return x.dtype == self._dtype and is_whole and max(1, self.smallest) <= x.nbytes <= self.largest
