"""What dispatch returns: views of an output set in the Fleet's layout, made once for each row type and K."""

from __future__ import annotations

import torch

from ...config import EpLayout
from ...tensors import DispatchOutput
from .engine import Engine


class OutputViews:
    """DispatchOutputs over the two output sets of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: dict[tuple[int, torch.dtype, int], DispatchOutput] = {}

    def of(self, index: int, dtype: torch.dtype, topk: int) -> DispatchOutput:
        """Set ``index`` as rows of this type, routed by this K."""
        key = (index, dtype, topk)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, index: int, dtype: torch.dtype, topk: int) -> DispatchOutput:
        g, memory = self._engine.geometry, self._engine.outputs[index]
        layout = g.params.resolved_layout
        shape = g.params.received_shape(g.world_size, g.placement.num_local(g.rank))
        rows = memory.rows.view(dtype).view(*shape, g.params.token_hidden_size)
        if layout is EpLayout.EXPERT_MAJOR:
            return DispatchOutput(rows, expert_counts=memory.counts)
        ids, weights = (part[: g.output_rows * topk].view(*shape, topk) for part in (memory.ids, memory.weights))
        if layout is EpLayout.RANK_MAJOR:
            return DispatchOutput(rows, ids, weights, expert_counts=memory.counts)
        return DispatchOutput(rows, ids, weights, recv_total_counter=memory.counts)
