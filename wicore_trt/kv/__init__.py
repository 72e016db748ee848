"""Paged KV bookkeeping. Nothing here that decides imports torch."""
