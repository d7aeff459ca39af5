"""Model families, one flat file each. A file turns a checkpoint's config into layer arguments and names its tensors."""
