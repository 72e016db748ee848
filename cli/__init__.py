"""Commands of `wicore`, one file each."""
