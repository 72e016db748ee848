"""Prefixes from lower tiers: what to load and what to compute, and the loads themselves."""
