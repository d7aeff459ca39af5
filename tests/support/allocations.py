"""The memory of the tensors that operators make, as they run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LargestTensor(TorchDispatchMode):
    """``nbytes``: those of the largest tensor that an operator of torch made while this was entered. Views count as
    nothing, since they share the memory of an argument."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, which says nothing of types
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = {place: size for place, size in _storages(result).items() if place not in given}
        self.nbytes = max(self.nbytes, *made.values(), 0)
        return result


def _storages(values: object) -> dict[int, int]:
    """Address and bytes of the memory of each tensor among ``values``."""
    storages = [x.untyped_storage() for x in tree_iter(values) if isinstance(x, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
