"""Who runs in the next step. Plain data only."""
