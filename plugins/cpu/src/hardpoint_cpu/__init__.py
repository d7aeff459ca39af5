"""Hardpoint's support for CPUs. What it offers stands in ``hardpoint.toml``."""
