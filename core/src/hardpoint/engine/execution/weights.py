"""A model's weights as one thing that is loaded, given back, read again, and replaced by others of the same shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from hardpoint.checkpoint.checkpoint import Checkpoint
from hardpoint.checkpoint.formats import open_files
from hardpoint.checkpoint.random_weights import RandomWeights
from hardpoint.checkpoint.streamed_files import streamed
from hardpoint.context import Context
from hardpoint.layers import CausalLM
from hardpoint.layers.loading import GivenTensors, check_weights, load_made_weights, load_weights
from hardpoint_plugin_api import EngineError

Tensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors by the names that a checkpoint gives them."""


class ModelWeights:
    """The weights of ``model``, read from ``checkpoint`` until others are given."""

    def __init__(self, model: CausalLM, checkpoint: Checkpoint, ctx: Context) -> None:
        self._model, self._checkpoint, self._device = model, checkpoint, ctx.torch_device
        self._seed = ctx.config.seed if ctx.config.load_format == "random" else None
        self._dtype, self._load_format = ctx.dtype, ctx.config.load_format
        self._folder: Path | None = checkpoint.folder

    def load(self) -> None:
        """Read the weights, prepare and bind the layers. Raises CheckpointError, and ConfigError for a load format that
        cannot be had."""
        assert self._folder is not None
        names = self._model.weight_names
        if self._seed is None:
            files = streamed(open_files(self._folder).tensors(), self._load_format, str(self._device))
            load_weights(self._model, names, files, self._device)
        else:
            random = RandomWeights(self._device, self._dtype, self._seed)
            load_made_weights(self._model, names, random.make, self._device, title=f"random weights for {self._folder}")

    def drop(self) -> None:
        """Give the memory back."""
        for module in self._model.modules():
            release = getattr(module, "release", None)
            if release:
                release()

    @property
    def can_restore(self) -> bool:
        """Whether there is a folder to read them from again."""
        return self._folder is not None

    def restore(self) -> None:
        """Read the weights again from where they last came. Raises EngineError where that was no folder."""
        if self._folder is None:
            raise EngineError(
                "the weights were last updated from tensors, which cannot be read again; give them with update_weights"
            )
        self.load()

    def check(self, folder: Path) -> None:
        """Raise CheckpointError for a checkpoint of another shape or with other settings; touches nothing."""
        self._checkpoint.check_same_settings(folder)
        check_weights(self._model, self._model.weight_names, open_files(folder).tensors())

    def update(self, source: Path | Tensors) -> None:
        """Replace the weights by a checkpoint's, or by tensors: all of a checkpoint's, by its names, in any order.

        A tensor is copied, and may be dropped when the next is asked for. Raises CheckpointError for what is wrong with
        them; there are no weights then, and ``restore`` reads what was there before tensors, or the new checkpoint.
        """
        self.drop()
        if isinstance(source, Path):
            self._folder, self._seed = source, None
            self.load()
        else:
            load_weights(self._model, self._model.weight_names, GivenTensors(source), self._device)
            self._folder = None  # not before: a folder's weights can be read again where these are wrong
