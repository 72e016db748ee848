"""Triton kernels; one source is interpreted on a CPU, compiled ahead of time and launched from every backend."""
