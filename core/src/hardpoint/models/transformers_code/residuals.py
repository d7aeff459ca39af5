"""Hidden states between decoder layers, watched in the run on the meta device: is each read by the next layer alone?

Where it is, a layer may leave the sum with its residual to the next one's norm, and write to what it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@dataclass
class _Stream:
    """A tensor between two readers: ``maker`` returned it, and ``reader`` got it. ``shared``: other code reads it."""

    tensor: torch.Tensor
    maker: nn.Module | None = None
    reader: nn.Module | None = None
    shared: bool = False


@dataclass
class Residuals:
    """Notes of a run. ``readers``: modules that may take a residual, none within another."""

    _streams: dict[int, _Stream] = field(default_factory=dict)
    """By the storage of a tensor, which it keeps alive."""
    _inside: nn.Module | None = None
    _calls: dict[nn.Module, int] = field(default_factory=dict)

    @contextmanager
    def watched(self, readers: Iterable[nn.Module]) -> Iterator[None]:
        """Note when ``readers`` run."""
        hooks: list[Any] = []
        for reader in readers:
            hooks.append(reader.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(reader.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside is not None:
            return
        self._inside = module
        self._calls[module] = self._calls.get(module, 0) + 1
        x = args[0] if args else kwargs.get("hidden_states")
        if isinstance(x, torch.Tensor):
            stream = self._streams.setdefault(_storage(x), _Stream(x))
            stream.shared |= stream.reader is not None or stream.tensor is not x
            stream.reader = module

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self._inside is not module:
            return
        self._inside = None
        if isinstance(result, torch.Tensor):
            known = self._streams.get(_storage(result))
            self._streams[_storage(result)] = _Stream(result, maker=module, shared=known is not None)

    def read(self, args: Any) -> None:
        """Note an operator that reads ``args``."""
        for x in tree_leaves(args):
            if isinstance(x, torch.Tensor) and (stream := self._streams.get(_storage(x))) is not None:
                stream.shared |= self._inside is None or self._inside is not stream.reader

    def owners(self) -> set[nn.Module]:
        """The readers that run once, and alone read what they are given, from then on."""
        return {s.reader for s in self._streams.values() if s.reader and not s.shared and self._calls[s.reader] == 1}

    def next_of(self) -> dict[nn.Module, nn.Module]:
        """For each reader the one that got what it returned, where nothing else did."""
        found = (s for s in self._streams.values() if s.maker and s.reader and not s.shared)
        return {s.maker: s.reader for s in found if s.maker and s.reader}


def _storage(x: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    return int(x.untyped_storage()._cdata)
