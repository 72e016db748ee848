"""TensorRT plans per GPU architecture and phase, with weights as inputs."""
