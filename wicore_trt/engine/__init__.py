"""Engine directory: build, manifest, verified load."""
