"""Steps on a device: batch in, sampled tokens out."""
