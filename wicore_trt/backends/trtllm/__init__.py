"""TensorRT-LLM where it is installed: engines of its checkpoint layout, and our tiers behind its KV connector."""
