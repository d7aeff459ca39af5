"""Core as a plugin: the first one, through the same door. Its manifest is ``hardpoint.toml`` beside this file."""
