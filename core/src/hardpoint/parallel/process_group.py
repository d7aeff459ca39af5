"""torch.distributed's process groups, made directly: none is registered in a table of the whole process."""

from __future__ import annotations

import ipaddress
import socket
import time
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore  # torch.distributed's, but not for mypy

from hardpoint_plugin_api import PlatformError

__all__ = ["LOOPBACK", "FileStore", "PrefixStore", "Store", "TCPStore", "own_address", "process_group", "tcp_store"]

LOOPBACK = "127.0.0.1"
_RETRY_SECONDS = 0.1
_PROBE_SECONDS = 5.0


def tcp_store(host: str, port: int, patience: float, *, serves: bool = False) -> TCPStore:
    """A store at ``port``, which this process serves, or another one; waits for that one ``patience`` seconds.

    It listens at every address of the host, and knows no passwords. Raises PlatformError where it cannot be had.
    """
    try:
        if not serves:
            _await_server(host, port, patience)
        return TCPStore(host, port, is_master=serves, timeout=timedelta(seconds=patience), wait_for_workers=False)
    except (RuntimeError, OSError) as error:  # torch.distributed raises RuntimeError
        what = "cannot be served" if serves else f"was not reached within {patience:g} seconds (--core-start-timeout)"
        raise PlatformError(f"the store at {host}:{port}, where ranks meet, {what}: {error}") from error


def _await_server(host: str, port: int, patience: float) -> None:
    """Wait until somebody listens there; TCPStore waits more than twice as long as it is told. Raises OSError."""
    until = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), _PROBE_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_RETRY_SECONDS)


def own_address(host: str, port: int) -> str:
    """The address of this host that others reach, where ``host`` at ``port`` is one that all of them reach.

    It is that of the device by which packets go there. ``host`` itself is this host's where they go nowhere. Raises
    PlatformError for a host that has no address.
    """
    try:
        family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
            probe.connect(there)
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise PlatformError(f"{host}:{port}, where ranks meet, has no address that leads there: {error}") from error
    return host if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


def process_group(
    backend: str, store: Store, rank: int, world: int, timeout: float, *, on_one_host: bool
) -> dist.ProcessGroup:
    """Join the group that shares ``store``. Raises PlatformError for a backend that this build of torch lacks.

    gloo binds to the loopback device where all ranks are on one host: a machine's own name need not resolve there.
    Otherwise it binds to the device that leads to the store, where that is at an address.
    """
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        hostname = LOOPBACK if on_one_host else _hostname(store)
        device = (
            dist.ProcessGroupGloo.create_device(hostname=hostname)
            if hostname
            else dist.ProcessGroupGloo.create_default_device()
        )
        options._devices, options._timeout = [device], limit
        return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, world, options))
    name = f"processgroup{backend}".casefold()
    for known, kind in vars(dist).items():
        if known.casefold() == name:
            return cast(dist.ProcessGroup, kind(store, rank, world, limit))
    raise PlatformError(f"this build of torch has no backend {backend!r} for collectives")


def _hostname(store: Store) -> str | None:
    """This host's address towards ``store``; None where that is at none."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return own_address(store.host, store.port) if isinstance(store, TCPStore) else None
