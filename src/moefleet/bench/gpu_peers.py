"""Other libraries through their own APIs, as candidates to measure against; each needs its package on the path.

Buffers are the caller's, made once. The experts' rows are the rows that were received.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import EpLayout
from .cases import CommCase
from .gpu_candidate import GpuCandidate

Pool = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Ids int64 and weights float32 ``[T, K]`` of each routing."""


class Peer(GpuCandidate):
    """Another library.

    Args:
        case, x: what is sent, ``[T, H]``.
        pool: the routings.
        most: ``max_tokens_per_rank``.
    """

    graphs = True

    def __init__(self, case: CommCase, pool: Pool, x: torch.Tensor, most: int) -> None:
        raise NotImplementedError

    @classmethod
    def why_not(cls, case: CommCase) -> str:
        """Why it cannot run a case here; empty if it can."""
        raise NotImplementedError


class NcclEp(Peer):
    """NCCL-EP: one group and handle for a layout and a number of tokens."""

    _communicator: Any = None

    @classmethod
    def why_not(cls, case: CommCase) -> str:
        if reason := _import_error("nccl.ep"):
            return reason
        if case.dtype is not torch.bfloat16 or case.hidden % 256:
            return f"takes bfloat16 rows of a multiple of 256, not {case.hidden} of {case.dtype}"
        if case.experts % case.world:
            return f"{case.experts} experts do not spread evenly over {case.world} ranks"
        return ""

    def __init__(self, case: CommCase, pool: Pool, x: torch.Tensor, most: int) -> None:
        from nccl import ep

        world, hidden, layout = case.world, case.hidden, case.layout
        high, local = layout is EpLayout.FLAT, case.experts // case.world
        self._ep, wrap = ep, ep.Tensor
        self._group = ep.Group.create(
            self._connected(),
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT if high else ep.Algorithm.LOW_LATENCY,
                num_experts=case.experts,
                max_dispatch_tokens_per_rank=most,
                max_token_bytes=2 * hidden,
                max_recv_tokens_per_rank=most * world if high else 0,
            ),
        )

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
            return wrap(torch.zeros(*shape, device="cuda", dtype=dtype))

        self._ids = [wrap(ids) for ids, _ in pool]
        weights = [wrap(each) for _, each in pool]
        self._total = ep.LayoutInfo(recv_total_counter=empty(1, dtype=torch.int32)) if high else None
        self._handle = self._group.create_handle(
            getattr(ep.Layout, layout.name), self._ids[0], layout_info=self._total, stream=torch.cuda.current_stream()
        )
        self._y = torch.zeros(case.tokens, hidden, device="cuda", dtype=torch.bfloat16)
        back, tokens = wrap(self._y), wrap(x)
        if layout is EpLayout.EXPERT_MAJOR:
            self._rows = empty(local, world * most, hidden)
            self._inputs = [ep.DispatchInputs(tokens=tokens)] * len(pool)
            self._outputs = ep.DispatchOutputs(tokens=self._rows)
            self._info = ep.LayoutInfo(expert_counters=empty(local, dtype=torch.int32))
            self._back = [ep.CombineOutputs(tokens=back, topk_weights=each) for each in weights]
            return
        lead = (most * world,) if high else (world, most)
        self._rows = empty(*lead, hidden)
        self._inputs = [ep.DispatchInputs(tokens=tokens, topk_weights=each) for each in weights]
        self._outputs = ep.DispatchOutputs(
            tokens=self._rows,
            topk_weights=empty(*lead, case.topk, dtype=torch.float32),
            topk_idx=empty(*lead, case.topk, dtype=torch.int64 if high else torch.int32),
        )
        self._info = None if high else ep.LayoutInfo(src_rank_counters=empty(world, dtype=torch.int32))
        self._back = [ep.CombineOutputs(tokens=back)] * len(pool)

    def dispatch(self, number: int) -> None:
        stream = torch.cuda.current_stream
        self._handle.update(self._ids[number], layout_info=self._total, stream=stream())
        self._handle.dispatch(self._inputs[number], self._outputs, layout_info=self._info, stream=stream())

    def combine(self, number: int) -> torch.Tensor:
        inputs = self._ep.CombineInputs(tokens=self._rows)
        self._handle.combine(inputs, self._back[number], stream=torch.cuda.current_stream())
        return self._y

    def close(self) -> None:
        self._handle.destroy()
        torch.cuda.synchronize()
        dist.barrier()
        self._group.destroy()

    @classmethod
    def _connected(cls) -> Any:
        if cls._communicator is None:
            import nccl.core as nc

            uid = [nc.get_unique_id().as_bytes if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(uid, 0)
            cls._communicator = nc.Communicator.init(
                dist.get_world_size(), dist.get_rank(), nc.UniqueId.from_bytes(uid[0])
            )
        return cls._communicator


class NixlEp(Peer):
    """NIXL-EP's low-latency dispatch and combine. It reads the routing in both, so it has no update."""

    HIDDEN = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)

    @classmethod
    def why_not(cls, case: CommCase) -> str:
        if reason := _import_error("nixl_ep_cu13"):
            return reason
        if case.layout is not EpLayout.EXPERT_MAJOR:
            return "has the layout EXPERT_MAJOR only"
        if case.dtype is not torch.bfloat16 or case.hidden not in cls.HIDDEN:
            return f"takes bfloat16 rows of {', '.join(map(str, cls.HIDDEN))}, not {case.hidden} of {case.dtype}"
        if case.experts % case.world:
            return f"{case.experts} experts do not spread evenly over {case.world} ranks"
        return ""

    def __init__(self, case: CommCase, pool: Pool, x: torch.Tensor, most: int) -> None:
        import nixl_ep_cu13 as nixl_ep

        self._x, self._most, self._experts = x, most, case.experts
        self._pool = [(ids.to(nixl_ep.topk_idx_t), weights) for ids, weights in pool]
        self._buffer = nixl_ep.Buffer(rank=dist.get_rank(), explicitly_destroy=True, tcp_store_group=_new_store())
        size = nixl_ep.Buffer.get_low_latency_buffer_size_hint(most, case.hidden, case.world, case.experts)
        self._buffer.update_memory_buffers(case.world, case.experts // case.world, size)
        self._buffer.connect_ranks(list(range(case.world)))

    def dispatch(self, number: int) -> None:
        ids, _ = self._pool[number]
        self._rows, _, self._handle, _, _ = self._buffer.low_latency_dispatch(
            self._x, ids, self._most, self._experts, use_fp8=False
        )

    def combine(self, number: int) -> torch.Tensor:
        return self._buffer.low_latency_combine(self._rows, *self._pool[number], self._handle)[0]

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self._buffer.destroy()


def _import_error(name: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a library may fail in any way while it loads
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"{name} cannot be imported: {text[:200]}"
    return ""


def _new_store() -> dist.TCPStore:
    """A TCPStore of these ranks."""
    port = [0]
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    return dist.TCPStore("127.0.0.1", port[0], is_master=dist.get_rank() == 0, wait_for_workers=False)


PEERS: dict[str, type[Peer]] = {"nccl_ep": NcclEp, "nixl_ep": NixlEp}
"""By name."""
