"""The processes of a server: supervisor, engine, checker of constraints. The front is `serve/front.py`."""
