"""Core's own drafters."""
