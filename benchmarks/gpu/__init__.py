"""On a GPU: engines behind the serving loop beside vLLM, start-up, and the bounds of the machine."""
