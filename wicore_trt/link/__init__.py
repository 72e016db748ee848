"""Between the process that serves clients and the one that runs the engine."""
