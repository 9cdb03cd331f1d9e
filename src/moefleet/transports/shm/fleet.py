"""The shm Fleet: its memory and the views that a step needs, made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ...config import EpLayout, ShmConfig
from ...errors import MoEEpError
from ...fleet.base import Fleet, FleetSpec
from ...fleet.limits import Limits
from ...fleet.registry import Capability, register_fleet
from ...knobs import FleetAlgoKnob, HandleAlgoKnob
from ...substrate.control import MAX_RANKS, SETS
from ...substrate.futex import unsupported_reason
from ...substrate.group import HostGroup
from ...substrate.inbox import Inbox
from ...substrate.routes import Arrivals, Ints
from ...substrate.rowtypes import DTYPES
from ...substrate.sockets import namespace_id
from ...tensors import HandleParams
from .handle import ShmHandle
from .layout import SegmentLayout
from .steps import Steps

LIMITS = Limits(
    device_types=frozenset({"cpu"}),
    layouts=frozenset(EpLayout),
    dtype_bytes=frozenset(DTYPES),
    max_world_size=MAX_RANKS,
)


@register_fleet("shm")
class ShmFleet(Fleet):
    """Ranks of one host over shared memory. See the package docstring for how rows move.

    Memory per rank: ``2 * (M * H + C * H) * dtype_bytes`` shared (C = ``M*W``, or max_recv_tokens_per_rank), all of it
    taken at construction, and the two received buffers, private, of which only rows that arrive are ever touched.
    """

    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = frozenset()

    @classmethod
    def probe(cls) -> Capability:
        if reason := unsupported_reason():
            return Capability(False, reason, limits=LIMITS)
        return Capability(True, features=frozenset({"halves", "combine_buffer"}), limits=LIMITS, domain=namespace_id())

    def __init__(self, spec: FleetSpec) -> None:
        super().__init__(spec)
        params, rank, world = self.params, self.bootstrap.rank, self.bootstrap.world_size
        config = spec.config if isinstance(spec.config, ShmConfig) else ShmConfig()
        self.layout = SegmentLayout.of(params, world)
        self.group = HostGroup(
            rank,
            world,
            size=self.layout.size,
            align=self.layout.align,
            exchange=spec.meeting.exchange,
            incarnation=spec.meeting.incarnation,
            spin_s=None if config.spin_us is None else config.spin_us * 1e-6,
            timeout_s=self.bootstrap.timeout_s,
        )
        self.steps = Steps(self.group)
        self.device = torch.device("cpu")
        self.num_local = self.placement.num_local(rank)
        self.row_dtypes = DTYPES[params.dtype_bytes]
        # Entry -1, for id -1, is the last one.
        self.local_table = np.append(self.placement.local_table(rank).numpy(), -1)
        self.owner_table = np.append(self.placement.owner_table.numpy(), -1)
        self._tables = {dtype: self.group.range.rows(dtype, params.token_hidden_size) for dtype in self.row_dtypes}
        scale_bytes = self.layout.scale_bytes
        self.scale_table = self.group.range.rows(torch.uint8, scale_bytes) if scale_bytes else None
        self._inboxes = [Inbox(params, world, self.num_local) for _ in range(SETS)]
        slots = params.max_tokens_per_rank * params.max_topk
        self._ids = self._per_rank(self.layout.ids, np.int32, slots)
        self._weights = self._per_rank(self.layout.weights, np.float32, slots)
        self._offsets = self._per_rank(self.layout.offsets, np.int64, world + 1)
        self.rows_received = np.zeros(world, np.int64)
        self.failed_steps = 0

    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> ShmHandle:
        self.require_alive()
        return ShmHandle(self, params, algo_knobs)

    def destroy(self) -> None:
        self.group.close()

    def stats(self) -> dict[str, Any]:
        """``steps`` begun, ``failed_steps``, ``rows_received`` and ``waited_s`` per peer, all since construction."""
        return {
            "steps": self.steps.last,
            "failed_steps": self.failed_steps,
            "rows_received": self.rows_received.tolist(),
            "waited_s": list(self.group.waiter.waited_s),
        }

    # What a handle works with.

    def require_alive(self) -> None:
        if self.group.closed:
            raise MoEEpError("this Fleet was destroyed; build another with create_fleet")

    def inbox(self, step: int) -> Inbox:
        """Where this step's rows are received."""
        return self._inboxes[step % SETS]

    def table(self, dtype: torch.dtype) -> torch.Tensor:
        """All ranks' memory as rows ``[many, H]``."""
        return self._tables[dtype]

    def token_rows(self, step: int) -> list[int]:
        """For each rank the table row of its first token."""
        return self._rows(self.layout.tokens[step % SETS], self.layout.row_bytes)

    def combined_rows(self, step: int) -> list[int]:
        """For each rank the table row of its first combined row."""
        return self._rows(self.layout.combined[step % SETS], self.layout.row_bytes)

    def tokens(self, dtype: torch.dtype, step: int) -> torch.Tensor:
        """This rank's shared memory for tokens, ``[M, H]``."""
        first = self.token_rows(step)[self.bootstrap.rank]
        return self.table(dtype)[first : first + self.params.max_tokens_per_rank]

    def combined(self, dtype: torch.dtype, step: int) -> torch.Tensor:
        """This rank's shared memory for combined rows, ``[C, H]``."""
        first = self.combined_rows(step)[self.bootstrap.rank]
        return self.table(dtype)[first : first + self.params.recv_capacity(self.bootstrap.world_size)]

    def combine_starts(self, bounds: Ints) -> Ints:
        """``[W+1]``: where each source's rows begin among this rank's combined ones."""
        if self.params.resolved_layout is EpLayout.RANK_MAJOR:
            return np.arange(self.bootstrap.world_size + 1) * self.params.max_tokens_per_rank
        return bounds

    def ids(self, rank: int, step: int, tokens: int, topk: int) -> npt.NDArray[np.int32]:
        """``[T, K]`` of a rank's step, in shared memory."""
        return self._ids[step % SETS][rank][: tokens * topk].reshape(tokens, topk)

    def weights(self, rank: int, step: int, tokens: int, topk: int) -> npt.NDArray[np.float32]:
        """``[T, K]`` of a rank's step, in shared memory."""
        return self._weights[step % SETS][rank][: tokens * topk].reshape(tokens, topk)

    def offsets(self, rank: int, step: int) -> Ints:
        """``[W+1]``: where each source's rows begin among those that ``rank`` combined, in shared memory."""
        return self._offsets[step % SETS][rank]

    def scales(self, dtype: torch.dtype, step: int) -> torch.Tensor:
        """This rank's shared memory for scales, ``[M, S]``."""
        assert self.scale_table is not None
        first = self._rows(self.layout.scales[step % SETS], self.layout.scale_bytes)[self.bootstrap.rank]
        return self.scale_table[first : first + self.params.max_tokens_per_rank].view(dtype)

    def scale_rows(self, got: Arrivals, step: int) -> Ints:
        """For each arrival the row of its scales in ``scale_table``."""
        rows = self._rows(self.layout.scales[step % SETS], self.layout.scale_bytes)
        shift = np.array(rows) - np.array(self.token_rows(step))
        return got.rows + np.repeat(shift, np.diff(got.bounds))

    def _rows(self, offset: int, row_bytes: int) -> list[int]:
        stride = self.group.range.stride
        return [(rank * stride + offset) // row_bytes for rank in range(self.bootstrap.world_size)]

    def _per_rank(self, offsets: Sequence[int], dtype: Any, count: int) -> list[list[npt.NDArray[Any]]]:
        memory, stride = self.group.memory, self.group.range.stride
        return [
            [np.frombuffer(memory, dtype, count, rank * stride + at) for rank in range(self.bootstrap.world_size)]
            for at in offsets
        ]
