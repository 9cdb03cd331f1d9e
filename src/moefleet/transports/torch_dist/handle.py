"""One step over collectives: pack and send, unpack; sum and send, sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ... import quant
from ...config import EpLayout
from ...errors import config_error
from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...fleet.stepping import check_same
from ...substrate.control import Operation
from ...substrate.device_gather import upload
from ...substrate.routes import ExpertBlocks, Ints, arrivals_among, homecoming
from ...substrate.rowtypes import row_code
from .parcel import Departures, Parcel

if TYPE_CHECKING:
    from .fleet import TorchDistFleet  # noqa: F401 - named in a string below


@dataclass
class TorchDistStep(OpenStep):
    """``counts`` ``[W]``: the rows of each source; ``blocks``: how they are sorted, in EXPERT_MAJOR."""

    counts: Ints | None = None
    blocks: ExpertBlocks | None = None


class TorchDistHandle(HalvesHandle["TorchDistFleet", TorchDistStep]):
    """See :class:`moefleet.fleet.Handle` for the contract."""

    def combine_buffer(self) -> torch.Tensor | None:
        self._expect(Phase.RECEIVED, "combine_buffer")
        open_ = self._opened()
        if self._fleet.params.layout is not EpLayout.FLAT:
            return None  # rows are sent from where they are summed or gathered, whatever they lie in
        return self._fleet.home(open_.step, open_.output.row_dtype)

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        fleet = self._fleet
        with fleet.on_stream():
            ids = topk_ids.to(torch.int32)
            known = ids.cpu().numpy()
            if ids.is_cuda and (good := self._without_bad(known)) is not known:
                known = good
                (ids,) = upload([known], ids.device)
            self._routing = torch.cat((_as_bytes(ids), _as_bytes(topk_weights)), 1)
            self._back = homecoming(known, fleet.owner_table, fleet.bootstrap.world_size)
            self._departures = Departures.of(self._back, fleet.bootstrap.world_size)
            token = self._departures.token
            self._leaving = upload([token], ids.device)[0] if ids.is_cuda else token  # once for all that is gathered

    def _without_bad(self, ids: np.ndarray) -> np.ndarray:
        """Ids that no expert has, which nobody looked for on a GPU, count as -1."""
        fleet = self._fleet
        bad = (ids < -1) | (ids >= fleet.params.num_experts)
        if not bad.any():
            return ids
        if fleet.checks:
            raise config_error(
                "topk_ids", f"expert id {ids[bad][0]}", f"-1 (no expert) to {fleet.params.num_experts - 1}"
            )
        fleet.bad_ids += int(bad.sum())
        return np.where(bad, np.int32(-1), ids)

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> TorchDistStep:
        carried, combine_dtype = dtype, None
        if self._fleet.row_format.quantised:
            carried, scale_dtype, combine_dtype = quant.ROW_DTYPE, torch.float32, dtype
        elif dtype == quant.ROW_DTYPE:
            combine_dtype = torch.bfloat16
        output = self._fleet.inbox(step).output(carried, self._shape[1], scale_dtype)
        if combine_dtype is not None:
            output = replace(output, combine_dtype=combine_dtype)
        return TorchDistStep(step, dtype, scale_dtype, output)

    def _send_tokens(self, open_: TorchDistStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        fleet, leaving = self._fleet, self._departures
        with fleet.on_stream():
            meta = self._routing
            if fleet.row_format.quantised:
                tokens, scales = quant.encode(tokens)
            if scales is not None:
                meta = torch.cat((meta, _as_bytes(scales)), 1)
            parcel = Parcel(_movable(tokens), self._leaving, leaving.counts, meta)
            code = row_code(open_.dtype, open_.scale_dtype)
            fleet.steps.send(open_.step, Operation.DISPATCH, self._shape[1], code, parcel)
        fleet.tokens_sent += tokens.shape[0]

    def _receive_tokens(self, open_: TorchDistStep) -> None:
        fleet, topk = self._fleet, self._shape[1]
        came = fleet.steps.collect(open_.step, Operation.DISPATCH)
        check_same(came.statuses, fleet.bootstrap.rank, row_code(open_.dtype, open_.scale_dtype))
        got = arrivals_among(*came.routing(topk), came.edges, fleet.local_table)
        self._check_room(len(got.token))
        open_.counts = got.counts
        with fleet.on_stream():
            came.lend(fleet.wire)
            rows = _movable(open_.output.expert_tensors)
            table, firsts = came.table(rows.dtype, fleet.params.token_hidden_size)
            scales = None
            if scale_bytes := fleet.row_format.scale_bytes:
                scales = came.scales(8 * topk, 8 * topk + scale_bytes), np.arange(len(got.token))
            open_.blocks = fleet.inbox(open_.step).fill(got, table, got.rows(firsts), scales)
        fleet.rows_received += got.counts
        fleet.expert_rows.add(got, open_.blocks)

    def _send_rows(self, open_: TorchDistStep, rows: torch.Tensor) -> None:
        assert open_.counts is not None
        fleet, counts = self._fleet, tuple(open_.counts.tolist())
        flat, total = rows.reshape(-1, rows.shape[-1]), sum(counts)
        with fleet.on_stream():
            if (by := open_.blocks) is not None:
                home = fleet.home(open_.step, rows.dtype)[:total]
                fleet.wire.moves.weighted_sum_bags(flat, by.by_row, by.weight, by.bag, home)
                parcel = Parcel(home, None, counts)
            elif fleet.params.layout is EpLayout.FLAT:
                home = fleet.home(open_.step, rows.dtype)
                if rows.data_ptr() != home.data_ptr():
                    home[:total] = flat[:total]
                parcel = Parcel(home, None, counts)
            else:
                starts = np.arange(len(counts)) * fleet.params.max_tokens_per_rank - np.cumsum((0, *counts[:-1]))
                parcel = Parcel(flat, np.arange(total) + np.repeat(starts, open_.counts), counts)
            fleet.steps.send(open_.step, Operation.COMBINE, 0, row_code(rows.dtype, None), parcel)

    def _receive_rows(self, open_: TorchDistStep) -> torch.Tensor:
        fleet, back = self._fleet, self._back
        came = fleet.steps.collect(open_.step, Operation.COMBINE)
        check_same(came.statuses, fleet.bootstrap.rank, row_code(open_.dtype, None))
        with fleet.on_stream():
            came.lend(fleet.wire)
            table, firsts = came.table(open_.dtype, fleet.params.token_hidden_size)
            summed = fleet.wire.moves.sum_bags(table, firsts[back.rank] + back.position, back.bag)
        fleet.rows_sent += self._departures.counts
        return summed


def _movable(rows: torch.Tensor) -> torch.Tensor:
    """fp8 rows as bytes: they are moved, and not computed with."""
    return rows.view(torch.uint8) if rows.dtype == quant.ROW_DTYPE else rows


def _as_bytes(lines: torch.Tensor) -> torch.Tensor:
    """Uint8 ``[T, bytes]`` of a tensor ``[T, any]``."""
    return lines.clone(memory_format=torch.contiguous_format).view(torch.uint8)
