"""Hardpoint's support for Intel GPUs. Its contributions are listed in ``hardpoint.toml``."""
