"""Which rank holds which expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .errors import config_error

NO_OWNER = -1


@dataclass(frozen=True)
class Placement:
    """Experts sit in contiguous blocks of physical slots, one block per rank, in rank order.

    Args:
        num_experts: ``E`` logical experts, the ids that a router emits.
        slots_per_rank: physical slots (local experts ``L``) of each rank; a rank may hold none.
        physical: for each logical expert its physical slot, or ``-1`` if nobody holds it (its ids then count as
            ``-1``); ``None`` means that logical expert ``e`` sits in slot ``e``.

    Raises:
        MoEEpConfigError: slots and experts do not fit together.
    """

    num_experts: int
    slots_per_rank: tuple[int, ...]
    physical: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.slots_per_rank):
            raise config_error("Placement.slots_per_rank", self.slots_per_rank, "0 or more slots on each rank")
        slots = sum(self.slots_per_rank)
        if self.physical is None:
            if slots != self.num_experts:
                raise config_error(
                    "Placement.slots_per_rank",
                    f"{slots} slots in all",
                    f"{self.num_experts}, one for each expert",
                    "give `physical` for any other arrangement",
                )
            return
        if len(self.physical) != self.num_experts:
            raise config_error("Placement.physical", f"{len(self.physical)} entries", f"{self.num_experts}")
        held = [slot for slot in self.physical if slot != NO_OWNER]
        if any(not 0 <= slot < slots for slot in held) or len(set(held)) != len(held):
            raise config_error("Placement.physical", self.physical, f"-1, or distinct slots from 0 to {slots - 1}")

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int) -> Placement:
        """Blocks as equal as can be: when ``E % W != 0`` the first ``E % W`` ranks hold one more."""
        base, extra = divmod(num_experts, world_size)
        return cls(num_experts, tuple(base + (rank < extra) for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        """``W``: ranks, those without experts included."""
        return len(self.slots_per_rank)

    def first_slot(self, rank: int) -> int:
        """Physical slot at which this rank's block begins."""
        return sum(self.slots_per_rank[:rank])

    def num_local(self, rank: int) -> int:
        """``L``: experts that this rank holds."""
        return self.slots_per_rank[rank]

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Logical expert of each local index of this rank (``-1`` for a slot that no expert uses)."""
        first, count = self.first_slot(rank), self.slots_per_rank[rank]
        if self.physical is None:
            return tuple(range(first, first + count))
        logical = {slot: expert for expert, slot in enumerate(self.physical) if slot != NO_OWNER}
        return tuple(logical.get(slot, NO_OWNER) for slot in range(first, first + count))

    def owner_of(self, expert: int) -> int:
        """Rank that holds this logical expert, or ``-1`` (also for "no expert", ``-1``)."""
        return NO_OWNER if expert < 0 else int(self.owner_table[expert])

    @cached_property
    def physical_table(self) -> torch.Tensor:
        """int64 ``[E]``: physical slot of each logical expert, ``-1`` if nobody holds it."""
        return (
            torch.arange(self.num_experts) if self.physical is None else torch.tensor(self.physical, dtype=torch.int64)
        )

    @cached_property
    def owner_table(self) -> torch.Tensor:
        """int64 ``[E]``: rank that holds each logical expert, ``-1`` if nobody does."""
        ranks = torch.repeat_interleave(torch.arange(self.world_size), torch.tensor(self.slots_per_rank))
        physical = self.physical_table
        return torch.where(physical >= 0, ranks[physical.clamp(min=0)] if len(ranks) else physical, NO_OWNER)

    def local_table(self, rank: int) -> torch.Tensor:
        """int64 ``[E]``: local index on ``rank`` of each logical expert, ``-1`` where it is not there."""
        local = self.physical_table - self.first_slot(rank)
        return torch.where((local >= 0) & (local < self.num_local(rank)), local, NO_OWNER)
