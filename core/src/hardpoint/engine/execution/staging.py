"""Host memory from which a step's arrays travel to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch


class Staging:
    """A ring of packed host buffers: one is filled while the device may still copy from the others.

    Arrays are int32; ``stage`` returns device tensors, views of one transferred block, valid until the ring comes
    round.
    """

    def __init__(
        self, capacity: int, device: torch.device, pin: Callable[[torch.Tensor], torch.Tensor], depth: int = 2
    ) -> None:
        """``capacity`` counts int32 elements per step, ``depth`` the buffers in the ring (at least two)."""
        self._device = device
        self._ring = [pin(torch.zeros(capacity, dtype=torch.int32)) for _ in range(depth)]
        self._on_device = [torch.zeros(capacity, dtype=torch.int32, device=device) for _ in range(depth)]
        self._turn = 0

    def stage(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> dict[str, torch.Tensor]:
        """Copy ``arrays`` to the device and return them under their names and shapes."""
        self._turn = (self._turn + 1) % len(self._ring)
        host, device = self._ring[self._turn], self._on_device[self._turn]
        packed = host.numpy()
        end = 0
        for array in arrays.values():
            packed[end : end + array.size] = array.reshape(-1)
            end += array.size
        device[:end].copy_(host[:end], non_blocking=True)
        staged, start = {}, 0
        for name, array in arrays.items():
            staged[name] = device[start : start + array.size].view(array.shape)
            start += array.size
        return staged
