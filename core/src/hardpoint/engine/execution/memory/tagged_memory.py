"""A device's memory by its holder: weights, resources, cache, graphs.

Every allocation of torch's on the device within a tag's pool counts under that tag for as long as it lives, also those
of a plugin's packing or a vendor's operator. Counting goes by storages, so it is the same on every platform, and sees
what is still held after it should have been given back. Memory that no operator returned, such as that between the
operators of a captured step, is reported by its holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.engine.control import TAGS, MemoryReport
from hardpoint_plugin_api import Memory, MemoryTag


class TaggedMemory:
    """A platform's memory, with what is held under each tag."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self.memory, self._device = memory, device
        self._storages: dict[int, tuple[MemoryTag, StorageWeakRef]] = {}
        self._suspended: set[MemoryTag] = set()
        self._known: dict[MemoryTag, Callable[[], int]] = {}

    @contextmanager
    def pool(self, tag: MemoryTag) -> Iterator[None]:
        """Allocate under ``tag`` within the block. Earlier allocations keep their tags."""
        if tag in self._known:  # looking at each operator takes a third of the time that preparing a step does
            with self.memory.pool(tag):
                yield
            return
        with self.memory.pool(tag), _Recorder(self._device) as recorder:
            yield
        self._forget_dead()
        for key, reference in recorder.storages.items():
            if not reference.expired():
                self._storages.setdefault(key, (tag, reference))

    def know(self, tag: MemoryTag, nbytes: Callable[[], int]) -> None:
        """Let ``nbytes`` tell what is held under ``tag``, where nobody looks at what is allocated from now on."""
        self._known[tag] = nbytes

    def suspend(self, tag: MemoryTag) -> None:
        """Let the platform suspend the memory of ``tag``; tensors keep their addresses. Raises PlatformError."""
        self.memory.suspend([tag])
        self._suspended.add(tag)

    def resume(self, tag: MemoryTag) -> None:
        """Undo ``suspend``; contents are undefined then. Raises PlatformError, and the tag stays suspended."""
        self.memory.resume([tag])
        self._suspended.discard(tag)

    def held(self, tag: MemoryTag) -> int:
        """Bytes that are held under ``tag`` now."""
        if tag in self._suspended:
            return 0
        self._forget_dead()
        seen = sum(_nbytes(reference) for name, reference in self._storages.values() if name == tag)
        return max(seen, self._known[tag]()) if tag in self._known else seen

    def report(self) -> MemoryReport:
        """The bytes held now."""
        return MemoryReport({tag: self.held(tag) for tag in TAGS}, self.memory.snapshot())

    def _forget_dead(self) -> None:
        """A reference keeps its storage's address from being reused, so that a dead one is no other's."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[1].expired()}


class _Recorder(TorchDispatchMode):
    """Notes the storages on a device that operators return, unless they were given them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, which says nothing of types
        self._device = device
        self.storages: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own hook: otherwise a first call imports its compiler, which takes a second or two."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [storage for storage in self._storages_in(result) if storage._cdata not in self.storages]
        given = {storage._cdata for storage in self._storages_in((args, kwargs))} if made else ()
        for storage in made:
            if storage._cdata not in given:  # a view is no new memory
                self.storages[storage._cdata] = StorageWeakRef(storage)
        return result

    def _storages_in(self, values: object) -> Iterator[torch.UntypedStorage]:
        """Of the tensors among arguments or results, which lie in tuples, lists and dicts."""
        if isinstance(values, torch.Tensor):
            if values.device == self._device:
                yield values.untyped_storage()
        elif isinstance(values, tuple | list):
            for value in values:
                yield from self._storages_in(value)
        elif isinstance(values, dict):
            yield from self._storages_in(tuple(values.values()))


def _nbytes(reference: StorageWeakRef) -> int:
    """The size of a storage now; none where it has died."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()
