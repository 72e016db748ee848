"""Link between the front and the engine process."""
