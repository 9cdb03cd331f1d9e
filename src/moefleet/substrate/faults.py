"""What a rank holds of the others since the last decision: who is masked, who it accuses, and whether it is behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class FaultState:
    """Accusations are this rank's own and local; masks are decided by all. A rank never accuses or masks itself.

    Attributes:
        rank, world_size: this rank in the group.
        tolerant: whether a missing peer ends a wait (it is accused) or raises.
        everybody: all ranks, as bits.
        epoch: number of the last decision adopted.
        mask: the mask in force, as bits: bit ``r`` set where rank ``r`` is active.
        accused: ranks that this one gave up on, as bits.
        behind: the others were seen to have decided, or to accuse, more than this rank knows.
        evicted: the others go on without this rank.
    """

    rank: int
    world_size: int
    tolerant: bool = False
    epoch: int = 0
    accused: int = 0
    behind: bool = False
    evicted: bool = False
    everybody: int = field(init=False)
    mask: int = field(init=False)

    def __post_init__(self) -> None:
        self.everybody = self.mask = (1 << self.world_size) - 1

    @property
    def trusted(self) -> int:
        """Active and not accused, as bits: what this rank's headers say."""
        return self.mask & ~self.accused

    def trusts(self, rank: int) -> bool:
        return bool(self.trusted >> rank & 1)

    def active(self) -> list[int]:
        """The mask in force, ``[W]``, 1 = active."""
        return [self.mask >> rank & 1 for rank in range(self.world_size)]

    @property
    def fault(self) -> bool:
        """Whether something happened that the last decision does not account for."""
        return self.behind or bool(self.accused & self.mask)

    def accuse(self, rank: int) -> None:
        if rank != self.rank:
            self.accused |= 1 << rank

    def heard(self, epoch: int, trusted: int) -> None:
        """A peer's header: learn that there is a fault, never whom to mask. Older rounds say nothing."""
        if epoch > self.epoch or (epoch == self.epoch and self.trusted & ~trusted):
            self.behind = True

    def forgive(self) -> None:
        """Forget accusations, and being behind."""
        self.accused, self.behind = 0, False

    def adopt(self, epoch: int, mask: Iterable[int]) -> None:
        """Take over a decision. Accusations of ranks that it masks are settled, and so is being behind."""
        self.epoch, self.mask = epoch, sum(bool(bit) << rank for rank, bit in enumerate(mask))
        self.accused &= self.mask
        self.behind = False
        self.evicted = not self.mask >> self.rank & 1
