"""Attention: what builds a layer group's backends, and joins those of several phases."""
