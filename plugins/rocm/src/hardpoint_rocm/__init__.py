"""Hardpoint's support for AMD GPUs. Its contributions are listed in ``hardpoint.toml``."""
