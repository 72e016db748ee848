"""Convert tokens to text and back."""
