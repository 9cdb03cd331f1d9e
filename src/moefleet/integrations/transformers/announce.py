"""One small step over a Fleet in which all ranks learn the largest of their numbers.

Each rank sends one row that spells its number to one and the same expert's rank, which answers every row with the
largest. It is a step like any other, so whatever ends a step for its peers ends this one, and it runs on any transport
in any layout. Its ``K`` is never that of the model's steps: a rank that is in one while another is in an announcement
raises, and so does the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...config import EpLayout
from ...errors import MoEEpFaultError
from ...knobs import HandleAlgoKnobTopKWeights
from ...layer import Fleet
from ...tensors import CombineInputParams, DispatchInputParams, DispatchOutput, HandleParams

DIGITS = 3
BASE = 256
"""Numbers up to this are exact in every row type."""


def topk_of_announcements(topk: int) -> int:
    """``K`` of these steps, beside a model's ``topk``."""
    return 2 if topk == 1 else 1


class Announcements:
    """The announcements of a Fleet; all ranks call :meth:`largest` in turn with their steps.

    Args:
        fleet: any Fleet with a hidden size of at least 4 and ``max_topk`` of at least 2.
        topk: ``K`` of the model's steps.
        dtype: of its rows.
    """

    def __init__(self, fleet: Fleet, topk: int, dtype: torch.dtype) -> None:
        device, width = fleet.bootstrap.device, topk_of_announcements(topk)
        self._fleet = fleet
        self._expert = -1
        self._row = torch.zeros(1, fleet.params.token_hidden_size, dtype=dtype, device=device)
        self._ids = torch.full((1, width), -1, dtype=torch.int64, device=device)
        self._weights = torch.ones(1, width, device=device)

    def largest(self, mine: int) -> int:
        """The largest number that a rank gave: at most ``256 ** 3 - 1``.

        Raises:
            MoEEpPeerError, MoEEpTimeoutError: as every step.
            MoEEpFaultError: the rank that answers is missing.
        """
        fleet = self._fleet
        host, expert = _host(fleet)
        if self._expert != expert:
            self._ids[0, 0] = self._expert = expert
        self._row[0, : DIGITS + 1] = torch.tensor(_spelled(mine), dtype=self._row.dtype)
        handle = fleet.create_handle(HandleParams(self._ids), [HandleAlgoKnobTopKWeights(self._weights)])
        try:
            arrived = handle.dispatch(DispatchInputParams([self._row]))
            rows = handle.combine_buffer()
            rows = arrived.expert_tensors if rows is None else rows
            if host == fleet.bootstrap.rank:
                _answer(arrived, rows, fleet.params.resolved_layout)
            answer = handle.combine(CombineInputParams([rows])).x[0, : DIGITS + 1].tolist()
        finally:
            handle.destroy()
        if answer[0] != 1:
            mask = fleet.query_active_mask().tolist() if fleet.supports_fault_tolerance else []
            raise MoEEpFaultError(f"rank {host}, which collects what ranks announce, is missing", current_mask=mask)
        return _read(answer)


def _host(fleet: Fleet) -> tuple[int, int]:
    """The first active rank that holds an expert, and that expert."""
    placement = fleet.placement
    active = fleet.query_active_mask().tolist() if fleet.supports_fault_tolerance else [1] * placement.world_size
    for rank in range(placement.world_size):
        for expert in placement.experts_of(rank) if active[rank] else ():
            if expert >= 0:
                return rank, expert
    raise MoEEpFaultError("no active rank holds an expert", current_mask=active)


def _answer(arrived: DispatchOutput, rows: torch.Tensor, layout: EpLayout) -> None:
    """Write the largest number that arrived to every row that did."""
    fronts = list(_fronts(arrived, layout))
    numbers = [_read(row) for at in fronts for row in arrived.expert_tensors[at][:, : DIGITS + 1].tolist()]
    answer = torch.tensor(_spelled(max(numbers)), dtype=rows.dtype, device=rows.device)
    for at in fronts:
        rows[at] = 0
        rows[at][:, : DIGITS + 1] = answer


def _fronts(arrived: DispatchOutput, layout: EpLayout) -> Iterator[tuple[int | slice, ...]]:
    """Where rows are that exist."""
    if layout is EpLayout.FLAT:
        yield (slice(arrived.get_num_tokens()),)
        return
    assert arrived.expert_counts is not None
    for block, count in enumerate(arrived.expert_counts.tolist()):
        if count:
            yield block, slice(count)


def _spelled(number: int) -> list[int]:
    """1, which says that there is a number, and its digits, the lowest first."""
    return [1, *(number // BASE**place % BASE for place in range(DIGITS))]


def _read(row: list[float]) -> int:
    return sum(int(digit) * BASE**place for place, digit in enumerate(row[1:]))
