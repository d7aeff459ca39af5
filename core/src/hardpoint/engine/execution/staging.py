"""Host memory from which a step's arrays travel to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch


class Staging:
    """A ring of packed host buffers: one is filled while the device may still copy from the others.

    Arrays are int32; ``stage`` returns device tensors, views of one transferred block, valid until the ring comes
    round. A device that computes in the host's own memory reads the packed buffers themselves.
    """

    def __init__(
        self, capacity: int, device: torch.device, pin: Callable[[torch.Tensor], torch.Tensor], depth: int = 2
    ) -> None:
        """``capacity`` counts int32 elements per step, ``depth`` the buffers in the ring (at least two)."""
        self._ring = [pin(torch.zeros(capacity, dtype=torch.int32)) for _ in range(depth)]
        self._packed: list[npt.NDArray[np.int32]] = [host.numpy() for host in self._ring]
        self._is_copied = device.type != self._ring[0].device.type
        self._on_device = self._ring
        if self._is_copied:
            self._on_device = [torch.zeros(capacity, dtype=torch.int32, device=device) for _ in range(depth)]
        self._turn = 0

    def stage(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> dict[str, torch.Tensor]:
        """Copy ``arrays`` to the device and return them under their names and shapes."""
        self._turn = (self._turn + 1) % len(self._ring)
        packed, device = self._packed[self._turn], self._on_device[self._turn]
        end = 0
        for array in arrays.values():
            packed[end : end + array.size] = array.reshape(-1)
            end += array.size
        if self._is_copied:
            device[:end].copy_(self._ring[self._turn][:end], non_blocking=True)
        staged, start = {}, 0
        for name, array in arrays.items():
            staged[name] = device[start : start + array.size].view(array.shape)
            start += array.size
        return staged
