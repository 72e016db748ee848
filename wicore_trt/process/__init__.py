"""The processes of a server: one supervisor, one engine, fronts."""
