"""Graphs that torch captures on a stream, as a graph engine: a step is captured once and replayed by one launch.

A plugin names the class of its devices' graphs. All graphs of an engine share one memory pool, so that what lies
between their kernels is taken once, as much as the largest needs. So no two may run at the same time, and a result is
valid until another graph of the engine runs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map_only

from hardpoint.platforms.host_parameters import rebinds
from hardpoint.platforms.operator_loading import OperatorLoading
from hardpoint_plugin_api import ConfigError, ConfigValue, GraphEngine, PlatformError

BATCH_SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)
"""Steps are padded by at most a quarter, small ones hardly at all."""
TOKEN_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Of steps with prompts. Run eagerly, one costs the host some 12 ms whatever its size; an 8B model's kernels take about
as long from 512 tokens on (docs/measurements/h200.md)."""


PIECE_SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Of other steps; beyond, an 8B model's kernels take longer than the host."""


def sizes_of(
    config: Mapping[str, ConfigValue], plugin: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, str]]:
    """The sizes that a plugin's settings ``graph_batch_sizes``, ``graph_token_sizes`` and ``graph_piece_sizes`` list.

    They are the arguments of StreamGraphs, in order: the last says which of them the user set. Raises ConfigError for
    a list that is not one of numbers.
    """
    autos = {"graph_batch_sizes": BATCH_SIZES, "graph_token_sizes": TOKEN_SIZES, "graph_piece_sizes": PIECE_SIZES}
    listed = {key: str(config.get(key, "auto")) for key in autos}
    requests, tokens, pieces = (
        auto if listed[key] == "auto" else parse_sizes(listed[key], f"{plugin}.{key}") for key, auto in autos.items()
    )
    asked = {key.removeprefix("graph_"): f"{plugin}.{key}" for key in autos if listed[key] != "auto"}
    return requests, tokens, pieces, asked


def parse_sizes(text: str, key: str) -> tuple[int, ...]:
    """Numbers from a list such as "1,2,4,8", ascending; none for "none". Raises ConfigError for anything else."""
    may_be_none = not key.endswith("graph_batch_sizes")
    if text == "none" and may_be_none:
        return ()
    try:
        sizes = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        sizes = [0]
    if not sizes or sizes[0] < 1:
        raise ConfigError(
            f"{key} must be auto{', none' if may_be_none else ''} or positive numbers with commas between them, got "
            f"{text!r}; to run without any graphs use --enforce-eager"
        )
    return tuple(sizes)


class CaptureStream:
    """The stream that steps are captured on, by torch's ``module`` for the type of ``device``.

    An engine's graph engines come and go with its weights and its sleep, and share it: torch keeps the blocks that
    warm-ups took for the stream that took them, and a library of matrix products a workspace.
    """

    def __init__(self, device: torch.device, module: Any, loading: OperatorLoading | None = None) -> None:
        """``loading`` ends before the first capture begins, during which no thread may load code."""
        self.device, self.module, self._loading = device, module, loading
        self._stream: Any = None

    def get(self) -> Any:
        """The stream, taken when it is first asked for."""
        if self._loading is not None:
            self._loading.wait()
        if self._stream is None:
            self._stream = self.module.Stream(self.device)
        return self._stream

    def replace(self) -> None:
        """Use another from now on."""
        self._stream = None


