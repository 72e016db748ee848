"""The disk tier: files, formats, the index, the store and its threads, and tools for a directory that nobody holds."""
