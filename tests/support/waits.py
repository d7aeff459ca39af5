"""Making it an error that the host waits for a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def waits_are_errors(device: Any) -> Iterator[None]:
    """``device`` is torch's module for a kind of device, such as ``torch.cuda``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            device.set_sync_debug_mode("error")
        yield
    finally:
        device.set_sync_debug_mode("default")
