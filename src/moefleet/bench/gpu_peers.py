"""NCCL-EP through its own API, as a candidate to measure against. Needs ``nccl.ep`` on the path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import EpLayout


class NcclEp:
    """One group and handle of NCCL-EP for a layout and a number of tokens; buffers are the caller's, made once."""

    _communicator: Any = None

    def __init__(
        self, layout: EpLayout, pool: Sequence[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, experts: int
    ) -> None:
        from nccl import ep

        rank, world = dist.get_rank(), dist.get_world_size()
        (tokens, hidden), topk = x.shape, pool[0][0].shape[1]
        most, high = max(tokens, 128), layout is EpLayout.FLAT
        self._ep, wrap = ep, ep.Tensor
        self._group = ep.Group.create(
            self._connected(rank, world),
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT if high else ep.Algorithm.LOW_LATENCY,
                num_experts=experts,
                max_dispatch_tokens_per_rank=most,
                max_token_bytes=2 * hidden,
                max_recv_tokens_per_rank=most * world if high else 0,
            ),
        )

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            return wrap(torch.zeros(*shape, device="cuda", dtype=dtype))

        self._ids = [wrap(ids) for ids, _ in pool]
        weights = wrap(pool[0][1])
        self._total = ep.LayoutInfo(recv_total_counter=empty(1, dtype=torch.int32)) if high else None
        self._handle = self._group.create_handle(
            getattr(ep.Layout, layout.name), self._ids[0], layout_info=self._total, stream=torch.cuda.current_stream()
        )
        back = empty(tokens, hidden)
        if layout is EpLayout.EXPERT_MAJOR:
            self._rows = empty(experts // world, world * most, hidden)
            self._inputs, self._outputs = ep.DispatchInputs(tokens=wrap(x)), ep.DispatchOutputs(tokens=self._rows)
            self._info = ep.LayoutInfo(expert_counters=empty(experts // world, dtype=torch.int32))
            self._back = ep.CombineOutputs(tokens=back, topk_weights=weights)
            return
        lead = (most * world,) if high else (world, most)
        self._rows = empty(*lead, hidden)
        self._inputs = ep.DispatchInputs(tokens=wrap(x), topk_weights=weights)
        self._outputs = ep.DispatchOutputs(
            tokens=self._rows,
            topk_weights=empty(*lead, topk, dtype=torch.float32),
            topk_idx=empty(*lead, topk, dtype=torch.int64 if high else torch.int32),
        )
        self._info = None if high else ep.LayoutInfo(src_rank_counters=empty(world, dtype=torch.int32))
        self._back = ep.CombineOutputs(tokens=back)

    def step(self, number: int = 0) -> None:
        """update, dispatch and combine with routing ``number``."""
        stream = torch.cuda.current_stream
        self._handle.update(self._ids[number], layout_info=self._total, stream=stream())
        self._handle.dispatch(self._inputs, self._outputs, layout_info=self._info, stream=stream())
        self._handle.combine(self._ep.CombineInputs(tokens=self._rows), self._back, stream=stream())

    def destroy(self) -> None:
        """Collective."""
        self._handle.destroy()
        torch.cuda.synchronize()
        dist.barrier()
        self._group.destroy()

    @classmethod
    def _connected(cls, rank: int, world: int) -> Any:
        if cls._communicator is None:
            import nccl.core as nc

            uid = [nc.get_unique_id().as_bytes if rank == 0 else None]
            dist.broadcast_object_list(uid, 0)
            cls._communicator = nc.Communicator.init(world, rank, nc.UniqueId.from_bytes(uid[0]))
        return cls._communicator
