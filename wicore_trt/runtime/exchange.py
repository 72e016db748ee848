"""Sums and gathers of rows over the ranks of one machine, through shared memory.

Knows rows and ranks; must not know the model, steps, or who starts ranks. Invariants: sums are in rank order, so all
ranks hold the same bits; a rank waits neither for one that has ended nor for ever for one that hangs. Rows that are
read have the CRC that their writer sent beside the shared memory, so none that was changed or moved gets into a result.
"""

from __future__ import annotations

import mmap
import os
import socket
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, reduce

import numpy as np
import numpy.typing as npt
import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import RankError

Floats = npt.NDArray[np.float32]
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
    """End of `rank` of an exchange of `ranks`. All ranks call the same methods with rows of the same shapes, in one
    order. `memory` is of `create_memory`, `peers` a connected stream socket to each other rank, and `is_alive(rank)`
    tells whether to wait for it. Two buffers take turns: a rank writes one again after every rank has left it."""

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
        shared = np.frombuffer(mmap.mmap(memory, 2 * ranks * PART_BYTES), np.float32)
        self._buffers, self._turn = shared.reshape(2, ranks, -1), 0
        self.compares = False
        self.within_step = False
        """True from the begin of a step to its last exchange: an error then leaves ranks at different places."""

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x`, float32 and contiguous, by its sum over all ranks; return it. Raises RankError."""
        for part in _split_parts(x.view(-1)):
            first, *others = self._share(part)
            part[:] = first
            with np.errstate(all="ignore"):  # the sampler judges values that are not finite
                for other in others:
                    part += other
        return x

    def compare_rows(self, *parts: torch.Tensor) -> None:
        """Compare the bits of contiguous tensors of all ranks, where `compares` says so. Raises RankError."""
        if not self.compares:
            return
        told = reduce(lambda before, part: zlib.crc32(part.view(torch.uint8).numpy().data, before), parts, 0)
        if len({*self._meet_ranks(told).values()}) > 1:
            raise RankError("ranks hold different rows or tokens")

    def find_own_tokens(self, token_ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Find `token_ids`, int64 [N], in a table that is split by tokens, `size` rows on each rank. Return the rows
        here, and a mask [N] of the tokens of other ranks, whose row is 0."""
        own = token_ids - self.rank * size
        absent = (own < 0) | (own >= size)
        return own.masked_fill(absent, 0), absent

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [R, ranks * C]: all ranks' `x` [R, C] side by side, last in a step. Raises RankError."""
        rows, columns = x.shape
        gathered, begin = np.empty((self.ranks, rows * columns), np.float32), 0
        for part in _split_parts(x.reshape(-1)):
            self._share(part, gathered[:, begin : begin + len(part)])
            begin += len(part)
        self.within_step = False
        found = torch.from_numpy(gathered).view(self.ranks, rows, columns)
        return found.transpose(0, 1).reshape(rows, self.ranks * columns)

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
        self._buffers = self._buffers[..., :0].copy()  # a mapping has a descriptor, too
        for peer in self._peers.values():
            peer.close()

    def _share(self, part: Floats, into: Floats | None = None) -> Floats:
        """Show `part` to all ranks; return a copy of what all have shown, [ranks, len(part)]. Raises RankError."""
        shared, told = self._buffers[self._turn, :, : len(part)], zlib.crc32(part.data)
        self._turn ^= 1
        shared[self.rank] = part
        right, found = self._meet_ranks(told), np.empty_like(shared) if into is None else into
        found[:] = shared  # what is compared changes no more
        for rank, rows in enumerate(found):
            if zlib.crc32(rows.data) != right[rank]:
                raise RankError(f"what rank {rank} gave to an exchange was changed")
        return found

    def _meet_ranks(self, told: int) -> dict[int, int]:
        """Wait until all ranks are here; return what each has told. A system call orders memory before and after it."""
        for peer in self._peers.values():
            with suppress(OSError):  # of a rank that has ended, which is noticed below
                peer.send(told.to_bytes(4, "little"))  # it never waits: at most two are on their way
        found = {self.rank: told}
        for rank, peer in self._peers.items():
            while (data := _receive_sum(peer)) is None:
                if not self._is_alive(rank):
                    raise RankError(f"rank {rank} hangs")
            if not data:
                raise RankError(f"rank {rank} has ended")
            found[rank] = int.from_bytes(data, "little")
        return found


def _split_parts(flat: torch.Tensor) -> list[Floats]:
    values, size = flat.numpy(), PART_BYTES // 4
    return [values[begin : begin + size] for begin in range(0, len(values) or 1, size)]


def _receive_sum(peer: socket.socket) -> bytes | None:
    """Receive what was sent at once; none when the other side has ended, None when it has sent nothing for GLANCE_S."""
    try:
        return peer.recv(4)
    except TimeoutError:
        return None
    except OSError:
        return b""


def hash_bits(bits: torch.Tensor) -> torch.Tensor:
    """Hash integers [rows, columns] to one int64 on their device, by sums modulo 2^64: of each row times odd weights,
    then of these times others. So a value that changes or moves shows, where a plain sum hides the second."""
    rows, columns = bits.shape
    weights = _make_weights(bits.device, columns + div_ceil(rows, 256) * 256)
    return ((bits * weights[:columns]).sum(1) * weights[columns:][:rows]).sum()


@cache
def _make_weights(device: torch.device, count: int) -> torch.Tensor:
    drawn = torch.randint(1 << 62, (count,), generator=torch.Generator().manual_seed(count))
    return (2 * drawn + 1).to(device)
