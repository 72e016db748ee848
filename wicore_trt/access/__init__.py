"""Keys, limits, access log and traces, for every way into the server."""
