"""HIP graphs as a graph engine, which PyTorch for ROCm has under its names for CUDA. They never ran on hardware."""

from __future__ import annotations

import torch

from hardpoint.platforms.stream_graphs import StreamGraphs


class HipGraphs(StreamGraphs):
    """The graph engine of AMD GPUs."""

    kind = torch.cuda.CUDAGraph
