"""Whose prompts come first in a step: tenants by the tokens that their prompts were given.

Must not know sequences. Invariant: of two tenants whose prompts wait, one is given no more than a step's tokens before
the other has its turn; who had none meanwhile is owed nothing, and begins as the one that was given fewest.
"""

from __future__ import annotations

from collections.abc import Set


class Turns:
    """Tokens by tenant, above those of the tenant that was given fewest."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}

    def begin(self, tenants: Set[str]) -> None:
        """A step begins, and these have prompts."""
        given = self._given
        least = min((given[name] for name in tenants if name in given), default=0)
        self._given = {name: given.get(name, least) - least for name in tenants}

    def of(self, tenant: str) -> int:
        """Smaller comes first."""
        return self._given.get(tenant, 0)

    def gave(self, tenant: str, tokens: int) -> None:
        """A prompt was given so many."""
        self._given[tenant] = self._given.get(tenant, 0) + tokens
