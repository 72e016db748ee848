"""Replays and simulations of policies and of the planner; no server uses them."""
