"""Weights out of nothing: for measuring a model's shape where no checkpoint is at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hardpoint.dtypes import dtype_name
from hardpoint_plugin_api import CheckpointError, TensorInfo

_SPREAD = 0.02
"""Standard deviation, as most models are initialised with (Radford et al. 2019, GPT-2)."""


class RandomTensors:
    """The tensors that a checkpoint with the config.json in ``folder`` would hold, by Transformers' own model of it.

    Made on ``device``, the same for a ``seed``: norms' weights are ones, all else is normally distributed.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        """Raises CheckpointError for a config that Transformers builds no plain model from."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self._device, self._dtype, self._seed = device, dtype, seed
        self.title = f"random weights for {folder}"
        try:
            config = AutoConfig.from_pretrained(folder)
            if getattr(config, "quantization_config", None):
                raise ValueError("its weights are quantized")
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # whatever Transformers raises for a config that it does not like
            raise CheckpointError(f"{folder}: no random weights can be made for this config.json: {error}") from error
        shared = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
        self._shapes = {name: x.shape for name, x in model.state_dict().items() if name not in shared}

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._shapes)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor; KeyError where there is none of that name."""
        return TensorInfo(tuple(self._shapes[name]), dtype_name(self._dtype))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the host; all before it are made, too."""
        return next(x for other, x in self if other == name).cpu()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, made as it is asked for."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        for name, shape in self._shapes.items():
            if name.endswith("norm.weight"):
                yield name, torch.ones(shape, dtype=self._dtype, device=self._device)
            else:
                drawn = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
                yield name, drawn.mul_(_SPREAD)
