"""Processes of the engine's own, and the calls that pass between them."""
