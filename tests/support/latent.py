"""Backends of latent attention on made-up batches, through the adapter by which the kit tries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hardpoint.conformance.families.latent import SharedLatents, as_causal
from hardpoint_plugin_api import ConfigValue, LatentBackend, LatentSpec
from tests.support.attention import Piece, run_backend


def run_latent_backend(
    kind: type[LatentBackend],
    spec: LatentSpec,
    pieces: Sequence[Piece],
    seed: int = 0,
    plugin_config: Mapping[str, Mapping[str, ConfigValue]] | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Run one step over ``pieces`` as ``run_backend`` does; returns [T, H, latent size], on the host."""
    shared = SharedLatents.of(spec)
    out, _ = run_backend(
        as_causal(kind), shared, pieces, seed, plugin_config=plugin_config, device=device, value_size=spec.latent_size
    )
    return out
