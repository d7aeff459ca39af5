"""Host memory from which a step's arrays travel to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

StagedArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""An array of a step. Indices of tensors are int64, so that the device need not convert them."""


class Staging:
    """A ring of packed host buffers: one is filled while the device may still copy from the others.

    ``stage`` returns device tensors, views of one transferred block, valid until the ring comes
    round. A device that computes in the host's own memory reads the packed buffers themselves.
    """

    def __init__(
        self, capacity: int, device: torch.device, pin: Callable[[torch.Tensor], torch.Tensor], depth: int = 2
    ) -> None:
        """``capacity`` counts int32 elements per step, ``depth`` the buffers in the ring (at least two).

        An int64 takes two elements, aligned.
        """
        self._ring = [pin(torch.zeros(capacity, dtype=torch.int32)) for _ in range(depth)]
        self._is_copied = device.type != self._ring[0].device.type
        on_device = self._ring
        if self._is_copied:
            on_device = [torch.zeros(capacity, dtype=torch.int32, device=device) for _ in range(depth)]
        # Each buffer as int32 and as int64.
        even = capacity // 2 * 2
        self._packed = [(host.numpy(), host[:even].view(torch.int64).numpy()) for host in self._ring]
        self._on_device = [(buffer, buffer[:even].view(torch.int64)) for buffer in on_device]
        self._turn = 0

    def stage(self, arrays: Mapping[str, StagedArray]) -> dict[str, torch.Tensor]:
        """Copy ``arrays`` to the device and return them under their names, with their shapes and dtypes."""
        self._turn = (self._turn + 1) % len(self._ring)
        packed, on_device = self._packed[self._turn], self._on_device[self._turn]
        end, places = 0, []
        for array in arrays.values():
            wide = array.itemsize == 8
            start = (end + 1) >> 1 if wide else end  # counted in elements of the array's own size
            stop = start + array.size
            packed[wide][start:stop] = array.reshape(-1)
            end = stop << wide
            places.append((wide, start, stop))
        if self._is_copied:
            on_device[0][:end].copy_(self._ring[self._turn][:end], non_blocking=True)
        staged = {}
        for (name, array), (wide, start, stop) in zip(arrays.items(), places, strict=True):
            part = on_device[wide][start:stop]
            staged[name] = part if array.ndim == 1 else part.view(array.shape)
        return staged
