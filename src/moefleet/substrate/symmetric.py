"""GPU memory that every rank of a group maps: torch's symmetric memory, found through a store, without multicast."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SymmetricMemory:
    """One allocation per rank, all of one size.

    Attributes:
        own: this rank's memory, bytes, zeroed.
        addresses: where each rank's memory is mapped here.
        mapping: keeps the peers' memory mapped; they may be gone. Dropping it lets go.
    """

    own: torch.Tensor
    addresses: tuple[int, ...]
    mapping: Any

    @staticmethod
    def allocate(size: int, device: torch.device, world_size: int) -> torch.Tensor:
        """This rank's ``size`` bytes, all 0, which :meth:`map` can share."""
        if world_size == 1:
            return torch.zeros(size, dtype=torch.uint8, device=device)
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        own.zero_()
        torch.cuda.synchronize(device)
        return own

    @classmethod
    def map(cls, own: torch.Tensor, *, rank: int, world_size: int, store: Any, name: str) -> SymmetricMemory:
        """Map everybody's memory. All ranks call this once all have theirs, and wait for one another in ``store``.

        Args:
            own: of :meth:`allocate`.
            store: a ``torch.distributed.Store`` of these ranks alone, for this allocation alone.
            name: of the group, the same on all ranks.
        """
        if world_size == 1:
            return cls(own, (own.data_ptr(),), None)
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

        # A process takes a name once in its life, whatever stores its Fleets met in.
        if rank == 0:
            store.set("symmetric memory", secrets.token_hex(8))
        name = f"{name}-{store.get('symmetric memory').decode()}"
        # A process group without a backend: all that is wanted of it is its store.
        counting = CountingFromZero(store)
        group = ProcessGroup(counting, rank, world_size)
        group._set_group_name(name)  # type: ignore[arg-type, unused-ignore]  # a str in some versions
        _register_process_group(name, group)  # type: ignore[arg-type, unused-ignore]
        _SymmetricMemory.set_group_info(name, rank, world_size, counting)
        # Who waits here for a rank that failed can be left alone. In torch's rendezvous it would keep a socket, whose
        # name is the process's, from the next one.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{peer}" for peer in range(world_size)])
        mapping = _SymmetricMemory.rendezvous(own, name)
        return cls(own, tuple(mapping.buffer_ptrs), (mapping, counting))


class CountingFromZero(dist.Store):
    """A store for one group's exchanges, numbered from the first of this group.

    torch numbers the exchanges of a process over all its groups, and the numbers are in the keys: processes that did
    not make all the same groups, such as a new one among old ones, would wait at different keys.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store, self._seen = store, dict[str, int]()

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(self._own(key)))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._own(key) for key in keys], *timeout)

    def _own(self, key: str) -> str:
        """``topic/number/rank`` with this group's number."""
        exchange, rank = key.rsplit("/", 1)
        return f"{exchange.rsplit('/', 1)[0]}/{self._seen.setdefault(exchange, len(self._seen))}/{rank}"
