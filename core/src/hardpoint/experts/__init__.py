"""Mixtures of experts: kernels, and what dispatches tokens to them and combines their results."""
