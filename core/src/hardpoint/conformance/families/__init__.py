"""Core's own generators of trials, one file per family."""
