"""Eviction policies of the KV tiers, and their models of reuse."""
