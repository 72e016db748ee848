"""The fronts of one server, as one of them sees the others.

Must not know how they talk. Invariant: what holds for the whole server is in `cells`, which all of them share.
"""

from __future__ import annotations

from typing import Any

from wicore_trt.core.cells import Cells


class Fronts:
    """A front that is alone."""

    number = 1
    """Of this one; the first one's is 1."""
    count = 1
    listening = False
    """Whether others listen at the same addresses already, or may begin to at any time."""

    def __init__(self, cells: Cells | None = None) -> None:
        self.cells = cells or Cells()

    async def ask(self, tenant: str | None) -> list[dict[str, Any]]:
        """What the others tell of a tenant's requests (`Servers.told`), or (None) of everybody's; of those that answer
        in time."""
        return []
