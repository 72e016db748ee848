"""The names of KV pages, and what every tier keeps beside their bytes."""
