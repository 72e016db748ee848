"""Costs of serving: the engine's thread beside the front, and the front itself."""
