"""Scheduling of sequences into steps. Plain data only."""
