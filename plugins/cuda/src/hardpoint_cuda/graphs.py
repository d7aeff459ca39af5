"""CUDA graphs as a graph engine."""

from __future__ import annotations

import torch

from hardpoint.platforms.stream_graphs import StreamGraphs


class CudaGraphs(StreamGraphs):
    """The graph engine of NVIDIA GPUs."""

    kind = torch.cuda.CUDAGraph
