"""Mixtures of experts: the steps that expert kernels share, and those around an all-to-all."""
