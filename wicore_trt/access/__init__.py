"""Who may call, how much, and what is written about it; for every way into the server."""
