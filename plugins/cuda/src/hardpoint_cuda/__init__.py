"""Hardpoint's support for NVIDIA GPUs. What it offers stands in ``hardpoint.toml``."""
