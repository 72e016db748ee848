"""Convert sources (Hugging Face, GGUF) to unified checkpoints."""
