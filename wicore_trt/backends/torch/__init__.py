"""Torch operators on a CPU or GPU, and the C++ kernels for CPUs: the default without a GPU, and the oracle."""
