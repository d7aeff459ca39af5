"""A graph engine for tests in this process: torch's operators as they were called, called again on the same tensors.

A replay writes where the recorded call wrote, so recorded code is wrong as soon as it depends on addresses, host values
or weights of another step. And an attention backend whose decodes can be recorded.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hardpoint.reference.attention import ReferenceAttention
from hardpoint_plugin_api import (
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    CaptureGrade,
    GraphEngine,
    PlatformError,
)

CALLS_OF_THE_HOST = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"})
"""Operators whose results decide about others."""

_RECORDING = threading.local()
"""This thread's ``recorder``, while there is one."""


class RecordedCalls(GraphEngine):
    """See the top of this file. ``keys`` are those of all that was prepared, in order."""

    sees_all_kernels = False

    def __init__(self, batch_sizes: tuple[int, ...] | None = None, max_graphs: int | None = 8) -> None:
        self.batch_sizes, self.max_graphs = batch_sizes, max_graphs
        self.keys: list[Hashable] = []
        self._alive: weakref.WeakSet[RecordedCall] = weakref.WeakSet()

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> RecordedCall:
        """Call ``fn`` once, and put the inputs back. Results hold nothing of worth before the first run."""
        if self.max_graphs is not None and len(self._alive) >= self.max_graphs:
            raise PlatformError(f"{self.max_graphs} steps are recorded; drop one before {key!r}")
        held = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        recorder = Recorder(key)
        try:
            _RECORDING.recorder = recorder
            with recorder:
                result = fn(**inputs)
        finally:
            del _RECORDING.recorder
            for name, x in held.items():
                tensor = inputs[name]
                assert isinstance(tensor, torch.Tensor)
                tensor.copy_(x)
        prepared = RecordedCall(fn, dict(inputs), recorder.calls, result)
        self._alive.add(prepared)
        self.keys.append(key)
        return prepared


class RecordedCall:
    """A CapturedGraph."""

    def __init__(self, fn: Callable[..., Any], inputs: dict[str, object], calls: list[Any], result: object) -> None:
        self._fn, self._inputs, self._calls, self._result = fn, inputs, calls, result
        self._made = [x for _, _, _, out in calls for x in tree_iter(out) if isinstance(x, torch.Tensor)]
        own = {x.untyped_storage()._cdata for x in tree_iter(inputs) if isinstance(x, torch.Tensor)}
        self._results = [
            x for x in tree_iter(result) if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in own
        ]
        self._spoil()

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        """Call everything again. With other host parameters, the function instead."""
        if update:
            return self._fn(**(self._inputs | dict(update)))
        self._spoil()
        for call, arguments, options, outputs in self._calls:
            again = call(*arguments, **options)
            for old, new in zip(tree_iter(outputs), tree_iter(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self._result

    def _spoil(self) -> None:
        for x in self._results:
            x.fill_(float("nan") if x.dtype.is_floating_point else torch.iinfo(x.dtype).min)


def recordable(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A collective that a recorder sees, though it is no operator of torch's."""

    @functools.wraps(method)
    def call(*arguments: Any) -> torch.Tensor:
        recorder = getattr(_RECORDING, "recorder", None)
        if recorder is None:
            return method(*arguments)
        del _RECORDING.recorder  # for what it calls in turn
        try:
            result = method(*arguments)
        finally:
            _RECORDING.recorder = recorder
        recorder.calls.append((method, arguments, {}, result))
        return result

    return call


class Recorder(TorchDispatchMode):
    """Notes torch's operators as they are called, with their results; raises PlatformError for one of ``refused``."""

    def __init__(self, key: Hashable, refused: frozenset[str] = CALLS_OF_THE_HOST) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, which says nothing of types
        self._key, self._refused = key, refused
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in self._refused:
            raise PlatformError(f"step {self._key!r} cannot be recorded: {name} gives the host a value")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordableAttention(ReferenceAttention):
    """The reference, whose decodes read all that they need on the device. Stands in for it under its name."""

    capture: ClassVar[CaptureGrade] = CaptureGrade.SINGLE_TOKEN

    def plan(self, batch: AttentionBatch) -> AttentionMetadata:
        if batch.graph_key is None:
            return AttentionMetadata(batch)
        pages = -(-max(batch.seq_lens_host) // self.spec.block_size)
        return AttentionMetadata(batch, 1 << (pages - 1).bit_length())

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        batch, width = metadata.batch, metadata.token
        if not isinstance(width, int):
            super().forward(call)
            return
        pages = batch.block_table[:, :width].long()
        keys, values = (cache[name][pages].flatten(1, 2).float() for name in ("k", "v"))  # [N, S, K, D]
        key_at, query_at = torch.arange(keys.shape[1]), batch.seq_lens.long()[:, None] - 1
        hidden = self.spec.span.hides(query_at, key_at)  # [N, S]
        keys, values = (x.masked_fill(hidden[..., None, None], 0.0) for x in (keys, values))
        queries = q.float().unflatten(1, (self.spec.num_kv_heads, -1))  # [N, K, G, D]
        scores = torch.einsum("nkgd,nskd->nkgs", queries, keys) * self.spec.scale
        weights = torch.softmax(scores.masked_fill(hidden[:, None, None], float("-inf")), -1)
        out.copy_(torch.einsum("nkgs,nskd->nkgd", weights, values).flatten(1, 2))


class RecordableAnyAttention(RecordableAttention):
    """The same for steps of any shape: every token looks for its request, and over all of that one's positions."""

    capture: ClassVar[CaptureGrade] = CaptureGrade.ANY

    def forward(self, call: AttentionCall) -> None:
        q, cache, metadata, out = call.q, call.cache, call.metadata, call.out
        batch = metadata.batch
        if not batch.any_shape:
            super().forward(call)
            return
        token = torch.arange(q.shape[0], dtype=torch.int32)
        request = torch.bucketize(token, batch.query_start[1:], right=True).clamp(max=batch.num_requests - 1)
        keys, values = (cache[name][batch.block_table.long()].flatten(1, 2)[request].float() for name in ("k", "v"))
        ends, lengths = batch.query_start[1:][request].long(), batch.seq_lens[request].long()
        query_at = (lengths - ends + token)[:, None]
        hidden = self.spec.span.hides(query_at, torch.arange(keys.shape[1]))  # [T, S]
        keys, values = (x.masked_fill(hidden[..., None, None], 0.0) for x in (keys, values))
        queries = q.float().unflatten(1, (self.spec.num_kv_heads, -1))
        scores = torch.einsum("tkgd,tskd->tkgs", queries, keys) * self.spec.scale
        weights = torch.softmax(scores.masked_fill(hidden[:, None, None], float("-inf")), -1)
        out.copy_(torch.einsum("tkgs,tskd->tkgd", weights, values).flatten(1, 2))
