"""From a source (Hugging Face, GGUF) to the unified checkpoint."""
