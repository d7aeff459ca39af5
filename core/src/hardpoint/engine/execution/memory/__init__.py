"""Memory of the cache, memory by tag, and how both are given back and taken again."""
