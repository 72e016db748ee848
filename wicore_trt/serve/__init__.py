"""The gRPC server, the worker protocol of routers, and the front process."""
