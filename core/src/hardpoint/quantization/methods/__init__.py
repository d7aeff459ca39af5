"""The methods that core brings: one reader of checkpoints a file, and those that quantize while loading."""
