"""Constraints on outputs: what they mean, whether they can be kept, and which tokens may follow."""
