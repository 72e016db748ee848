"""The HTTP server: OpenAI's API, the product's own routes, a WebSocket."""
