"""Hardpoint's support for Intel GPUs. What it offers stands in ``hardpoint.toml``."""
