"""Changes that llama.cpp's conversion makes of single tensors (``conversion/qwen.py``), and how they are undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # front ends do without


@dataclass(frozen=True)
class Change:
    """The way back from a tensor of a GGUF file: its shape, its numbers, and their dtype where it is another."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    tensor: Callable[[torch.Tensor], torch.Tensor]
    dtype: str | None = None


UNCHANGED = Change(lambda shape: shape, lambda x: x)
"""A norm without the one that others of its architecture have added."""
EXPONENTIAL = Change(lambda shape: shape, lambda x: x.float().neg().log(), "float32")
"""The file has minus the exponential of each number."""
FLAT_FILTER = Change(lambda shape: (shape[0], 1, *shape[1:]), lambda x: x.unsqueeze(1))
"""A convolution of each channel by itself, [C, W] in the file: [C, 1, W]."""
