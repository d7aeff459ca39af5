"""Hardpoint's support for NVIDIA GPUs. Its contributions are listed in ``hardpoint.toml``."""
