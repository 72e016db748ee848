"""Programs of other projects that stand between clients and our servers."""
