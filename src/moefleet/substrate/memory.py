"""Segments of shared memory that no file system ever sees, mapped side by side into one address range.

Each rank owns one memfd segment and is the only one that can write it: peers map it read-only, but for a part at its
end, if they agreed on one, in which each of them writes only what is its own. The mappings of all ranks lie at a fixed
stride, so one tensor spans them all and an index reaches any row of any rank.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import MoEEpTransportError, config_error

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE_PAGE = 1 << 21
_MOST_ADDRESSES = 1 << 44
_FAILED = ctypes.c_void_p(-1).value
_V2, _V1 = "/sys/fs/cgroup/memory.", "/sys/fs/cgroup/memory/memory."
_CONTROL_GROUPS = (
    (f"{_V2}max", f"{_V2}current", f"{_V2}stat", ("active_file", "inactive_file")),
    (f"{_V1}limit_in_bytes", f"{_V1}usage_in_bytes", f"{_V1}stat", ("total_active_file", "total_inactive_file")),
)
"""Of a control group: the limit, what is used, the statistics, and what in them the kernel could drop at once."""


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    got = libc.mmap(address, size, protection, flags, fd, offset)
    if got == _FAILED or got is None:
        code = ctypes.get_errno()
        raise MoEEpTransportError("mmap", code, f"mapping {size} bytes of shared memory", os.strerror(code))
    return int(got)


def _munmap(address: int, size: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


def advise(address: int, size: int, advice: int) -> None:
    """Give advice on the whole pages of a stretch of memory. What the kernel makes of it is its own affair."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Let fresh private memory be backed by huge pages as it is touched."""
    advise(tensor.data_ptr(), tensor.nbytes, _MADV_HUGEPAGE)
    return tensor


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's if that is less."""
    free = math.inf
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    for limit, used, stat, reclaimable in _CONTROL_GROUPS:
        try:
            with open(limit) as most, open(used) as now, open(stat) as lines:
                pages = dict(line.split() for line in lines)
                # Files that were read stay in memory until it is needed: they count as used, and are not.
                cached = sum(int(pages.get(kind, 0)) for kind in reclaimable)
                free = min(free, int(most.read()) - int(now.read()) + cached)
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return int(free) if free != math.inf else 2**62


def create_segment(size: int, *, on_this_host: int, spare: int = 0) -> int:
    """A memfd of ``size`` bytes whose pages are all taken now, so that no later store can fail. Returns its fd.

    Args:
        size: bytes of this rank's segment.
        spare: bytes after them whose pages are taken when they are first touched, as those of private memory.
        on_this_host: how many ranks of this host allocate as much at the same time.

    Raises:
        MoEEpConfigError: the host has less memory available than the ranks need together.
    """
    need, free = size * on_this_host, available_bytes()
    if need > free:
        raise config_error(
            "shared memory",
            f"{need} bytes needed ({on_this_host} ranks x {size})",
            f"{free} bytes available",
            "lower max_tokens_per_rank or max_recv_tokens_per_rank, or free memory",
        )
    fd = os.memfd_create("moefleet", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size + spare)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise config_error(
            "shared memory", f"{size} bytes needed", f"{available_bytes()} bytes available", str(error)
        ) from error
    return fd


@dataclass(frozen=True)
class AddressRange:
    """All ranks' segments in one stretch of addresses, ``stride`` bytes apart, in rank order.

    ``buffer`` keeps the mapping: it ends when the last tensor or view over it is gone.
    """

    buffer: ctypes.Array[ctypes.c_char]
    address: int
    stride: int

    @classmethod
    def map(cls, fds: Sequence[int], own: int, size: int, align: int, open_from: int | None = None) -> AddressRange:
        """Map segment ``fds[own]`` writable and the others read-only, at a stride that divides by ``align`` bytes.

        Args:
            open_from: where a part of all segments begins that can be written too, at a page; ``None``: there is none.
        """
        step = math.lcm(_HUGE_PAGE, align)
        if step * len(fds) > _MOST_ADDRESSES:
            step = math.lcm(mmap.PAGESIZE, align)
        stride = -(-size // step) * step
        total = stride * len(fds) + _HUGE_PAGE
        start = _mmap(None, total, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        base = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        try:
            for rank, fd in enumerate(fds):
                at, how = base + rank * stride, mmap.MAP_SHARED | _MAP_FIXED
                _mmap(at, size, mmap.PROT_READ | (mmap.PROT_WRITE if rank == own else 0), how, fd)
                if rank != own and open_from is not None and open_from < size:
                    both = mmap.PROT_READ | mmap.PROT_WRITE
                    _mmap(at + open_from, size - open_from, both, how, fd, open_from)
        except BaseException:
            _munmap(start, total)
            raise
        buffer = (ctypes.c_char * (stride * len(fds))).from_address(base)
        weakref.finalize(buffer, _munmap, start, total).atexit = False
        return cls(buffer, base, stride)

    def use_huge_pages(self, rank: int, size: int) -> None:
        """Gather the pages of a rank's segment into huge ones, where the kernel can: steps then miss the TLB less."""
        advise(self.address + rank * self.stride, size, _MADV_COLLAPSE)

    def words(self) -> memoryview:
        """Every aligned 8-byte word of the range, as unsigned integers. One item access is one load or one store."""
        return memoryview(self.buffer).cast("B").cast("Q")

    def rows(self, dtype: torch.dtype, width: int) -> torch.Tensor:
        """The whole range as rows of ``width`` elements: ``[total_bytes / row_bytes, width]``."""
        return torch.frombuffer(self.buffer, dtype=dtype).view(-1, width)
