"""Tiny sources for builds of plans."""

from engine.conftest import make_source

__all__ = ["make_source"]
