"""Acme's kernels for Hardpoint, in plain PyTorch."""
