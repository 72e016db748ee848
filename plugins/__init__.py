"""GPU code: Triton kernels, their compilation ahead of time, and the TensorRT plugins over them."""
