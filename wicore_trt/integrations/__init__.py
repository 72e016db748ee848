"""Other engines that our checkpoints and KV tiers work with."""
