"""TensorRT plugins (IPluginV3) over the kernels."""
