"""What the link can do: every rank stores into the next rank's memory at once, nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moefleet.bench.gpu_timing import alternating_us, capture
from moefleet.substrate.symmetric import SymmetricMemory


@triton.jit
def push(source, target, N, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """Copy ``N`` int64 words from here to address ``target``."""
    to = tl.multiple_of(tl.cast(target, tl.int64).to(tl.pointer_type(tl.int64)), 16)
    for start in range(tl.program_id(0) * BLOCK, N, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < N), mask=at < N)


def push_gbps(mib: int = 256, programs: int = 132) -> float:
    """GB/s that each rank pushes while all push."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("push", dist.distributed_c10d._get_default_store())
    device = torch.device("cuda", torch.cuda.current_device())
    memory = SymmetricMemory.allocate(mib << 20, device, rank=rank, world_size=world, store=store, name="moefleet-push")
    source = torch.randint(0, 2**60, (mib << 17,), device=device)
    address = memory.addresses[(rank + 1) % world]

    def step() -> None:
        push[(programs,)](source, address, source.numel(), 2048, programs, num_warps=8)

    step()
    us = alternating_us({"push": capture([step])}, 1)["push"]
    return (mib << 20) / us / 1e3
