"""Peer memory over a pretended driver: blocks of all ranks, and what happens where GPUs do not reach one another."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from wicore_trt.runtime.exchange import RankExchange, create_memory
from wicore_trt.runtime.peer_memory import PeerMemory, open_peer_memory

RANKS = 3
CPU = torch.device("cpu")


class PretendedDriver:
    """libcuda of one rank, whose device memory lies in this process. `fault`: "refuses" to open a handle; "loses" what
    it writes to peers; "reads" stale bytes of peers."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.own = fault, list[ctypes.Array[ctypes.c_char]]()
        self.freed, self.pinned = list[str](), 0

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("cu"), name
        call = getattr(type(self), f"do_{name.removesuffix('_v2')}", lambda *arguments: 0)
        return lambda *arguments: call(self, *arguments) or 0

    def do_cuMemAlloc(self, address: Any, size: Any) -> None:
        self.own.append(ctypes.create_string_buffer(size.value))
        ctypes.memset(self.own[-1], 0xA5, size.value)
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = ctypes.addressof(self.own[-1])

    def do_cuMemsetD8(self, address: Any, value: Any, size: Any) -> None:
        ctypes.memset(address.value, value.value, size.value)

    def do_cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        ctypes.memmove(handle, struct.pack("<Q", address.value ^ 0x1FF) + b"\xff" * 56, 64)

    def do_cuIpcOpenMemHandle(self, address: Any, handle: Any, flags: Any) -> int:
        assert flags.value == 1
        if self.fault == "refuses":
            return 217
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = struct.unpack_from("<Q", bytes(handle))[0] ^ 0x1FF
        return 0

    def _is_own(self, address: int) -> bool:
        return any(0 <= address - ctypes.addressof(block) < len(block) for block in self.own)

    def do_cuMemcpyDtoD(self, to: Any, source: Any, size: Any) -> None:
        if self.fault == "loses" and not self._is_own(to.value):
            return
        if self.fault == "reads" and not self._is_own(source.value):
            return
        ctypes.memmove(to.value, source.value, size.value)

    def do_cuMemcpyHtoD(self, to: Any, data: bytes, size: Any) -> None:
        ctypes.memmove(to.value, data, size.value)

    def do_cuMemcpyDtoH(self, to: Any, source: Any, size: Any) -> None:
        ctypes.memmove(to, source.value, size.value)

    def do_cuMemHostRegister(self, at: Any, size: Any, flags: Any) -> int:
        self.pinned += size.value
        return 1 if self.fault == "pins nothing" else 0

    def do_cuMemHostGetDevicePointer(self, address: Any, at: Any, flags: Any) -> None:
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = at.value

    def do_cuMemFree(self, address: Any) -> None:
        self.freed.append("own")

    def do_cuIpcCloseMemHandle(self, address: Any) -> None:
        self.freed.append("peer")


def open_all(drivers: list[PretendedDriver] | None, **options: Any) -> list[PeerMemory]:
    memory = create_memory(RANKS)
    mesh = {(a, b): socket.socketpair() for a in range(RANKS) for b in range(a + 1, RANKS)}
    peers = [{b: mesh[min(a, b), max(a, b)][a > b] for b in range(RANKS) if b != a} for a in range(RANKS)]
    group = [RankExchange(rank, RANKS, memory, peers[rank]) for rank in range(RANKS)]
    os.close(memory)

    def open_one(rank: int) -> PeerMemory:
        return open_peer_memory(group[rank], CPU, 3 << 20, driver=drivers and drivers[rank], **options)

    with ThreadPoolExecutor(RANKS) as pool:
        try:
            return list(pool.map(open_one, range(RANKS)))
        finally:
            for end in group:
                end.close()


def check_blocks(found: list[PeerMemory]) -> None:
    """What a rank writes through its addresses is in the block of the rank they name, and nowhere else."""
    assert all(not peer.own.any() and not peer.failed for peer in found)
    for peer in found:
        for to, address in enumerate(peer.addresses.tolist()):
            ctypes.memset(address + 64 * peer.rank, 1 + 16 * peer.rank + to, 64)
    for peer in found:
        blocks = peer.own[: 64 * RANKS].view(RANKS, 64)
        assert blocks.tolist() == [[1 + 16 * rank + peer.rank] * 64 for rank in range(RANKS)]
        assert not peer.own[64 * RANKS :].any() and len(peer.own) == 4 << 20
    found[-1].failed.fill_(1)  # as a kernel does
    assert all(peer.failed.tolist() == [1] for peer in found)


def test_each_rank_reaches_the_blocks_of_all() -> None:
    drivers = [PretendedDriver() for _ in range(RANKS)]
    found = open_all(drivers)
    assert all(peer.direct for peer in found)
    check_blocks(found)
    for peer, driver in zip(found, drivers, strict=True):
        peer.close()
        assert sorted(driver.freed) == ["own", "peer", "peer"] and driver.pinned == 2 << 20


@pytest.mark.parametrize("fault", ["refuses", "loses", "reads", "off"])
def test_without_peer_access_all_ranks_take_host_memory(fault: str) -> None:
    """Also where the driver claims access, and data of one rank alone does not arrive."""
    drivers = [PretendedDriver(fault if rank == 1 else "") for rank in range(RANKS)]
    found = open_all(drivers, peer_access=fault != "off")
    assert not any(peer.direct for peer in found)
    assert all(driver.pinned == RANKS * (4 << 20) + (2 << 20) for driver in drivers)
    check_blocks(found)


def test_ranks_on_a_cpu_share_host_memory() -> None:
    check_blocks(open_all(None))
