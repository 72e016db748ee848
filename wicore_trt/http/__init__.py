"""The HTTP server: the APIs of OpenAI and Anthropic, the product's own routes, a WebSocket."""
