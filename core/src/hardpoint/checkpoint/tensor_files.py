"""A checkpoint's tensors in files, whatever the files' format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hardpoint_plugin_api import TensorInfo

if TYPE_CHECKING:
    import torch


class TensorFiles(ABC):
    """CheckpointTensors that are also read from end to end. Headers are known without reading any tensor."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The location of the tensors, for messages."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that the files carry beside their tensors, of all files together; empty where there are none."""
        return {}

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor in the files' order; each is a view of a mapped file, to be dropped when the next is asked
        for."""

    def of_rows(self, rows: Mapping[str, range]) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``__iter__``, for a reader that looks at ``rows`` alone: of each tensor those along its first axis, and
        nothing of tensors that are not there. Default: all can be looked at."""
        return iter(self)

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, by its file's header; KeyError where there is none of that name."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied. Raises CheckpointError for a file that is damaged or gone since."""
