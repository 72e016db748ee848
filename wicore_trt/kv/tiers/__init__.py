"""Host memory and disk as the cache manager sees them: books, transfers, loads, what clients asked to keep."""
