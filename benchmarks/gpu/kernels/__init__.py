"""Sweeps that choose the launch configurations of GPU kernels, each checked against a reference."""
