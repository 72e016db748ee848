"""On a CPU: whole steps beside transformers, the native kernels, TensorRT plans of large models."""
