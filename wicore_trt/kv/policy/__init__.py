"""What leaves a KV tier when it is full: the policies, and what they learn from."""
