"""Sums that the caller gives no place: their memory is used again once nobody holds it.

Malloc may take the memory of a large one from the kernel, and give it back, in every step: new pages cost up to a
quarter of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch

from ...substrate.control import SETS

MOST_KEPT = SETS + 1
"""Results of both open steps, and one that the caller still reads."""

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)

Kind = tuple[int, torch.dtype]
"""Rows ``T`` and their type."""


class Kept:
    """A tensor that callers have only as others over its memory."""

    __slots__ = ("at", "base", "kind", "names", "number", "storage", "tensors")

    number: int

    def __init__(self, kind: Kind, hidden: int) -> None:
        self.kind = kind
        with torch.inference_mode(False):  # it outlasts the caller's mode
            self.base = torch.empty(kind[0], hidden, dtype=kind[1], device="cpu")
        self.storage, self.at = self.base.untyped_storage(), self.base.data_ptr()
        self.number = self.storage._cdata
        # Tensors that there are, such as views and what autograd saved or NumPy borrowed; names of the storage itself.
        self.tensors, self.names = _use_count(self.number), getrefcount(self.storage)

    def is_free(self) -> bool:
        """Whether nobody holds its memory, nor has moved it."""
        return (
            _use_count(self.number) == self.tensors
            and getrefcount(self.storage) == self.names
            and self.base.data_ptr() == self.at
        )


class Results:
    """Args: hidden: ``H``."""

    def __init__(self, hidden: int) -> None:
        self._hidden, self._most_kept = hidden, MOST_KEPT if can_tell() else 0
        self._kept: list[Kept] = []  # the last used at the end

    def maker(self, count: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """What makes a tensor ``[count, H]``, the caller's own."""
        return functools.partial(self._make, (count, dtype))

    def close(self) -> None:
        """Keep nothing from now on. What callers hold stays theirs."""
        self._most_kept = 0
        self._kept.clear()

    def _make(self, kind: Kind) -> torch.Tensor:
        kept, passed = self._kept, []
        try:
            while True:
                one = kept.pop()  # so that no other thread looks at it meanwhile
                if one.kind == kind and one.is_free():
                    break
                passed.append(one)
        except IndexError:
            if not self._most_kept:
                return torch.empty(kind[0], self._hidden, dtype=kind[1], device="cpu")
            one = Kept(kind, self._hidden)
        made = one.base.data
        if passed:
            kept.extend(reversed(passed))
        kept.append(one)
        if len(kept) > self._most_kept:
            del kept[: len(kept) - self._most_kept]
        return made


@functools.cache
def can_tell() -> bool:
    """Whether this torch says who holds a storage, which is no part of its documented interface."""
    try:
        kept = Kept((2, torch.float32), 1)
        free = [kept.is_free()]
        made = kept.base.data
        free.append(not kept.is_free())
        view = made[1:]
        del made
        free.append(not kept.is_free())
        storage = view.untyped_storage()
        del view
        free.append(not kept.is_free())
        del storage
        free.append(kept.is_free())
        return all(free)
    except (AttributeError, RuntimeError, TypeError):
        return False
