"""The engine directory: build, manifest, verified load."""
