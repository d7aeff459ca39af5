"""A step as FlashInfer's wrappers are told of it: which pages each request reads, planned without waiting.

FlashInfer cuts a step into work for each processor on the host, writes that into pinned memory, and copies it to the
device with the stream. Here two sets of pinned memory take turns, each with an event behind its copies, so that a step
is planned while the one before it still runs.

Pages that no query of the step reads, for they lie before its window, are left out: what they hold now is others'. The
positions that are left keep their distances, which are all that a causal mask and a window look at.

Axes: N requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hardpoint.dtypes import dtype_of
from hardpoint.kernels.page_indices import page_indices
from hardpoint_cuda.flashinfer_library import Kernel, module
from hardpoint_plugin_api import AttentionBatch, AttentionSpec, CapacityError, Span

Ints = npt.NDArray[np.int32]

_DECODE_ROWS = 16
"""Rows of the smallest tile of queries and heads (``FA2DetermineCtaTileQ``): a request's group of heads fits in it."""
_PREFILL_ROWS = 128
"""Rows of the largest."""
_INDEX_BYTES = 2**20
"""Bytes of a decode plan on the device: about 20 for each tile, so enough for tens of thousands of rows."""


@dataclass(frozen=True)
class Paging:
    """The pages that a step reads, request by request: int32 arrays on the host.

    ``starts`` [N + 1]: where a request's pages begin in the list of all; ``first`` [N]: its first block that is read;
    ``lengths`` [N]: tokens from there on; ``last`` [N]: how many of them lie in its last page.
    """

    starts: Ints
    first: Ints
    lengths: Ints
    last: Ints

    @classmethod
    def of(cls, query_start: Sequence[int], seq_lens: Sequence[int], span: Span, block: int) -> Paging:
        """The paging of a step whose requests have queries at ``query_start`` [N + 1] and ``seq_lens`` [N] tokens."""
        totals = np.array(seq_lens, np.int32)
        first = np.zeros_like(totals)
        if span.window is not None:
            oldest = totals - np.diff(np.array(query_start, np.int32)) - (span.window - 1)
            first = np.maximum(oldest, 0) // block
        lengths = totals - first * block
        counts = -(-lengths // block)
        starts = np.zeros(len(totals) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        return cls(starts, first, lengths, lengths - (counts - 1) * block)

    @property
    def total(self) -> int:
        """Pages in all."""
        return int(self.starts[-1])

    @property
    def most(self) -> int:
        """Pages of the request that reads the most."""
        return int(np.diff(self.starts).max())


def decode_tiles(requests: int, group: int) -> int:
    """The most tiles that FlashInfer plans a captured decode of ``requests`` for, where it cuts no contexts."""
    return -(-requests * group // _DECODE_ROWS) + requests - 1


def partial_bytes(spec: AttentionSpec, tiles: int, rows: int) -> int:
    """Workspace for results of parts of contexts: float32 for each row of a tile, its sum, and room to align them."""
    return spec.num_heads * tiles * rows * 4 * (spec.head_size + 1) + 32


class PinnedTurn:
    """One set of pinned memory. It is filled again only when the device has read what it held."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event()
        self._memory = _pinned(0)
        self._device = device
        self._used = self._filled = False

    def fill(self, *arrays: Ints) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Write ``arrays`` one behind another. Returns each on the host, and all of them."""
        if self._filled:  # and never closed: the plan failed, behind copies that may still wait
            torch.cuda.synchronize(self._device)
        elif self._used and not self._event.query():
            self._event.synchronize()
        self._filled = True
        size = sum(array.size for array in arrays)
        if size > self._memory.numel():
            self._memory = _pinned(2 * size)
        values, parts, end = self._memory.numpy(), [], 0
        for array in arrays:
            values[end : end + array.size] = array
            parts.append(self._memory[end : end + array.size])
            end += array.size
        return parts, self._memory[:end]

    def close(self) -> None:
        """Everything that copies from it has been submitted."""
        self._event.record()
        self._used, self._filled = True, False


@dataclass
class _Graph:
    """The fixed buffers of one captured step, and a wrapper over them for each turn: they share what is on the device.

    ``ready`` are the turns whose wrapper has planned before.
    """

    arrays: torch.Tensor
    starts: torch.Tensor
    last: torch.Tensor
    first: torch.Tensor
    indices: torch.Tensor
    wrappers: list[Any]
    ready: set[int]


class StepPlanner:
    """Plans the steps of a group of layers. ``workspace`` is shared with all others: uint8, not kept alive by this."""

    def __init__(self, spec: AttentionSpec, prefill: Kernel, workspace: torch.Tensor) -> None:
        self.address, self._nbytes = workspace.data_ptr(), workspace.numel()
        self._spec, self._device = spec, workspace.device
        self._workspace = alias(workspace)
        self._turns = [PinnedTurn(self._device) for _ in range(2)]
        self._turn = 0
        self._decode_module, self._prefill_module = module("flashinfer.decode"), module("flashinfer.prefill")
        self._group = spec.num_heads // spec.num_kv_heads
        dtype = dtype_of(spec.dtype)
        self._alike: dict[str, Any] = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": spec.block_size,
            "pos_encoding_mode": "NONE",
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "sm_scale": spec.scale,
            "non_blocking": True,
        }
        self._out = {"o_data_type": dtype}
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._split_tiles = 2 * processors // spec.num_kv_heads
        index = torch.empty(_INDEX_BYTES, dtype=torch.uint8, device=self._device)
        self._decode_index = index
        self._decodes = [self._decode_wrapper(use_cuda_graph=False) for _ in self._turns]
        self._decoded: set[int] = set()
        self._prefills = [self._prefill_wrapper(prefill.backend) for _ in self._turns]
        self._no_prefill_splits = {
            "disable_split_kv": partial_bytes(spec, self._split_tiles, _PREFILL_ROWS) > self._nbytes
        }
        self._no_decode_splits = {
            "disable_split_kv": partial_bytes(spec, self._split_tiles, _DECODE_ROWS) > self._nbytes
        }
        self._graphs: dict[object, _Graph] = {}
        self._indices = torch.empty(0, dtype=torch.int32, device=self._device)

    def decode_graph(self, batch: AttentionBatch) -> tuple[Any, tuple[int, ...]]:
        """Plan a step that is captured or replayed; the wrapper to run, and what of it is fixed when it is captured."""
        key = (batch.graph_key, batch.num_requests)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._new_graph(batch)
        turn = self._next_turn()
        paging = self._paging(batch)
        (starts, last, _), filled = turn.fill(paging.starts, paging.last, paging.first)
        graph.arrays.copy_(filled, non_blocking=True)
        page_indices(batch.block_table, graph.starts, graph.first, paging.most, graph.indices)
        wrapper = graph.wrappers[self._turn]
        named = {"indptr": starts, "indices": graph.indices[: paging.total], "last_page_len": last}
        if self._turn in graph.ready:
            self._plan_again(wrapper, starts, **named)
        else:
            self._plan_first(wrapper, **named)
            graph.ready.add(self._turn)
        turn.close()
        return wrapper, tuple(map(int, wrapper._plan_info))

    def step(self, batch: AttentionBatch) -> list[tuple[Any, slice]]:
        """Plan a step that runs eagerly; returns wrappers and the rows that each of them serves."""
        spec, split, starts = self._spec, batch.num_decodes, batch.query_start_host
        turn, paging = self._next_turn(), self._paging(batch)
        prefill_starts = paging.starts[split:] - paging.starts[split]
        queries = np.array(starts[split:], np.int32) - starts[split]
        host, filled = turn.fill(
            paging.starts, paging.first, paging.last, paging.lengths, prefill_starts.astype(np.int32), queries
        )
        arrays = filled.to(self._device, non_blocking=True)
        n = batch.num_requests
        indices = torch.empty(paging.total, dtype=torch.int32, device=self._device)
        page_indices(batch.block_table, arrays[: n + 1], arrays[n + 1 : 2 * n + 1], paging.most, indices)
        all_starts, _, last, lengths, prefill_indptr, query_indptr = host
        cut, parts = int(paging.starts[split]), []
        if split:
            decode = self._decodes[self._turn]
            device_starts, _, device_last = arrays[: 3 * n + 1].split([n + 1, n, n])
            named = {"indices": indices[:cut], "last_page_len": last[:split], **self._no_decode_splits}
            if self._turn in self._decoded:
                self._plan_again(decode, all_starts[: split + 1], indptr=device_starts[: split + 1], **named)
                # It takes what it is given for the device's as well, where a graph's wrapper keeps its own.
                decode._paged_kv_last_page_len_buf = device_last[:split]
            else:
                self._plan_first(decode, indptr=all_starts[: split + 1], **named)
                self._decoded.add(self._turn)
            parts.append((decode, slice(0, split)))
        if split < n:
            prefill = self._prefills[self._turn]
            prefill.plan(
                qo_indptr=query_indptr,
                paged_kv_indptr=prefill_indptr,
                paged_kv_indices=indices[cut:],
                paged_kv_last_page_len=last[split:],
                seq_lens=lengths[split:],
                max_token_per_sequence=int(np.diff(queries).max()),
                head_dim_qk=spec.head_size,
                causal=True,
                **self._alike,
                **self._out,
                **self._no_prefill_splits,
            )
            parts.append((prefill, slice(starts[split], starts[-1])))
        turn.close()
        return parts

    def _plan_first(self, decode: Any, **named: Any) -> None:
        """The first plan of a decode wrapper says all about its kernel."""
        decode.plan(**named, head_dim=self._spec.head_size, **self._alike, **self._out)

    def _plan_again(self, decode: Any, starts: torch.Tensor, **named: Any) -> None:
        """FlashInfer's shorter way: no copies, and no loop over requests in Python. ``starts`` are on the host."""
        self._decode_module.fast_decode_plan(
            decode, **named, head_dim=self._spec.head_size, **self._alike, global_override_indptr_cpu=starts
        )

    def _paging(self, batch: AttentionBatch) -> Paging:
        return Paging.of(batch.query_start_host, batch.seq_lens_host, self._spec.span, self._spec.block_size)

    def _next_turn(self) -> PinnedTurn:
        self._turn = 1 - self._turn
        return self._turns[self._turn]

    def _new_graph(self, batch: AttentionBatch) -> _Graph:
        """Buffers for as many pages as the table has room for.

        Raises CapacityError where the workspace does not hold what as many requests need.
        """
        n = batch.num_requests
        need = partial_bytes(self._spec, max(self._split_tiles, decode_tiles(n, self._group)), _DECODE_ROWS)
        if need > self._nbytes:
            raise CapacityError(
                f"FlashInfer needs {need:,} bytes of workspace to decode {n} requests, and has {self._nbytes:,}: set "
                f"--cuda.flashinfer_workspace_mib to {-(-need // 2**20)} or more, or --max-num-seqs to less"
            )
        pages = batch.block_table.numel()
        if self._indices.numel() < pages:  # those of a smaller step are the first of those of a larger one
            self._indices = torch.empty(pages, dtype=torch.int32, device=self._device)
        arrays = torch.zeros(3 * n + 1, dtype=torch.int32, device=self._device)
        starts, last, first = arrays.split([n + 1, n, n])
        buffers = {
            "paged_kv_indptr_buffer": starts,
            "paged_kv_indices_buffer": self._indices,
            "paged_kv_last_page_len_buffer": last,
        }
        wrappers = [self._decode_wrapper(use_cuda_graph=True, **buffers) for _ in self._turns]
        return _Graph(arrays, starts, last, first, self._indices, wrappers, set())

    def _decode_wrapper(self, **options: Any) -> Any:
        wrapper = self._decode_module.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace, kv_layout="NHD", use_tensor_cores=True, backend="fa2", **options
        )
        wrapper.reset_workspace_buffer(float_workspace_buffer=self._workspace, int_workspace_buffer=self._decode_index)
        return wrapper

    def _prefill_wrapper(self, backend: str) -> Any:
        return self._prefill_module.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=self._workspace, kv_layout="NHD", backend=backend
        )


def _pinned(size: int) -> torch.Tensor:
    """Page-locked memory for ``size`` int32 elements."""
    return torch.empty(size, dtype=torch.int32, pin_memory=True)


class _Address:
    """Device memory of somebody else's, by the protocol ``__cuda_array_interface__`` (version 3)."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def alias(memory: torch.Tensor) -> torch.Tensor:
    """The same memory, uint8, without holding on to it: resources are given back when the engine sleeps."""
    return torch.as_tensor(_Address(memory), device=memory.device)
