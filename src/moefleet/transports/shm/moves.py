"""What a step does with routing and rows: the movements, behind one interface, in C or in numpy and torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...config import FleetParams
from ...placement import Placement
from ...substrate.routes import Homecoming, Ints
from .buffers import BufferSet, I
from .quick import Tokens

Ranks: TypeAlias = "Sequence[int] | Tokens"
"""``[W]`` numbers, one for each rank."""


class Routing:
    """A handle's copy of its routing.

    Args:
        shape: ``[T, K]``.

    Attributes:
        ids, weights: int32 and float32 ``[T, K]``, the same memory for a handle's life; undefined before :meth:`read`.
        ids_at, weights_at: their addresses.
        back: where the sums will be, beside the owners of experts that this follows from; ``None``: not known yet.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape
        self._both = torch.empty(2, *shape, dtype=torch.int32)
        self.ids_at = self._both.data_ptr()
        self.weights_at = self.ids_at + self._both.nbytes // 2
        self.back: tuple[Ints, Homecoming] | None = None

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._both[0].numpy()

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        return self._both[1].numpy().view(np.float32)

    def read(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Copy routing of this shape, of any integer and floating type."""
        self.ids[:], self.weights[:] = ids.numpy(), weights.numpy()
        self.back = None


class Moves(ABC, Generic[I]):
    """The movements between a rank's own tensors and the segments of all. Each takes the step's buffer set.

    Args:
        params, placement, rank: the Fleet's.
        owners: int64 ``[E+1]``: the rank that holds an expert, or -1; the last entry is for id -1.

    Attributes:
        local: int64 ``[E+1]``: this rank's local index of an expert, or -1; the last entry is for id -1.
        rows_received, rows_sent: int64 ``[W]``, since construction.
    """

    in_c: ClassVar[bool]
    """Whether the compiled helper does the work."""

    def __init__(self, params: FleetParams, placement: Placement, rank: int, owners: Ints) -> None:
        world = placement.world_size
        self._params, self._world, self._everybody = params, world, (1 << world) - 1
        self.owners, self.local = owners, np.append(placement.local_table(rank).numpy(), -1)
        self.rows_received, self.rows_sent = np.zeros(world, np.int64), np.zeros(world, np.int64)

    @abstractmethod
    def tokens_per_expert(self) -> list[int]:
        """``[L]`` rows that each local expert was given since construction."""

    def set_owners(self, owners: Ints) -> None:
        """Who serves from now on: other ranks are masked now."""
        self.owners = owners

    def read(self, routing: Routing, ids: torch.Tensor, weights: torch.Tensor) -> bool:
        """Check and copy in one go plain ids ``[T, K]`` (int32 or int64) and float32 weights ``[T, K]``.

        Returns:
            Whether it was done. If not, nothing has changed, and the long way finds out whether something is wrong.
        """
        return False

    @abstractmethod
    def store(self, at: BufferSet, tokens: torch.Tensor | None, scales: torch.Tensor | None, routing: Routing) -> None:
        """Put this rank's tokens ``[T, H]``, scales ``[T, any]`` and routing where all can read them.

        Tokens that :meth:`push` places are left out.
        """

    def push(self, at: BufferSet, tokens: torch.Tensor, routing: Routing, before: Ranks, to: int) -> None:
        """Place tokens ``[T, H]`` where their receivers hand them out. All ranks of such a Fleet have the helper.

        Args:
            before: ``[W]`` tokens of the ranks below this one, 0 for who is absent; not looked at in RANK_MAJOR.
            to: the ranks that are brought rows, as bits.
        """
        raise NotImplementedError("rows are placed only where all ranks have the compiled helper")

    @abstractmethod
    def arrive(self, at: BufferSet, inbox: I, tokens: Ranks, placed: Ranks, present: int, topk: int) -> int:
        """Find the rows that are for this rank, and say how many they are.

        Args:
            tokens: ``[W]`` of each rank, 0 for who is absent.
            placed: ``[W]`` whether a rank places its rows in the inbox itself.
            present: who takes part, as bits.
        """

    @abstractmethod
    def gather(self, at: BufferSet, inbox: I, dtype: torch.dtype, step: int) -> None:
        """Bring the rows of ``step`` that :meth:`arrive` found, which must fit, and count them."""

    def making(self, step: int) -> int:
        """Which of :attr:`Buffers.made` is for what experts make of ``step``, once its rows were gathered."""
        raise NotImplementedError("there is such memory only where all ranks have the compiled helper")

    @abstractmethod
    def give(self, at: BufferSet, inbox: I, rows: torch.Tensor) -> int:
        """Put the experts' rows, of ``expert_tensors``' shape, where their tokens' ranks find them: in EXPERT_MAJOR
        the weighted sum of each token's, elsewhere the rows themselves.

        Returns:
            0, or in EXPERT_MAJOR, where the rows stayed for ranks that placed their tokens, 1 and the number of the
            :attr:`Buffers.made` that they are in."""

    @abstractmethod
    def sum(
        self,
        at: BufferSet,
        routing: Routing,
        present: int,
        placed: Ranks,
        dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int | None]:
        """Sum what all ranks made of this rank's tokens.

        Args:
            present: who took part, as bits.
            placed: ``[W]`` what :meth:`give` said at each rank.
            out: ``[T, H]`` that may be written; the result may lie elsewhere all the same.

        Returns:
            ``[T, H]``, and the first of the ranks that are left out because they served other tokens than ours, that
            is, took this rank for missing; ``None`` where there is none.
        """
