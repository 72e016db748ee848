"""Workloads, measurement and reports."""
