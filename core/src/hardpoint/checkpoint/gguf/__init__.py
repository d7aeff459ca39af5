"""GGUF, the checkpoint format of llama.cpp, as the files of a Hugging Face checkpoint."""
