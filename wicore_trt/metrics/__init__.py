"""What a server tells of itself to Prometheus."""
