"""Memory for sums that the caller gives no place: used again, as new pages cost a fifth of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...substrate.control import SETS

LEAST_BYTES = 1 << 17
"""Of less malloc has memory at hand; more it may get from the kernel, and give back, each time."""

Array: TypeAlias = npt.NDArray[Any]

MOST_SPARE = SETS + 1
"""Results of both open steps, and one that the caller still reads."""

MOST_TOO_LARGE = 2
"""How many times as large as it need be memory may be: who keeps a small result does not keep a large one's."""


class Results:
    """Args: hidden: ``H``."""

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._most_spare = MOST_SPARE
        self._spare: dict[int, Array] = {}  # by id, the oldest first
        self._lent: dict[int, tuple[weakref.ref[Array], Array]] = {}

    def maker(self, count: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """What makes a tensor ``[count, H]``, the caller's own. Its memory is used again once no tensor holds it, and
        where it is much cannot be resized."""
        if count * self._hidden * dtype.itemsize >= LEAST_BYTES:
            return partial(self._make, count, dtype)
        like = torch.empty(1, dtype=dtype, device="cpu").expand(count, self._hidden)  # nothing makes another as quickly
        return partial(torch.empty_like, like)

    def _make(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = self._memory(count * self._hidden * dtype.itemsize)
        kind = np.float32 if dtype is torch.float32 else np.int16  # which has no type for bfloat16
        lent = np.ndarray((count, self._hidden), kind, memory)  # lives as long as the storage
        loan = weakref.ref(lent, self._come_back)
        self._lent[id(loan)] = loan, memory
        made = torch.from_numpy(lent)
        return made if dtype is torch.float32 else made.view(dtype)

    def close(self) -> None:
        """Keep no memory from now on. What is lent stays the callers'."""
        self._most_spare = 0
        self._spare.clear()

    def _memory(self, size: int) -> Array:
        """At least this many bytes."""
        for key, memory in reversed(list(self._spare.items())):
            if size <= memory.nbytes <= MOST_TOO_LARGE * size and self._spare.pop(key, None) is not None:
                return memory
        return torch.empty(size + size // 8, dtype=torch.uint8, device="cpu").numpy()

    def _come_back(self, loan: weakref.ref[Array]) -> None:
        """In whatever thread lets go of the last tensor."""
        _, memory = self._lent.pop(id(loan))
        self._spare[id(memory)] = memory
        for key in list(self._spare)[: max(0, len(self._spare) - self._most_spare)]:
            self._spare.pop(key, None)