class StreamGraphs(GraphEngine):
    """A graph engine over torch's graphs of one type of device."""

    kind: ClassVar[type[Any]]
    """The class of graphs of torch's module."""
    collectives_allowed = True
    bytes_per_graph = 8 * 2**20
    """An allowance for nodes and their parameters, not measured one by one: with 56 of them, context included, about a
    gigabyte was neither weights, cache nor resources on an H200."""

    def __init__(
        self,
        stream: CaptureStream,
        batch_sizes: tuple[int, ...] = BATCH_SIZES,
        token_sizes: tuple[int, ...] = TOKEN_SIZES,
        piece_sizes: tuple[int, ...] = (),
        asked_sizes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Sizes ascend."""
        self.batch_sizes, self.token_sizes, self.piece_sizes = batch_sizes, token_sizes, piece_sizes
        self.asked_sizes = asked_sizes
        self._device, self._stream, self._module = stream.device, stream, stream.module
        self._capture: _Capture | None = None
        self._pool: Any = None
        self._alive: weakref.WeakSet[StreamGraph] = weakref.WeakSet()

    def give_up(self, pool: Any) -> None:
        """Clean up a refused capture over ``pool``, which torch omits (PyTorch issues 180395 and 190348).

        Otherwise its allocator takes it that a capture is under way for as long as the process lives, and returns no
        memory to the driver.
        """
        end, release = (f"_{self._device.type}_{name}" for name in ("endAllocateToPool", "releasePool"))
        with suppress(RuntimeError):  # of a torch that does it itself
            getattr(torch._C, end)(self._device.index, pool)
            getattr(torch._C, release)(self._device.index, pool)

    @property
    def nbytes(self) -> int:
        """Bytes that torch holds for the graphs' memory, used or not, and that the driver took for their nodes."""
        pools = {graph.pool for graph in self._alive}
        segments = self._module.memory_snapshot() if pools else ()
        held: int = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in pools)
        return held + sum(graph.driver_bytes for graph in self._alive)

    def prepare(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> StreamGraph:
        """Run ``fn(**inputs)`` once, so that kernels are compiled and libraries have what they need, then capture it.

        Numbers among ``inputs`` are part of the capture; a run with others calls ``fn`` anew. Raises PlatformError for
        a step that waits for the device; ``fn``'s own errors come through.
        """
        if all(graph.pool != self._pool for graph in self._alive):  # torch gives a pool up with its last graph
            self._pool = tuple(self._module.graph_pool_handle())
        held = {name: x.clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        try:
            self._warm_up(fn, inputs)
            for name, x in held.items():  # what ``fn`` finds must be valid when it is captured, too
                inputs[name].copy_(x)  # type: ignore[attr-defined]  # a tensor, see above
            before = self._taken_by_driver()
            pieces, result = self._captured(key, fn, inputs)
            driver = max(0, self._taken_by_driver() - before)
            prepared = StreamGraph(fn, dict(inputs), pieces, result, self._pool_of(pieces), driver)
            self._alive.add(prepared)
            return prepared
        finally:
            for name, x in held.items():
                inputs[name].copy_(x)  # type: ignore[attr-defined]  # a tensor, see above

    def interrupt(self, call: Callable[[], None]) -> None:
        """End the graph here and begin another behind ``call``, which runs where nothing is captured."""
        if self._capture is None:
            call()
        else:
            self._capture.interrupt(call)

    def opaque(self, call: Callable[..., None], *arguments: Any) -> None:
        """See GraphEngine: the graph holds no memory for ``arguments``, so that later pieces use the same."""
        if self._capture is None:
            call(*arguments)
        else:
            self._capture.opaque(call, arguments)

    def transient(self, result: torch.Tensor) -> torch.Tensor:
        """See GraphEngine: from the end of the capture on, the graph alone knows of the memory of ``result``."""
        if self._capture is not None:
            self._capture.transient.add(result.data_ptr())
        return result

    def _taken_by_driver(self) -> int:
        """Bytes in use on the device that are not torch's; other processes' count, too."""
        free, total = self._module.mem_get_info(self._device)
        taken: int = total - free - self._module.memory_reserved(self._device)
        return taken

    def _pool_of(self, pieces: list[Piece]) -> tuple[int, ...]:
        first: Any = pieces[0]
        return tuple(first.pool())

    def _warm_up(self, fn: Callable[..., Any], inputs: Mapping[str, object]) -> None:
        stream, current = self._stream.get(), self._module.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with self._module.stream(stream):
                fn(**inputs)
        finally:  # an error, too, leaves kernels under way, and the inputs are put back behind them
            current.wait_stream(stream)

    def _captured(self, key: Hashable, fn: Callable[..., Any], inputs: Mapping[str, object]) -> tuple[list[Piece], Any]:
        self._module.synchronize(self._device)
        self._capture = capture = _Capture(self, self._pool, self._module)
        failure = None
        try:
            with self._module.stream(self._stream.get()), capture:
                try:
                    result = fn(**inputs)
                except Exception as error:  # named below, whatever the end of the capture says
                    failure = error
                    raise
        except Exception as error:
            self._pool = None  # a failed capture may leave it unusable, and the stream, too
            self._stream.replace()
            cause = failure or error
            if not _is_of_device(cause):
                raise cause from None
            raise PlatformError(
                f"step {key!r} cannot be captured as a graph: it waits for the device, or does something "
                f"else that a capture does not allow: {str(cause).splitlines()[0]}"
            ) from cause
        finally:
            self._capture = None
        return capture.pieces, tree_map_only(torch.Tensor, capture.let_go, result)


Piece = Callable[[], None] | Any
"""A part of a step: a graph, which is replayed, or a call."""


class _Capture:
    """A capture on the current stream: one graph or, where it is interrupted, several, over one memory ``pool``."""

    def __init__(self, engine: StreamGraphs, pool: Any, module: Any) -> None:
        self._engine, self._pool, self._module = engine, pool, module
        self.pieces: list[Piece] = []
        self._segments: list[range] = []
        self._knows_segments = False
        """Whether ``_segments`` are all of the pool: no piece can have taken more since they were looked up."""
        self.transient: set[int] = set()

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *exc: object) -> None:
        self._end()

    def interrupt(self, call: Callable[[], None]) -> None:
        self._end()
        self.pieces.append(call)
        self._begin()

    def opaque(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._end()
        self.pieces.append(partial(call, *tree_map_only(torch.Tensor, self._without_keeping, arguments)))
        self._begin()

    def let_go(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, or where it is transient a tensor at the same place that does not keep the memory there."""
        return _at_place_of(x) if x.data_ptr() in self.transient and x.numel() else x

    def _without_keeping(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, or where its memory is the pool's a tensor at the same place that does not keep it."""
        return _at_place_of(x) if x.numel() and self._is_of_pool(x.data_ptr()) else x

    def _is_of_pool(self, address: int) -> bool:
        if not self._knows_segments and not any(address in segment for segment in self._segments):
            self._knows_segments = True
            segments = (s for s in self._module.memory_snapshot() if tuple(s["segment_pool_id"]) == self._pool)
            self._segments = [range(s["address"], s["address"] + s["total_size"]) for s in segments]
        return any(address in segment for segment in self._segments)

    def _begin(self) -> None:
        graph = self._engine.kind()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._knows_segments = False
        self.pieces.append(graph)

    def _end(self) -> None:
        graph: Any = self.pieces[-1]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* Graph is empty")  # without tokens, nothing is launched
            try:
                graph.capture_end()
            except RuntimeError:
                self._engine.give_up(self._pool)
                raise


def _at_place_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of ``x`` that does not keep that memory."""
    storage = x.untyped_storage()
    nbytes = storage.nbytes() // x.element_size() * x.element_size()
    flat = torch.as_tensor(_Bytes(storage.data_ptr(), nbytes), device=x.device).view(x.dtype)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


class _Bytes:
    """Memory of a device that somebody else holds, in the form in which torch takes it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (count,), "typestr": "|u1", "version": 3}


class StreamGraph:
    """A CapturedGraph. It keeps its function, inputs and results alive.

    ``pool`` is the id of the memory it shares with others; ``driver_bytes`` what the driver took while it was captured.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: dict[str, object],
        pieces: list[Piece],
        result: Any,
        pool: tuple[int, ...],
        driver_bytes: int,
    ) -> None:
        self._fn, self._inputs, self._result = fn, inputs, result
        self.pool, self.driver_bytes = pool, driver_bytes
        self._calls = [getattr(piece, "replay", piece) for piece in pieces]

    def run(self, update: Mapping[str, object] | None = None) -> Any:
        """Replay on the current stream; results are where they were. With other numbers ``fn`` itself runs.

        Raises PlatformError for an update of what is not a number.
        """
        if update and rebinds(self._inputs, update):
            return self._fn(**(self._inputs | dict(update)))
        for call in self._calls:
            call()
        return self._result


def _is_of_device(error: Exception) -> bool:
    """Whether the device refused, and not the function itself."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and "captur" in str(error).casefold()
    )
