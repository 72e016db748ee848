"""Triton kernels compiled per GPU architecture, ahead of time; CUDA graphs for decode."""
