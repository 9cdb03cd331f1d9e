"""GPU memory that every rank of a group maps: torch's symmetric memory, found through a store, without multicast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SymmetricMemory:
    """One allocation per rank, all of one size.

    Attributes:
        own: this rank's memory, bytes, zeroed.
        addresses: where each rank's memory is mapped here.
        mapping: keeps the peers' memory mapped; they may be gone.
    """

    own: torch.Tensor
    addresses: tuple[int, ...]
    mapping: Any

    @classmethod
    def allocate(
        cls, size: int, device: torch.device, *, rank: int, world_size: int, store: Any, name: str
    ) -> SymmetricMemory:
        """Allocate ``size`` bytes here and map everybody's. All ranks call this; they meet in ``store``.

        Args:
            store: a ``torch.distributed.Store`` of these ranks alone.
            name: of the group, the same on all ranks and never used before.
        """
        if world_size == 1:
            own = torch.zeros(size, dtype=torch.uint8, device=device)
            return cls(own, (own.data_ptr(),), None)
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory
        from torch.distributed import _symmetric_memory as symmetric

        # A process group without a backend: all that is wanted of it is its store.
        group = ProcessGroup(store, rank, world_size)
        group._set_group_name(name)  # type: ignore[arg-type, unused-ignore]  # a str in some versions
        _register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]
        _SymmetricMemory.set_group_info(name, rank, world_size, store)
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        own.zero_()
        torch.cuda.synchronize(device)
        mapping = _SymmetricMemory.rendezvous(own, name)
        return cls(own, tuple(mapping.buffer_ptrs), mapping)
