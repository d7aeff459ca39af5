"""Captured graphs of steps: their shapes, their buffers, how they are found and replayed, and what is checked."""
