"""Constrain outputs: check constraints, and compute which tokens may follow."""
