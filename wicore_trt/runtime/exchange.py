"""Sums and gathers of rows over the ranks of one machine, through shared memory.

Knows rows and ranks; must not know the model, steps, or who starts ranks. Invariants: sums are in rank order, so all
ranks hold the same bits; a rank waits neither for one that has ended nor for ever for one that hangs.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from wicore_trt.errors import RankError

PART_BYTES = 1 << 20
"""Bytes that a rank shares at once; longer rows are exchanged in parts."""
GLANCE_S = 0.25
"""While a rank waits for another one, it asks so often whether that one is alive."""


def create_memory(ranks: int) -> int:
    """Create the shared memory of an exchange; return its file descriptor, which has no name to leave behind."""
    fd = os.memfd_create("wicore-exchange", os.MFD_CLOEXEC)
    os.ftruncate(fd, 2 * ranks * PART_BYTES)
    return fd


class RankExchange:
    """End of `rank` of an exchange of `ranks`. All ranks call the same methods with rows of the same shapes, in the
    same order. `memory` is the descriptor that `create_memory` returned, `peers` a connected stream socket to each
    other rank, and `is_alive(rank)` tells whether a rank is worth waiting for. Two buffers take turns: a rank writes
    one again only after every rank has left it."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        memory: int,
        peers: Mapping[int, socket.socket],
        is_alive: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        self.rank, self.ranks, self._peers, self._is_alive = rank, ranks, dict(peers), is_alive
        for peer in self._peers.values():
            peer.settimeout(GLANCE_S)
        self._memory = os.fdopen(os.dup(memory), "r+b", buffering=0)
        shared = torch.frombuffer(mmap.mmap(memory, 2 * ranks * PART_BYTES), dtype=torch.float32)
        self._buffers, self._turn = shared.view(2, ranks, -1), 0
        self.within_step = False
        """True from the begin of a step to its last exchange: an error then leaves ranks at different places."""

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x`, float32 and contiguous, by its sum over all ranks; return it. Raises RankError."""
        for part in torch.split(x.view(-1), PART_BYTES // 4):
            first, *others = self._share(part)
            part.copy_(first)
            for other in others:
                part.add_(other)
        return x

    def find_own_tokens(self, token_ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find `token_ids`, int64 [N], in a table that is split by tokens, `size` rows on each rank. Return the rows
        here, and a mask [N] of the tokens of other ranks, whose row is 0."""
        own = token_ids - self.rank * size
        absent = (own < 0) | (own >= size)
        return own.masked_fill(absent, 0), absent

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return [R, ranks * C] float32: `x` [R, C] float32 of all ranks side by side; it is the last exchange of a
        step. Raises RankError."""
        rows, columns = x.shape
        gathered = torch.empty(self.ranks, rows * columns)
        begin = 0
        for part in torch.split(x.reshape(-1), PART_BYTES // 4):
            gathered[:, begin : begin + len(part)] = self._share(part)
            begin += len(part)
        self.within_step = False
        return gathered.view(self.ranks, rows, columns).transpose(0, 1).reshape(rows, self.ranks * columns)

    def share_bytes(self, data: bytes) -> list[bytes]:
        """Return `data` of all ranks, which is equally long on each; so also wait for all ranks. Raises RankError."""
        values = torch.tensor([[*data]], dtype=torch.float32)
        return [bytes(map(int, row)) for row in self.gather_columns(values).view(self.ranks, -1).tolist()]

    def map_memory(self, size: int) -> memoryview:
        """Map `size` zero bytes that all ranks share. Each calls it once, with the same size."""
        begin = 2 * self.ranks * PART_BYTES
        self._memory.truncate(begin + size)
        return memoryview(mmap.mmap(self._memory.fileno(), begin + size))[begin:]

    def close(self) -> None:
        self._memory.close()
        for peer in self._peers.values():
            peer.close()

    def _share(self, part: torch.Tensor) -> torch.Tensor:
        """Show `part` to all ranks; return [ranks, len(part)], valid until the second call from now."""
        buffers = self._buffers[self._turn, :, : len(part)]
        self._turn ^= 1
        buffers[self.rank] = part
        self._meet_ranks()
        return buffers

    def _meet_ranks(self) -> None:
        """Wait until all ranks are here. A system call orders memory before and after it."""
        for peer in self._peers.values():
            with suppress(OSError):  # of a rank that has ended, which is noticed below
                peer.send(b"\0")  # it never waits: at most two bytes are on their way
        for rank, peer in self._peers.items():
            while (byte := _receive_byte(peer)) is None:
                if not self._is_alive(rank):
                    raise RankError(f"rank {rank} hangs")
            if not byte:
                raise RankError(f"rank {rank} has ended")


def _receive_byte(peer: socket.socket) -> bytes | None:
    """Receive a byte; none when the other side has ended, None when it has sent nothing for GLANCE_S."""
    try:
        return peer.recv(1)
    except TimeoutError:
        return None
    except OSError:
        return b""
