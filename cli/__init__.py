"""The `wicore` commands, one file each."""
