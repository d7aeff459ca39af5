"""Quantization: methods, schemes, and which scheme each layer of a checkpoint gets."""
