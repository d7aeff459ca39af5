"""Compile the Triton kernels of a step before it runs, several at a time.

A step is run once. Each kernel that is not in Triton's cache is compiled by a child process, which puts it there, and
the step goes on without it. Children are forked, so that they know the kernel; Triton's compiler holds Python's lock,
so that threads would take turns. Written from the sources of Triton 3.6 and 3.7.

Where a launch was left out, nothing of that run is of any use. Other kernels do run, so tensors are zeros wherever one
was left out: an index among them is in bounds.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode
from triton.runtime.cache import FileCacheManager, get_cache_manager

from hardpoint.kernels.compiler_hash import wait_for_hash

_MOST_SECONDS = 300.0
"""How long children are waited for; then the kernels are compiled here, when they are first launched."""
_ALLOCATIONS = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
)


def compile_ahead(run: Callable[[], None], device: torch.device) -> int:
    """Run ``run`` without launches of the Triton kernels that must be compiled, and compile these.

    Returns how many that were. Kernels that this process or Triton's cache has are launched as ever, so that of 0 the
    run was like any other. A kernel that cannot be compiled, or does not fit the device, is left to its first launch,
    which says so. Launches of other threads are left alone.
    """
    wait_for_hash()
    num_cores = len(os.sched_getaffinity(0))
    with (
        ThreadPoolExecutor(num_cores, initializer=partial(torch.get_device_module(device).set_device, device)) as pool,
        _Noting(pool, num_cores) as noting,
        _ZeroedAllocations(),
    ):
        run()
    found: int = noting.num_compiled
    return found


class _Noting(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Triton's mode of compiling elsewhere, in which launches do not wait but are left out.

    On leaving it, each kernel's place is taken by what was compiled. A kernel in the cache is read from there at once.
    """

    def __init__(self, pool: ThreadPoolExecutor, most_children: int) -> None:
        super().__init__(pool, ignore_errors=True)
        self.num_compiled: int = 0
        self._noted: dict[str, _Noted] = {}
        self._children, self._most_children = list[int](), most_children

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Take a kernel that is to be compiled; Triton keeps what this returns as the kernel."""
        found = self._noted.get(key)
        if found is None:
            if _is_cached(key):
                kernel = compile_fn()
                finalize_fn(kernel)
                return kernel
            found = self._noted[key] = _Noted(compile_fn, finalize_fn)
            self.num_compiled += 1
            if len(self._children) >= self._most_children:
                os.waitpid(self._children.pop(0), 0)
            self._children.append(_fork(compile_fn))
        finalize_fn(found)
        return found

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _wait(self._children)
        list(self.executor.map(_Noted.settle, self._noted.values()))


class _Noted:
    """Stands for a kernel that is being compiled: launching it does nothing until it is settled."""

    is_stand_in = True

    def __init__(self, compile_fn: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._compile, self._put, self._is_settled = compile_fn, put, False

    def settle(self) -> None:
        """Put the kernel where Triton looks, with the function that launches it, for which Triton starts a C compiler.

        One that cannot be compiled is compiled again when it is launched, and raises there.
        """
        self._is_settled = True
        try:
            kernel = self._compile()
            self._put(kernel)
            kernel.run  # noqa: B018  # the property loads it
        except Exception:  # nobody waits for this one
            return

    def __getattr__(self, name: str) -> Any:
        if self._is_settled:
            return getattr(self._compile(), name)
        if name in ("function", "packed_metadata"):
            return None
        if name in ("run", "launch_metadata"):
            return _leave_out
        raise AttributeError(name)


def _leave_out(*args: Any) -> None:
    """A launch that is left out."""


def _is_cached(key: str) -> bool:
    """Whether a kernel, by what Triton makes its cache's key of, is in the cache already."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    folder = manager.cache_dir if isinstance(manager, FileCacheManager) else None
    return folder is not None and os.path.isdir(folder) and bool(os.listdir(folder))


def _fork(compile_fn: Callable[[], Any]) -> int:
    """Compile a kernel in a child process, and return that one's number. The child never touches the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        compile_fn()
    finally:
        os._exit(0)


def _wait(children: Sequence[int]) -> None:
    """Wait for child processes to end, and end those that take too long."""
    deadline, left = time.monotonic() + _MOST_SECONDS, set(children)
    while left:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        if time.monotonic() > deadline:
            for child in left:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return
        time.sleep(0.005)


class _ZeroedAllocations(TorchFunctionMode):
    """While it is on, memory that torch hands out uninitialised is full of zeros."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _ALLOCATIONS else result
