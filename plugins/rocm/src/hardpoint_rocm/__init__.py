"""Hardpoint's support for AMD GPUs. What it offers stands in ``hardpoint.toml``."""
