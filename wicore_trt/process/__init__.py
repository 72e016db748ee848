"""The processes of a server: supervisor, engine, front, checker of constraints."""
