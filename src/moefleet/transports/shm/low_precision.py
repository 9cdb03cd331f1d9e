"""FleetAlgoKnobQuantization where ranks share memory: the numbers of fp8 rows, in the memory of plain ones.

A row that was quantised lies at the front of a row of the callers' type, so that all movements stay as they are. What
the knob is for on shm is to get the same results as over links on which narrow rows save time; here they save none.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ... import quant
from ...tensors import DispatchOutput


def packed(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 rows and scales of tokens ``[T, H]``: the rows in ``[T, H]`` of the tokens' dtype, the rest undefined."""
    rows, scales = quant.encode(tokens)
    wide = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    wide.view(torch.uint8)[:, : rows.shape[1]] = rows.view(torch.uint8)
    return wide, scales


def shown(output: DispatchOutput) -> DispatchOutput:
    """The same with ``expert_tensors`` as the fp8 rows that were packed into them; rows keep their distance."""
    plain = output.expert_tensors
    rows = plain.view(quant.ROW_DTYPE)[..., : plain.shape[-1]]
    return replace(output, expert_tensors=rows, combine_dtype=plain.dtype)
