"""The code of torch's operators on an accelerator, loaded before a start's first steps come to need it.

A driver that loads code lazily does so at an operator's first call: 20 to 50 ms for each on an H100, a third of a
second for those of a start (docs/measurements/h100.md). Python's lock is free meanwhile, so that a thread loads the
code while Python chooses kernels and constructs the model.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import nn

logger = logging.getLogger(__name__)


class OperatorLoading:
    """A thread that calls the operators once, on a few elements of ``device``, each of which another call could be."""

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.Thread(target=_load, args=(device,), name="hardpoint-operators", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the thread: no other thread may load code while a graph is captured."""
        self._thread.join()


def _load(device: torch.device) -> None:
    try:
        torch.get_device_module(device).set_device(device)
        with torch.inference_mode():
            _call_operators(device)
    except Exception as error:  # the steps that need an operator meet the error again
        logger.debug("operators are loaded at their first calls: %s: %s", type(error).__name__, error)


def _call_operators(device: torch.device) -> None:
    """Call the operators of weights drawn at random, of a decoder's step and of sampling."""
    weights = torch.randn(8, 8, generator=torch.Generator(device), dtype=torch.bfloat16, device=device)
    nn.functional.linear(weights, weights)  # with the library of matrix products
    rows = torch.arange(8, device=device)
    numbers, logits = rows.unsqueeze(1).repeat(1, 8), weights.float()
    for x in (weights, logits, numbers):
        torch.cat([x, x])[rows] = x[rows].index_copy_(0, rows, x)
    mask = (numbers == rows) & (numbers < rows) | ~(rows < 3)
    torch.where(mask.all(-1), logits, -torch.inf)
    counts = torch.zeros(8, 8, dtype=torch.int16, device=device)
    counts.scatter_add_(1, numbers, torch.ones_like(counts)).add_(1)
    counts[rows, rows] = torch.ones_like(rows, dtype=torch.int16)
    bits = counts.to(torch.uint8)
    (bits.unsqueeze(-1) >> bits) & 1
    rows.repeat_interleave(2).fill_(1)
    logits.cos().mul_(logits.sin())
