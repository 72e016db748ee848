"""One step on a device: batch in, sampled tokens out."""
