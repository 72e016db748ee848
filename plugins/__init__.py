"""Kernels: Triton's, their compilation ahead of time, the TensorRT plugin over them; C++ ones for the CPU (`cpu/`)."""
