"""Several backends behind one: a plan whose winners differ by phase or size, over one cache layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch

from hardpoint.selection import StepRange
from hardpoint.selection.switches import Switch, SwitchError
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionBatch,
    AttentionCall,
    AttentionMetadata,
    AttentionSpec,
    BuildContext,
    CacheSpec,
    CaptureGrade,
    LatentBackend,
    LatentCall,
    LatentSpec,
    LatentStoreCall,
    Phase,
    StepLimits,
    StepPlanner,
    StoreCall,
)

_Backend = TypeVar("_Backend", bound=StepPlanner)


@dataclass
class PhasedMetadata(AttentionMetadata):
    """The parts of a step: whose they are, which rows, and their own metadata."""

    parts: Sequence[tuple[StepPlanner, slice, AttentionMetadata]] = ()


class _Phased(StepPlanner, Generic[_Backend]):
    """Gives decodes and prefills of a step to the backend that the plan names for each; requests come decodes first."""

    def _divide(self, entries: Sequence[tuple[StepRange, _Backend]]) -> None:
        self._entries, self._first = entries, entries[0][1]
        decodes = [backend.capture for where, backend in entries if where.phase in (None, "decode")]
        # Captures beyond single tokens would depend on the prefills' backends as well.
        self.capture = min(CaptureGrade.SINGLE_TOKEN, *decodes)  # type: ignore[misc]  # known only here
        self.exact_lengths = any(backend.exact_lengths for _, backend in entries)  # type: ignore[misc]  # as well

    def switch(self, entries: Sequence[tuple[StepRange, _Backend]], gives_bounds: bool) -> Switch:
        """A function that has other backends take the place of these, over the cache as it is.

        ``gives_bounds``: steps may have bounds of lengths, since the engine verifies drafts. Raises SwitchError where
        the others need another cache, smaller steps, or exact lengths where these did not.
        """
        limits = self.step_limits()
        for _, backend in entries:
            if _cache_of(backend) != _cache_of(self._first):
                raise SwitchError(f"{type(backend).__name__} needs a cache of another layout")
            if limits.intersect(backend.step_limits()) != limits:
                raise SwitchError(f"{type(backend).__name__} needs smaller steps")
            if gives_bounds and backend.exact_lengths and not self.exact_lengths:
                raise SwitchError(f"{type(backend).__name__} plans by exact lengths")
            self._tell(backend)
        return partial(self._divide, entries)

    def _tell(self, backend: _Backend) -> None:
        """Give a backend what these were given when weights were loaded."""

    def grade(self, phase: Phase, tokens: int) -> CaptureGrade:
        return self._backend(phase, tokens).grade(phase, tokens)

    @property
    def backends(self) -> list[_Backend]:
        """The backends in use, each once."""
        return list(dict.fromkeys(backend for _, backend in self._entries))

    def step_limits(self) -> StepLimits:
        limits = StepLimits()
        for backend in self.backends:
            limits = limits.intersect(backend.step_limits())
        return limits

    def plan(self, batch: AttentionBatch) -> PhasedMetadata:
        split = batch.num_decodes
        pieces: list[tuple[Phase, int, int]] = [("decode", 0, split), ("prefill", split, batch.num_requests)]
        parts = []
        for phase, first, last in pieces:
            if first == last:
                continue
            rows = slice(batch.query_start_host[first], batch.query_start_host[last])
            backend = self._backend(phase, rows.stop - rows.start)
            parts.append((backend, rows, backend.plan(sub_batch(batch, first, last))))
        return PhasedMetadata(batch, tuple(part[2].token for part in parts), parts)

    def _backend(self, phase: Phase, tokens: int) -> _Backend:
        for where, backend in self._entries:
            if where.phase in (None, phase) and (where.max is None or tokens <= where.max):
                return backend
        raise AssertionError(f"the plan covers every step, yet not {tokens} tokens of {phase}")

    def _parts(self, metadata: AttentionMetadata) -> Iterator[tuple[_Backend, slice, AttentionMetadata]]:
        """This layer's backend of each part, the part's rows, and its metadata.

        A group's plan is made on its first layer, by backends of the same classes.
        """
        assert isinstance(metadata, PhasedMetadata)
        for planned, rows, part in metadata.parts:
            yield next(backend for backend in self.backends if type(backend) is type(planned)), rows, part


class PhasedBackend(_Phased[AttentionBackend], AttentionBackend):
    """Several backends of causal attention, or one that may be switched."""

    _head_constants: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
    _cache_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(
        self, ctx: BuildContext, spec: AttentionSpec, entries: Sequence[tuple[StepRange, AttentionBackend]]
    ) -> None:
        super().__init__(ctx, spec)
        self._divide(entries)
        self.layout = self._first.layout  # type: ignore[misc]  # one layout per plan, known only here

    def set_head_constants(self, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
        self._head_constants = sinks, alibi_slopes
        for backend in self.backends:
            backend.set_head_constants(sinks, alibi_slopes)

    def set_cache_scales(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._cache_scales = k, v
        for backend in self.backends:
            backend.set_cache_scales(k, v)

    def _tell(self, backend: AttentionBackend) -> None:
        if self._head_constants is not None:
            backend.set_head_constants(*self._head_constants)
        if self._cache_scales is not None:
            backend.set_cache_scales(*self._cache_scales)

    def store(self, call: StoreCall) -> None:
        self._first.store(call)

    def forward(self, call: AttentionCall) -> None:
        for backend, rows, part in self._parts(call.metadata):
            q, k, v, out = call.q[rows], call.k[rows], call.v[rows], call.out[rows]
            backend.forward(replace(call, q=q, k=k, v=v, metadata=part, out=out))


class PhasedLatentBackend(_Phased[LatentBackend], LatentBackend):
    """Several backends of latent attention."""

    def __init__(self, ctx: BuildContext, spec: LatentSpec, entries: Sequence[tuple[StepRange, LatentBackend]]) -> None:
        super().__init__(ctx, spec)
        self._divide(entries)
        self.layout = self._first.layout  # type: ignore[misc]  # one layout per plan, known only here

    def store(self, call: LatentStoreCall) -> None:
        self._first.store(call)

    def forward(self, call: LatentCall) -> None:
        for backend, rows, part in self._parts(call.metadata):
            backend.forward(
                replace(
                    call,
                    q_latent=call.q_latent[rows],
                    q_rope=call.q_rope[rows],
                    latent=call.latent[rows],
                    rope_key=call.rope_key[rows],
                    metadata=part,
                    out=call.out[rows],
                    indices=None if call.indices is None else call.indices[rows],
                )
            )


def _cache_of(backend: StepPlanner) -> tuple[str, CacheSpec]:
    """The layout of a backend's cache, by name, and what the cache holds."""
    assert isinstance(backend, AttentionBackend | LatentBackend)
    return backend.layout.name, backend.cache_spec


def sub_batch(batch: AttentionBatch, first: int, last: int) -> AttentionBatch:
    """Requests ``first`` to ``last`` (exclusive) of ``batch`` as a batch of their own.

    From the first request on, its arrays are parts of the batch's, so at addresses that stay where those do.
    """
    starts = batch.query_start_host[first : last + 1]
    query_start = batch.query_start[first : last + 1]
    return replace(
        batch,
        query_start=query_start - starts[0] if starts[0] else query_start,
        seq_lens=batch.seq_lens[first:last],
        block_table=batch.block_table[first:last],
        slot_mapping=batch.slot_mapping[starts[0] : starts[-1]],
        query_start_host=tuple(start - starts[0] for start in starts),
        seq_lens_host=batch.seq_lens_host[first:last],
        num_decodes=max(0, min(batch.num_decodes, last) - first),
    )
