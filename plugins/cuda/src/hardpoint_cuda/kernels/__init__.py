"""Kernels in Triton that NVIDIA GPUs alone have."""
