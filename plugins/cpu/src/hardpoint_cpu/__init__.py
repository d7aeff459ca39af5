"""Hardpoint's support for CPUs. Its contributions are listed in ``hardpoint.toml``."""
