"""The structs of ``moefleet.h``, field by field, and the calls with their arguments' types."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char_p, c_double, c_int64, c_void_p
from typing import Any, ClassVar

SETS, OPERATIONS = 2, 5

_Each = c_int64 * SETS


class SentStruct(ctypes.Structure):
    """What a rank notes of the rows that it brought to experts; see ``moefleet.h``."""

    _fields_ = (("bag", c_void_p), ("rank", c_void_p), ("place", c_void_p), ("weight", c_void_p))


class FleetStruct(ctypes.Structure):
    """All ranks' segments, and what never changes in a Fleet's life; see ``moefleet.h``."""

    _fields_: ClassVar[Any] = (
        ("base", c_void_p), ("stride", c_int64),
        ("rank", c_int64), ("world", c_int64), ("most", c_int64), ("topk", c_int64),
        ("hidden", c_int64), ("row_bytes", c_int64), ("scale_bytes", c_int64),
        ("experts", c_int64), ("locals", c_int64),
        ("layout", c_int64), ("block", c_int64),
        ("home_rows", c_int64),
        ("ids", _Each), ("weights", _Each), ("offsets", _Each), ("scales", _Each), ("tokens", _Each),
        ("combined", _Each),
        ("bound", _Each),
        ("made", _Each), ("landing", _Each), ("making", _Each), ("making_step", c_int64),
        ("sent", SentStruct * SETS), ("gathered", c_void_p), ("pushed", _Each),
        ("used", _Each),
        ("local", c_void_p),
        ("owner", c_void_p), ("slot", c_void_p), ("order", c_void_p), ("ordered", c_void_p), ("sums", c_void_p),
        ("next", c_void_p), ("stamp", c_void_p),
        ("rows_received", c_void_p), ("rows_sent", c_void_p), ("expert_rows", c_void_p),
        ("stream_bytes", c_int64),
        ("ties_away", c_int64),
        ("flags", _Each * OPERATIONS), ("headers", _Each * OPERATIONS),
        ("generation", c_int64), ("early", c_int64), ("tolerant", c_int64), ("crowded", c_int64),
        ("spin_s", c_double),
        ("waited", c_void_p), ("said_tokens", c_void_p), ("said_placed", c_void_p),
    )  # fmt: skip


class InboxStruct(ctypes.Structure):
    """Memory that a step's rows are received into, and how they are sorted; see ``moefleet.h``."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("rows", "scales", "counts", "ids", "weights", "shown")
    ) + (("total", c_int64), ("topk", c_int64), ("entered", c_int64)) + tuple(
        (name, c_void_p)
        for name in (
            "brought", "placed", "bounds", "token", "bag", "position", "weight", "expert_rows", "local", "expert",
            "sum",
        )
    )  # fmt: skip


class PartStruct(ctypes.Structure):
    """What a rank brings to a step, but for what is new in each; see ``moefleet.h``."""

    _fields_: ClassVar[Any] = (
        ("inbox", c_void_p), ("ids", c_void_p), ("weights", c_void_p),
        ("count", c_int64), ("topk", c_int64),
        ("pitch", c_int64), ("dtype", c_int64),
        ("scales", c_void_p), ("scale_pitch", c_int64),
        ("placed", c_int64), ("expected", c_int64),
        ("made_type", c_int64), ("made_pitch", c_int64), ("made_dtype", c_int64),
    )  # fmt: skip


CALL, READ = struct.Struct("6q32s32s"), struct.Struct("7q")
"""What ``dispatch`` and ``combine``, and ``read``, take as bytes; see ``moefleet.h``."""

CALLS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "read": (c_int64, (c_char_p,)),
    "store": (None, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "push": (None, (c_void_p, c_int64, c_void_p, c_char_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "arrive": (c_int64, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "gather": (None, (c_void_p, c_void_p, c_int64)),
    "give": (c_int64, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64)),
    "sum": (c_int64, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_char_p, c_void_p, c_void_p)),
    "commit": (None, (c_void_p, *(c_int64,) * 7, c_char_p)),
    "collect": (c_int64, (c_void_p, c_int64, c_int64, c_char_p)),
    "give_way": (c_int64, (c_void_p, c_int64, c_char_p)),
    "dispatch": (c_int64, (c_char_p,)),
    "combine": (c_int64, (c_char_p,)),
    "copy_rows": (
        c_int64,
        (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    ),
    "sum_bags": (
        c_int64,
        (c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, *(c_int64,) * 3),
    ),
    "experts": (
        c_int64,
        (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, *(c_int64,) * 4, *(c_void_p,) * 4)
        + (c_double, c_double, c_double, c_int64, c_void_p),
    ),
    "sizes": (c_int64, (c_int64,)),
}
"""What ``moefleet_<name>`` returns and takes; the sources say what it does."""


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes of all calls.

    Raises:
        OSError: the library was built from other sources than these.
    """
    for name, (result, arguments) in CALLS.items():
        try:
            call = getattr(library, f"moefleet_{name}")
        except AttributeError as error:
            raise OSError(f"it has no moefleet_{name}") from error
        call.restype, call.argtypes = result, arguments
    sizes = {each.__name__: ctypes.sizeof(each) for each in (FleetStruct, InboxStruct, PartStruct)}
    for which, (name, size) in enumerate({**sizes, "Call": CALL.size, "Read": READ.size}.items()):
        if library.moefleet_sizes(which) != size:
            raise OSError(f"its {name} has another size")
    return library
