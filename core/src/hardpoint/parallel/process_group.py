"""torch.distributed's process groups, made directly: none is registered in a table of the whole process."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store  # torch.distributed has them, but not for mypy

from hardpoint_plugin_api import PlatformError

__all__ = ["LOOPBACK", "FileStore", "PrefixStore", "Store", "process_group"]

LOOPBACK = "127.0.0.1"


def process_group(
    backend: str, store: Store, rank: int, world: int, timeout: float, *, on_one_host: bool
) -> dist.ProcessGroup:
    """Join the group that shares ``store``. Raises PlatformError for a backend that this build of torch lacks.

    gloo binds to the loopback device where all ranks are on one host: a machine's own name need not resolve there.
    """
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        device = (
            dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)
            if on_one_host
            else dist.ProcessGroupGloo.create_default_device()
        )
        options._devices, options._timeout = [device], limit
        return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, world, options))
    name = f"processgroup{backend}".casefold()
    for known, kind in vars(dist).items():
        if known.casefold() == name:
            return cast(dist.ProcessGroup, kind(store, rank, world, limit))
    raise PlatformError(f"this build of torch has no backend {backend!r} for collectives")
