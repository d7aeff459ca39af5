"""Reading Hugging Face checkpoints: where they are, their configs, their tensors."""
