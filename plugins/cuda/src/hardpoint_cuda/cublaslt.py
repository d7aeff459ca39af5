"""cuBLASLt's matrix products with a stated algorithm, where cuBLAS would take the one that a rule of thumb names.

NVIDIA's documentation of cuBLAS, chapter "Using the cuBLASLt API"; the numbers of enumerations are those of
cublasLt.h and library_types.h. The library is the one that torch brings along and has loaded.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from weakref import finalize

import torch

from hardpoint_plugin_api import PlatformError

_COMPUTE_32F = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _TRANSPOSED = 3, 1
_MAX_WORKSPACE_BYTES = 1
_MOST_CANDIDATES = 64

WORKSPACE_BYTES = 32 << 20
"""The workspace that NVIDIA recommends for Hopper, and torch takes."""

Algorithm = bytes
"""A ``cublasLtMatmulAlgo_t``, opaque: valid for the library's version and the kind of device that it comes from."""

Prepared = ctypes.Array[c_uint64]
"""An algorithm as ``Product.run`` takes it."""


class _Heuristic(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    )


@cache
def library() -> ctypes.CDLL:
    """The library of torch's build. Raises PlatformError where there is none."""
    name = f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise PlatformError(f"{name} cannot be loaded: {error}; reinstall torch with CUDA") from error


def version() -> int:
    """The library's version, such as 130100."""
    number = library().cublasLtGetVersion
    number.restype = c_size_t
    return int(number())


class Product:
    """``x [M, K] @ weight [N, K].t()`` for one M, N, K and dtype, each tensor without gaps between rows.

    Numbers are summed in float32.
    """

    def __init__(self, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        lt, number = library(), _TYPES[dtype]
        self._handle, self._shape = _handle(device), (m, n)
        self._description = c_void_p()
        _check(lt.cublasLtMatmulDescCreate(byref(self._description), _COMPUTE_32F, 0))
        transposed = c_int(_TRANSPOSED)
        _check(lt.cublasLtMatmulDescSetAttribute(self._description, _TRANSPOSE_A, byref(transposed), c_size_t(4)))
        # By columns, as the library counts: y' [N, M] is weight' [K, N] transposed, times x' [K, M].
        self._weight, self._x, self._y = (_layout(number, *size) for size in ((k, n), (k, m), (n, m)))
        finalize(self, _destroy, self._description, (self._weight, self._x, self._y)).atexit = False
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._multiply = lt.cublasLtMatmul

    def candidates(self, most: int = _MOST_CANDIDATES) -> list[Algorithm]:
        """Algorithms that the library suggests, its own favourite first."""
        lt, preference, found = library(), c_void_p(), c_int()
        _check(lt.cublasLtMatmulPreferenceCreate(byref(preference)))
        limit, results = c_uint64(WORKSPACE_BYTES), (_Heuristic * most)()
        _check(lt.cublasLtMatmulPreferenceSetAttribute(preference, _MAX_WORKSPACE_BYTES, byref(limit), c_size_t(8)))
        arguments = self._description, self._weight, self._x, self._y, self._y, preference
        _check(lt.cublasLtMatmulAlgoGetHeuristic(self._handle, *arguments, c_int(most), byref(results), byref(found)))
        _check(lt.cublasLtMatmulPreferenceDestroy(preference))
        return [bytes(result.algorithm) for result in results[: found.value] if result.status == 0]

    def admits(self, algorithm: Algorithm) -> bool:
        """Whether ``algorithm`` can make this product."""
        result = _Heuristic()
        arguments = self._description, self._weight, self._x, self._y, self._y
        status = library().cublasLtMatmulAlgoCheck(self._handle, *arguments, prepared(algorithm), byref(result))
        return bool(status == 0 and result.status == 0 and result.workspace <= WORKSPACE_BYTES)

    def run(self, x: torch.Tensor, weight: torch.Tensor, algorithm: Prepared, workspace: torch.Tensor) -> torch.Tensor:
        """The product [M, N], submitted to the current stream.

        ``workspace``: WORKSPACE_BYTES that nothing else on the device uses meanwhile.
        """
        y = x.new_empty(self._shape)
        status = self._multiply(
            self._handle,
            self._description,
            byref(self._one),
            c_void_p(weight.data_ptr()),
            self._weight,
            c_void_p(x.data_ptr()),
            self._x,
            byref(self._zero),
            c_void_p(y.data_ptr()),
            self._y,
            c_void_p(y.data_ptr()),
            self._y,
            algorithm,
            c_void_p(workspace.data_ptr()),
            c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        if status:
            _check(status)
        return y


def prepared(algorithm: Algorithm) -> Prepared:
    """A copy of the algorithm's bytes."""
    return (c_uint64 * 8).from_buffer_copy(algorithm)


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(byref(handle)))
    return handle


def _layout(number: int, rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    create = library().cublasLtMatrixLayoutCreate
    _check(create(byref(layout), c_int(number), c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows)))
    return layout


def _destroy(description: c_void_p, layouts: Sequence[c_void_p]) -> None:
    """Free what the library allocated for a product: servers meet ever new numbers of rows."""
    lt = library()
    lt.cublasLtMatmulDescDestroy(description)
    for layout in layouts:
        lt.cublasLtMatrixLayoutDestroy(layout)


def _check(status: int) -> None:
    """Raise PlatformError for the library's refusal."""
    if status:
        describe = library().cublasLtGetStatusString
        describe.restype = ctypes.c_char_p
        raise PlatformError(f"cuBLASLt fails with status {status}: {describe(status).decode()}")
