"""An engine's memory by tag, and how it is given back for sleep and taken again on waking up."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from hardpoint.engine.execution.memory.tagged_memory import TaggedMemory
from hardpoint_plugin_api import CapacityError, MemoryTag, PlatformError

logger = logging.getLogger(__name__)


class Holder(Protocol):
    """Owner of the memory of one tag (weights, the KV cache): can free it, and allocate it again."""

    def drop(self) -> None:
        """Free the memory."""
        ...

    def restore(self) -> None:
        """Allocate the memory again and make its contents valid. Weights are read from their files again."""
        ...


class InPlaceHolder(Holder, Protocol):
    """Owner of memory that a platform may suspend and bring back at the same addresses."""

    def clear(self) -> None:
        """Give the memory usable contents: after a resume they are undefined."""
        ...


class Holdings:
    """The tags of one engine, each with its holder; a tag without one is left alone. ``in_place`` ones are left to the
    platform where it can suspend them; else, and for those ``read`` from files, whose contents matter, the holders free
    their tensors and allocate new ones."""

    def __init__(
        self, memory: TaggedMemory, read: Mapping[MemoryTag, Holder], in_place: Mapping[MemoryTag, InPlaceHolder]
    ) -> None:
        self.memory = memory
        self._in_place, self._holders = dict(in_place), dict[MemoryTag, Holder](read) | dict(in_place)
        self._asleep: dict[MemoryTag, None] = {}

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """Tags whose memory was given back."""
        return frozenset(self._asleep)

    def sleep(self, tags: Collection[MemoryTag]) -> None:
        """Give back the memory of ``tags``; those that sleep already are left alone."""
        before = self.memory.report()
        for tag in [tag for tag in tags if tag in self._holders and tag not in self._asleep]:
            if self._is_suspendable(tag):
                self.memory.suspend(tag)
                self._asleep[tag] = None
            else:
                self._asleep[tag] = None  # before: it is not whole where an interrupt stops this halfway
                self._holders[tag].drop()
                if tag in self._in_place and (kept := self.memory.held(tag)):
                    logger.warning("%d bytes of %s are still held by code that kept a tensor of it", kept, tag)
        self.memory.memory.trim()
        logger.info("asleep: %s; memory was: %s; is: %s", ", ".join(self._asleep), before, self.memory.report())

    def wake_up(self, tags: Collection[MemoryTag]) -> None:
        """Take the memory of those of ``tags`` that sleep, in the order of the holders.

        Raises CapacityError, and whatever reading files does; what was not taken sleeps on.
        """
        for tag in [tag for tag in self._holders if tag in tags and tag in self._asleep]:
            if self._is_suspendable(tag):
                try:
                    self.memory.resume(tag)
                except PlatformError as error:
                    raise _still_taken(tag, error) from error
                self._in_place[tag].clear()
                del self._asleep[tag]
            else:
                with self.filling(tag):
                    self._holders[tag].restore()
        logger.info("awake; memory: %s", self.memory.report())

    @contextmanager
    def filling(self, tag: MemoryTag) -> Iterator[None]:
        """Allocate under ``tag`` inside; it is awake after it, and asleep if that fails."""
        self._asleep[tag] = None
        try:
            with self.memory.pool(tag):
                yield
        except BaseException as error:  # an interrupt, too, leaves it half full
            self._holders[tag].drop()
            if isinstance(error, Exception) and is_want_of_memory(error):
                raise _still_taken(tag, error) from error
            raise
        del self._asleep[tag]

    def drop_all(self) -> None:
        """Give everything back for good."""
        for tag, holder in self._holders.items():
            if tag not in self._asleep:
                holder.drop()

    def _is_suspendable(self, tag: MemoryTag) -> bool:
        return tag in self._in_place and tag in self.memory.memory.suspendable


def is_want_of_memory(error: Exception) -> bool:
    """Whether an allocator failed. Torch's for main memory raises a plain RuntimeError, known by its words alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in said or "not enough memory" in said)


def _still_taken(tag: MemoryTag, error: Exception) -> CapacityError:
    return CapacityError(
        f"the memory of {tag} cannot be taken again: {error}; free memory on the device, then wake up again"
    )
