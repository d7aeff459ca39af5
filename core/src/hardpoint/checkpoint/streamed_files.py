"""Safetensors files read by a library that streams them: ``--load-format fastsafetensors`` and ``runai_streamer``.

Both read files in parallel, past the mapping of pages one by one that the default has. They read whole files, so ranks
that need slices alone read more than by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hardpoint.checkpoint.safetensors_files import SafetensorsFiles
from hardpoint.checkpoint.tensor_files import TensorFiles
from hardpoint_plugin_api import CheckpointError, ConfigError, TensorInfo

if TYPE_CHECKING:
    import torch

Stream = Callable[[ModuleType, Sequence[str], str], Iterator[tuple[str, "torch.Tensor"]]]
"""Yields the tensors of files, by their paths, for a device."""


class StreamedFiles(TensorFiles):
    """``files``, whose tensors come by ``stream`` when they are read from end to end, and are to be dropped when the
    next is asked for."""

    def __init__(self, files: SafetensorsFiles, load_format: str, device: str) -> None:
        """Raises ConfigError where the library of ``load_format`` is not installed."""
        self._files, self._device, self._load_format = files, device, load_format
        package, module, self._stream = _LIBRARIES[load_format]
        try:
            self._library = import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"--load-format {load_format} needs the package {package}, which cannot be imported ({error}); "
                f"pip install {package}, or leave it out"
            ) from error

    @property
    def title(self) -> str:
        return self._files.title

    @property
    def names(self) -> frozenset[str]:
        return self._files.names

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._files.metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises CheckpointError for what the library raises."""
        tensors = self._stream(self._library, list(map(str, self._files.paths)), self._device)
        while True:
            try:
                item = next(tensors, None)
            except Exception as error:  # whatever type the library's errors have
                raise CheckpointError(f"{self.title}: --load-format {self._load_format} failed: {error}") from error
            if item is None:
                return
            yield item

    def info(self, name: str) -> TensorInfo:
        return self._files.info(name)

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(name)


def streamed(files: TensorFiles, load_format: str, device: str) -> TensorFiles:
    """``files`` as ``load_format`` reads them, to a device of torch's name ``device``.

    Raises ConfigError for files of another format than safetensors, and where the library is not installed.
    """
    if load_format not in _LIBRARIES:
        return files
    if not isinstance(files, SafetensorsFiles):
        raise ConfigError(f"--load-format {load_format} reads safetensors files alone, not {files.title}; leave it out")
    return StreamedFiles(files, load_format, device)


def _fastsafetensors(library: Any, paths: Sequence[str], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A file at a time, which is on the device as a whole (fastsafetensors 0.5, ``loader.py``)."""
    for path in paths:
        loader = library.SafeTensorsFileLoader(library.SingleGroup(), device=device, nogds=True)
        try:
            loader.add_filenames({0: [path]})
            buffers = loader.copy_files_to_device()
            try:
                for name in loader.get_keys():
                    yield name, buffers.get_tensor(name)
            finally:
                buffers.close()
        finally:
            loader.close()


def _runai_streamer(library: Any, paths: Sequence[str], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All files at once, to the host (runai-model-streamer 0.17, ``safetensors_streamer.py``)."""
    with library.SafetensorsStreamer() as streamer:
        streamer.stream_files(list(paths))
        yield from streamer.get_tensors()


_LIBRARIES: dict[str, tuple[str, str, Stream]] = {
    "fastsafetensors": ("fastsafetensors", "fastsafetensors", _fastsafetensors),
    "runai_streamer": ("runai-model-streamer", "runai_model_streamer", _runai_streamer),
}
"""By load format: the name for pip, the name for Python, and the stream."""
