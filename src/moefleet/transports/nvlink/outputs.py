"""What dispatch returns: views of an output set in the Fleet's layout, made once for each row type and K."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ...config import EpLayout
from ...quant import ROW_DTYPE
from ...tensors import DispatchOutput
from .engine import Engine


@dataclass(frozen=True)
class AnnouncedOutput(DispatchOutput):
    """What a dispatch returns whose number of rows the caller knew: nothing is read back to tell it."""

    announced: int = 0

    def get_num_tokens(self) -> int:
        return self.announced


class OutputViews:
    """DispatchOutputs over the two output sets of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: dict[tuple[int, torch.dtype, int, torch.dtype | None], DispatchOutput] = {}

    def of(self, index: int, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None = None) -> DispatchOutput:
        """Set ``index`` for tokens of type ``dtype``, routed by this K, with scales of ``scale_dtype`` or none."""
        key = (index, dtype, topk, scale_dtype)
        if key not in self._made:
            with torch.inference_mode(False):  # they outlast the caller's mode
                self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, index: int, dtype: torch.dtype, topk: int, scale_dtype: torch.dtype | None) -> DispatchOutput:
        g, memory = self._engine.geometry, self._engine.outputs[index]
        layout, combine_dtype = g.params.resolved_layout, None
        if g.rows.quantised:
            dtype, scale_dtype, combine_dtype = ROW_DTYPE, torch.float32, dtype
        elif dtype == ROW_DTYPE:
            combine_dtype = torch.bfloat16
        shape = g.params.received_shape(g.world_size, g.placement.num_local(g.rank))
        rows = memory.rows.view(dtype).view(*shape, g.rows.hidden)
        scales = None
        if scale_dtype is not None:
            scales = memory.scales.view(scale_dtype).view(*shape, g.rows.scale_bytes // scale_dtype.itemsize)
        made = partial(DispatchOutput, rows, expert_scales=scales, combine_dtype=combine_dtype)
        if layout is EpLayout.EXPERT_MAJOR:
            return made(expert_counts=memory.counts)
        ids, weights = (part[: g.output_rows * topk].view(*shape, topk) for part in (memory.ids, memory.weights))
        if layout is EpLayout.RANK_MAJOR:
            return made(ids, weights, expert_counts=memory.counts)
        return made(ids, weights, recv_total_counter=memory.counts)
