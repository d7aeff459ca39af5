"""A plugin for plugin API 0.2 that touches everything that a plugin can. It is not changed once 0.1 is released."""
