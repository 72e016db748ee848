"""Memory in which GPUs of several ranks write to one another: a block of each rank that all ranks' kernels reach.

Knows addresses and the driver; neither kernels nor what a block holds. Invariants: addresses stay the same until the
process ends, so graphs may hold them; peer access is trusted only after a pattern went each way. Without it all blocks
lie in pinned host memory. A block is one cuMemAlloc of its own, opened by its IPC handle; no multicast.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.runtime.cuda_lanes import host_address
from wicore_trt.runtime.exchange import RankExchange

PATTERN_BYTES = 4096
"""Each rank writes so many to each block, and reads them back, before a peer is trusted."""
_GRANULE = 2 << 20  # bytes; a smaller block would share its handle with other memory
_PORTABLE_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
log = logging.getLogger(__name__)


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Blocks of all ranks. `addresses` int64 [ranks], on this rank's device, are where its kernels reach each block;
    `own` uint8 [bytes] is this rank's block, zero at first. `failed`, int32 [1], lies in pinned host memory that all
    ranks share. A kernel that has waited too long for a peer writes 1 there, as does a host that has lost a rank: what
    any rank computes from then on is worth nothing. `direct`: blocks are device memory."""

    rank: int
    ranks: int
    addresses: torch.Tensor
    own: torch.Tensor
    failed: torch.Tensor
    direct: bool
    close: Callable[[], None]


def open_peer_memory(
    ranks: RankExchange, device: torch.device, size: int, *, peer_access: bool = True, driver: Any = None
) -> PeerMemory:
    """Open blocks of at least `size` bytes; all ranks call it at the same time, once. Without `peer_access`, and where
    GPUs have none, blocks lie in host memory. `driver` stands for libcuda in tests. Raises RankError for a rank that
    ended, EnvironmentUnfitError where host memory cannot be pinned."""
    size += -size % _GRANULE
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # there is a context now
        driver = ctypes.CDLL("libcuda.so.1")
    blocks = None if driver is None else _Blocks(ranks, size, driver)
    trusted = peer_access and blocks is not None and blocks.open_all()
    memory = ranks.map_memory(_GRANULE + (0 if trusted else size * ranks.ranks))
    if blocks is not None:
        blocks.register(memory)
    if blocks is not None and trusted:
        addresses = blocks.addresses
    else:
        log.info("ranks exchange through host memory")
        addresses = [host_address(memory) + _GRANULE + rank * size for rank in range(ranks.ranks)]
    own = _view_memory(addresses[ranks.rank], size, device)
    failed = torch.frombuffer(memory, dtype=torch.int32, count=1)
    given = torch.tensor(addresses, dtype=torch.int64, device=device)
    return PeerMemory(ranks.rank, ranks.ranks, given, own, failed, trusted, lambda: blocks.close() if blocks else None)


class _DeviceArray:
    """Bytes that kernels reach, as the CUDA Array Interface tells of them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _view_memory(address: int, size: int, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.as_tensor(_DeviceArray(address, size), device=device)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


class _Blocks:
    """Device memory of all ranks in this rank's context, which is current."""

    def __init__(self, ranks: RankExchange, size: int, driver: Any) -> None:
        self._ranks, self._size, self._driver = ranks, size, driver
        self.addresses: list[int] = []
        self._registered: memoryview | None = None

    def open_all(self) -> bool:
        """Open every rank's block and tell whether all ranks can write and read all of them."""
        ranks, address, handle = self._ranks, ctypes.c_uint64(), _IpcHandle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self._size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(self._size))
        self._call("cuCtxSynchronize")
        self.addresses = [0] * ranks.ranks
        self.addresses[ranks.rank] = address.value
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except RuntimeError as error:
            log.warning("%s", error)
        for rank, found in enumerate(ranks.share_bytes(bytes(handle))):
            if rank != ranks.rank:
                self.addresses[rank] = self._open(found)
        if not self._all_agree(all(self.addresses)):
            return self._give_up()
        right = self._write_patterns() and self._read_patterns()
        trusted = self._all_agree(right)  # behind it, nobody reads a pattern any more
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(self._size))
        self._call("cuCtxSynchronize")
        return self._all_agree(trusted) or self._give_up()

    def _give_up(self) -> bool:
        log.warning("GPUs do not reach each other's memory; exchanges of ranks are slower")
        self.close()
        return False

    def register(self, memory: memoryview) -> None:
        """Pin `memory`, so that kernels reach it by its host address. Raises EnvironmentUnfitError."""
        at, address = host_address(memory), ctypes.c_uint64()
        self._registered = memory
        try:
            flags = ctypes.c_uint(_PORTABLE_MAPPED)
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(at), ctypes.c_size_t(memory.nbytes), flags)
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), ctypes.c_void_p(at), ctypes.c_uint(0))
            if address.value != at:
                raise RuntimeError("a GPU has another address for pinned memory")
        except RuntimeError as error:
            raise EnvironmentUnfitError(
                f"Ranks have no memory to exchange rows in: {error}.", fix="ulimit -l unlimited."
            ) from error

    def close(self) -> None:
        """Give all memory back. No kernel may run, here or on peers."""
        if self._registered is not None:
            self._call("cuMemHostUnregister", ctypes.c_void_p(host_address(self._registered)))
            self._registered = None
        for rank, address in enumerate(self.addresses):
            if address:
                name = "cuMemFree_v2" if rank == self._ranks.rank else "cuIpcCloseMemHandle"
                self._call(name, ctypes.c_uint64(address))
        self.addresses = []

    def _open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        if not any(handle):
            return 0
        try:
            given = _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), *given)
        except RuntimeError as error:
            log.warning("%s", error)
        return int(address.value)

    def _all_agree(self, right: bool) -> bool:
        return all(map(any, self._ranks.share_bytes(bytes([right]))))

    def _make_pattern(self, rank: int, peer: int) -> bytes:
        return bytes((rank * 89 + peer * 57 + i * 31 + (i >> 8)) & 0xFF for i in range(PATTERN_BYTES))

    def _write_patterns(self) -> bool:
        """Write this rank's pattern from its own block, by its own GPU, to its place in every block."""
        ranks, at = self._ranks, self._ranks.rank * PATTERN_BYTES
        scratch = ctypes.c_uint64(self.addresses[ranks.rank] + self._size - PATTERN_BYTES)
        for peer, address in enumerate(self.addresses):
            data, size = self._make_pattern(ranks.rank, peer), ctypes.c_size_t(PATTERN_BYTES)
            self._call("cuMemcpyHtoD_v2", scratch, data, size)
            self._call("cuMemcpyDtoD_v2", ctypes.c_uint64(address + at), scratch, size)
            self._call("cuCtxSynchronize")
        return self._all_agree(right=True)

    def _read_patterns(self) -> bool:
        """Read every rank's pattern in every block."""
        size, right = ctypes.c_size_t(PATTERN_BYTES), True
        scratch = ctypes.c_uint64(self.addresses[self._ranks.rank] + self._size - PATTERN_BYTES)
        for peer, address in enumerate(self.addresses):
            for rank in range(self._ranks.ranks):
                found = ctypes.create_string_buffer(PATTERN_BYTES)
                self._call("cuMemcpyDtoD_v2", scratch, ctypes.c_uint64(address + rank * PATTERN_BYTES), size)
                self._call("cuMemcpyDtoH_v2", found, scratch, size)
                right &= found.raw == self._make_pattern(rank, peer)
        return right

    def _call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._driver, name)(*arguments))
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")
