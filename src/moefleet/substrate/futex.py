"""Sleeping on a word of shared memory, and ordering stores around it (Linux, x86-64 and arm64).

A flag is a 64-bit word that only grows; its low half is the futex. One aligned 8-byte store commits everything
written before it, provided that :func:`fence` stands between; a reader calls it between the flag and the data.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

from ..errors import MoEEpArchError, MoEEpTransportError

_MACHINE = platform.machine().lower()
_SYSCALLS = {"x86_64": {"futex": 202, "membarrier": 324}, "aarch64": {"futex": 98, "membarrier": 283}}
_NUMBERS = _SYSCALLS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(_MACHINE, _MACHINE), {})
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
_MEMBARRIER_GLOBAL_EXPEDITED = 2
_EAGAIN, _EINTR, _ETIMEDOUT = 11, 4, 110


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def unsupported_reason() -> str:
    """Why this machine cannot wait on shared memory, or an empty string."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"needs Linux with memfd_create, this is {sys.platform}"
    if not _NUMBERS or sys.byteorder != "little":
        return f"needs x86-64 or arm64, this is {_MACHINE}"
    if not _is_tso() and _raw("membarrier", _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0) != 0:
        return "needs the membarrier system call, which this kernel or sandbox refuses"
    return ""


if _NUMBERS and sys.platform.startswith("linux"):
    _libc = ctypes.CDLL(None, use_errno=True)
    _futex = ctypes.CFUNCTYPE(
        ctypes.c_long,
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
        ctypes.c_void_p,
        ctypes.c_int,
        use_errno=True,
    )(("syscall", _libc))


def _raw(name: str, *args: int) -> int:
    return int(_libc.syscall(_NUMBERS[name], *args))


def _is_tso() -> bool:
    return _MACHINE in ("x86_64", "amd64")


def _membarrier() -> None:
    # A full barrier for the caller. Nobody registers for it, so no other processor is interrupted.
    if _raw("membarrier", _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise MoEEpTransportError("membarrier", ctypes.get_errno(), "ordering shared-memory stores")


def _nothing() -> None:
    # x86-64 keeps stores in order among themselves, and loads likewise, which is all that commit flags need.
    return


_never_held = threading.Lock()


def _locked_instruction() -> None:
    with _never_held:
        pass


fence = _nothing if _is_tso() else _membarrier
full_fence = _locked_instruction if _is_tso() else _membarrier
"""Also keeps a load behind an earlier store, which x86-64 does only across a locked instruction."""


def futex_wait(address: int, expected: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at ``address`` equals the low half of ``expected``, at most ``timeout_s``.

    Returns early for any wake-up, also a spurious one: the caller looks at the flag again.
    """
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    if _futex(_NUMBERS["futex"], address, _WAIT, expected & 0xFFFFFFFF, limit, None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (_EAGAIN, _EINTR, _ETIMEDOUT):
            raise MoEEpTransportError("futex", code, "waiting for a peer", os.strerror(code))


def futex_wake(address: int) -> None:
    """Wake everybody, in any process, who sleeps on the 32-bit word at ``address``."""
    _futex(_NUMBERS["futex"], address, _WAKE, _EVERYBODY, None, None, 0)


def require_supported() -> None:
    """Raise :class:`MoEEpArchError` with the reason where shared-memory waiting does not work."""
    if reason := unsupported_reason():
        raise MoEEpArchError(f"shared memory transport: {reason}")
