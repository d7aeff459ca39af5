"""Attention's hardware-neutral half: the reference backend, layer groups, and what joins or adapts backends."""
