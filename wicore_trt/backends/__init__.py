"""Ways to compute: each folder builds, opens and runs engines of one backend and imports no other."""
