"""What the links carry: every rank stores into the next rank's memory at once, nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ..substrate.symmetric import SymmetricMemory
from .gpu_timing import alternating_us, capture


@triton.jit
def push(source, target, N, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy ``N`` int64 words from here to address ``target``."""
    to = tl.multiple_of(tl.cast(target, tl.int64).to(tl.pointer_type(tl.int64)), 16)
    for start in range(tl.program_id(0) * BLOCK, N, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < N), mask=at < N)


def push_gbps(store: dist.Store, mib: int = 256, programs: int = 132) -> float:
    """GB/s that each rank pushes while all push. ``store`` is one of these ranks alone that nothing else uses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    own = SymmetricMemory.allocate(mib << 20, device, world)
    memory = SymmetricMemory.map(own, rank=rank, world_size=world, store=store, name="moefleet-push")
    source = torch.randint(0, 2**60, (mib << 17,), device=device)
    address = memory.addresses[(rank + 1) % world]

    def step() -> None:
        push[(programs,)](source, address, source.numel(), 2048, programs, num_warps=8)

    us = alternating_us({"push": capture([step])}, 1)["push"]
    assert torch.equal(memory.own.view(torch.int64)[:8], _first_words((rank - 1) % world, source)), "what came is whole"
    return (mib << 20) / us / 1e3


def _first_words(rank: int, source: torch.Tensor) -> torch.Tensor:
    """The first words of another rank's source."""
    everybody = [torch.empty_like(source[:8]) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, source[:8])
    return everybody[rank]
