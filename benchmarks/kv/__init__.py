"""The KV tiers: sessions that come back, policies, the planner, the index of a disk."""
