"""The meaning of everything, in plain torch: one process plays all ranks.

Each argument that a rank would hold is a sequence indexed by rank. Nothing here is fast; everything is meant to be
obvious. An engine is right when it agrees with these functions: exactly in which row lies where (a library's transport
may order the rows inside a block as it likes), within :func:`tolerance` in the values.

    outs = dispatch(xs, topk_ids, topk_weights, params)          # what each rank receives
    rows = [compute(out, expert) for out in outs]                # what its experts make of it
    ys = combine(rows, topk_ids, topk_weights, params)           # what comes home
    ys = forward(xs, topk_ids, topk_weights, w13, w2)            # the answer, without the journey

Arguments that most functions share, in the symbols of :mod:`moefleet.config`:

    xs            W tensors [T, H] of one dtype; T may differ from rank to rank and be 0.
    topk_ids      W tensors [T, K] int32 or int64, global expert ids; -1 is "no expert".
    topk_weights  W tensors [T, K] float32 (or castable: they count as rounded to float32).
    placement     who holds which expert; None: Placement.contiguous. An expert without an owner counts as -1.
    mask          [W], 1 = active, 0 = masked; None: all active. A masked rank sends and receives nothing, and its
                  experts contribute nothing.
    renormalize   a row that lost some of its experts to the mask is multiplied by (sum of all its weights) / (sum of
                  the live ones); where the live ones sum to 0 it is exactly 0. Rows that lost nothing keep their bits.
    quantised     as with FleetAlgoKnobQuantization({"FP8E4M3"}): tokens are encoded on the way to the experts, which
                  see the numbers that these fp8 rows and their scales stand for.

All raise :class:`MoEEpConfigError` for arguments that do not fit together. That includes ids out of range, even on a
GPU: they are read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import quant
from .config import EpLayout, FleetParams
from .errors import config_error
from .placement import NO_OWNER, Placement
from .routing import ABSENT, check_topk_ids, check_topk_weights
from .tensors import DispatchOutput, check_tensor
from .weights import UnquantizedMoEWeights

Expert = Callable[[torch.Tensor, int], torch.Tensor]
"""What an expert does: float64 rows ``[N, H]`` and the expert's index to float64 rows ``[N, H]``."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def dispatch(
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    params: FleetParams,
    *,
    placement: Placement | None = None,
    scales: Sequence[torch.Tensor] | None = None,
    mask: torch.Tensor | Sequence[int] | None = None,
    quantised: bool = False,
    fill: float = 0.0,
) -> list[DispatchOutput]:
    """What each rank receives, in buffers of the shapes that :class:`DispatchOutput` lists.

    Rows are in canonical order (source rank, token, slot): in EXPERT_MAJOR one per (token, expert), even if the token
    names the expert twice, otherwise one per (token, rank). Ids past a count are -1 and weights 0.

    Args:
        scales: W tensors ``[T, S]`` that travel with the tokens, ``S * itemsize == scale_bytes_per_token``.
        fill: what rows past a count hold (integer scales: 0). NaN there finds out who reads them.

    Raises:
        MoEEpConfigError: as for all functions here; also where a rank would receive more rows than
            ``max_recv_tokens_per_rank``.
    """
    step = _Step.read(topk_ids, topk_weights, params, placement, mask)
    _check_rows("xs", xs, step, params.token_hidden_size, params.token_hidden_size * params.dtype_bytes)
    if scales is not None:
        _check_rows("scales", scales, step, None, params.scale_bytes_per_token)
    combine_dtype = torch.bfloat16 if xs[0].dtype == quant.ROW_DTYPE else None
    if quantised:
        combine_dtype = xs[0].dtype
        xs, scales = zip(*map(quant.encode, xs), strict=True)
    return [_receive(step, rank, xs, scales, fill, combine_dtype) for rank in range(step.world_size)]


def compute(out: DispatchOutput, expert: Expert, *, fill: float = 0.0) -> torch.Tensor:
    """What one rank's experts make of what it received: rows for combine, of the shape of ``expert_tensors``.

    In EXPERT_MAJOR a row is its expert's output; otherwise it is the sum of weight times output over the token's local
    experts. Each row is computed in float64 and rounded once, to ``out.row_dtype``. Experts see fp8 rows times their
    scales. Rows past a count hold ``fill``.

    Args:
        expert: ``expert(x, index)`` with ``x`` float64 ``[N, H]`` and the LOCAL index of the expert. The identity is
            ``lambda x, index: x``.
    """
    rows = torch.full_like(out.expert_tensors, fill, dtype=out.row_dtype)
    if out.recv_topk_idx is None:
        assert out.expert_counts is not None
        for index, count in enumerate(out.expert_counts.tolist()):
            rows[index, :count] = expert(_numbers(out, (index, slice(count))), index).to(rows)
        return rows
    assert out.recv_topk_weights is not None
    came = (out.recv_topk_idx != ABSENT).any(-1)  # a row that came has an expert here, ids past a count are -1
    y_NH = _weighted_sum(_numbers(out, came), out.recv_topk_idx[came], out.recv_topk_weights[came], expert)
    rows[came] = y_NH.to(rows)
    return rows


def combine(
    rows: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    params: FleetParams,
    *,
    placement: Placement | None = None,
    mask: torch.Tensor | Sequence[int] | None = None,
    renormalize: bool = False,
) -> list[torch.Tensor | None]:
    """What comes home: per rank ``[T, H]`` in token order and in the rows' dtype, None for a masked rank.

    A rank sums its experts' rows for a token in float32, in EXPERT_MAJOR times the sum of the weights of the slots
    that name the expert, and rounds once to the rows' dtype. Home adds the ranks in float32 and rounds once more.
    A token without an expert is exactly 0.

    Args:
        rows: per rank the experts' rows, of the shape of the dispatch's ``expert_tensors`` and one dtype. Rows past
            the counts and those of masked ranks are never read.
    """
    step = _Step.read(topk_ids, topk_weights, params, placement, mask)
    if len(rows) != step.world_size:
        raise config_error("rows", f"{len(rows)} tensors", f"{step.world_size}, one per rank as in topk_ids")
    hidden = params.token_hidden_size
    sums = [torch.zeros(len(ids), hidden, device=r.device) for ids, r in zip(step.ids, rows, strict=True)]
    for dst in step.active_ranks:
        blocks = step.blocks(dst)
        shape = (step.capacity, hidden) if step.layout is EpLayout.FLAT else (len(blocks), step.capacity, hidden)
        buffer = check_tensor(f"rows[{dst}]", rows[dst], shape=shape, dtypes=(rows[step.active_ranks[0]].dtype,))
        partials = [torch.zeros_like(total) for total in sums]
        for block, pieces in zip(buffer.reshape(len(blocks), step.capacity, hidden), blocks, strict=True):
            for piece in pieces:
                part = partials[piece.src]
                part[piece.tokens] += piece.share[:, None].to(part) * block[piece.rows].to(part)
        for total, part in zip(sums, partials, strict=True):
            total += part.to(buffer.dtype).to(part)
    return [
        step.rescaled(src, total, renormalize).to(rows[src].dtype) if step.active[src] else None
        for src, total in enumerate(sums)
    ]


def forward(
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    placement: Placement | None = None,
    mask: torch.Tensor | Sequence[int] | None = None,
    renormalize: bool = False,
    activation: str = "silu",
    quantised: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor | None]:
    """The answer that every path must give: ``y[t] = sum over live k of weight[t, k] * expert_k(x[t])``.

    Args:
        w13: ``[E, 2I, H]``, the gate rows then up rows of all experts, in the order of the ids.
        w2: ``[E, H, I]``.
        activation: see :func:`expert_mlp`.
        dtype: what the answer is rounded to; everything before is float64.

    Returns:
        Per rank ``[T, H]``, or None for a masked rank.
    """
    weights = UnquantizedMoEWeights(w13, w2)
    _activation(activation)

    def expert(x_NH: torch.Tensor, index: int) -> torch.Tensor:
        return expert_mlp(x_NH, weights.w13[index], weights.w2[index], activation)

    params = _roomy(w13.shape[0], w13.shape[2], topk_ids)
    step = _Step.read(topk_ids, topk_weights, params, placement, mask)
    return _answer(step, _after_fp8(xs) if quantised else xs, expert, renormalize, dtype)


def identity_forward(
    xs: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    num_experts: int,
    *,
    placement: Placement | None = None,
    mask: torch.Tensor | Sequence[int] | None = None,
    renormalize: bool = False,
    quantised: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor | None]:
    """:func:`forward` with experts that return their input: ``y[t] = x[t] * (sum of the live weights)``."""
    params = _roomy(num_experts, xs[0].shape[-1] if len(xs) else 1, topk_ids)
    step = _Step.read(topk_ids, topk_weights, params, placement, mask)
    return _answer(step, _after_fp8(xs) if quantised else xs, lambda x, _: x, renormalize, dtype)


def expert_mlp(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """One gated expert, ``w2 @ (act(gate) * up)``, in float64.

    Args:
        x: ``[N, H]``.
        w13: ``[2I, H]``, gate rows then up rows.
        w2: ``[H, I]``.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"relu"``, applied to the gate half.

    Returns:
        float64 ``[N, H]``.
    """
    gate, up = (x.double() @ w13.double().T).chunk(2, dim=1)
    return (_activation(activation)(gate) * up) @ w2.double().T


def tolerance(dtype: torch.dtype, world_size: int, topk: int, largest: float) -> float:
    """Absolute error allowed to each element of an implementation's result, against :func:`forward`.

    Partial sums are rounded once per rank to the row type on their way home, each expert's row once, the result once;
    everything else accumulates in float32.

    Args:
        dtype: row type: float32, bfloat16 or float16 (which gets bfloat16's coarser step).
        largest: largest magnitude among the values that are rounded.
    """
    steps = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-8}
    if dtype not in steps:
        raise config_error("tolerance.dtype", dtype, " or ".join(str(known) for known in steps))
    return largest * (steps[dtype] * (world_size + 2) + 2.0**-23 * topk * 4)


def quantised_tolerance(dtype: torch.dtype, world_size: int, topk: int, largest: float) -> float:
    """Absolute error allowed to a quantised step of identity (or diagonal) experts against one that is not quantised.

    An fp8 element is off by at most 2**-4 of itself, as e4m3 keeps 3 bits after the leading one, or 2**-18 of its
    block's largest (:mod:`moefleet.quant.fp8`); a sum of weights times elements by the same part of the sum of their
    magnitudes. The rest is :func:`tolerance`. What a matrix makes of these errors depends on the matrix: compare
    other experts with ``forward(..., quantised=True)`` within :func:`tolerance`.

    Args:
        largest: as in :func:`tolerance`, and no less than any row's sum of ``|weight * element|`` and any element.
    """
    return largest * (quant.RELATIVE_ERROR + quant.ABSOLUTE_ERROR) + tolerance(dtype, world_size, topk, largest)


class _Piece(NamedTuple):
    """The rows that one source rank has in one block of a receive buffer."""

    src: int
    tokens: torch.Tensor  # int64 [N], ascending: the source's tokens
    share: torch.Tensor  # float32 [N]: what combine multiplies each row by
    rows: slice  # where they lie in the block


@dataclass(frozen=True)
class _Step:
    """One step's routing, checked and on the CPU; lists are indexed by source rank."""

    params: FleetParams
    placement: Placement
    active: list[bool]
    ids: list[torch.Tensor]  # int64 [T, K]: global ids, -1 in every slot that nobody computes
    weights: list[torch.Tensor]  # float32 [T, K]
    factors: list[torch.Tensor]  # float64 [T]: what renormalize multiplies a row by

    @classmethod
    def read(
        cls,
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        params: FleetParams,
        placement: Placement | None,
        mask: torch.Tensor | Sequence[int] | None,
    ) -> _Step:
        world_size, topk = len(topk_ids), topk_ids[0].shape[-1] if len(topk_ids) else 0
        if world_size == 0 or len(topk_weights) != world_size:
            raise config_error("topk_weights", f"{len(topk_weights)} for {world_size} topk_ids", "one each per rank")
        placement = placement or Placement.contiguous(params.num_experts, world_size)
        if (placement.num_experts, placement.world_size) != (params.num_experts, world_size):
            raise config_error(
                "placement",
                f"{placement.num_experts} experts on {placement.world_size} ranks",
                f"{params.num_experts} experts on {world_size} ranks",
            )
        active = _read_mask(mask, world_size)
        step = cls(params, placement, active, [], [], [])
        owner_of = _with_absent(placement.owner_table)
        is_active = torch.tensor([*active, False])  # owner -1 finds the last entry
        for src in range(world_size):
            ids = check_topk_ids(topk_ids[src].cpu(), params, torch.device("cpu")).long()
            if ids.shape[1] != topk:
                raise config_error("topk_ids", f"K = {ids.shape[1]} on rank {src}", f"rank 0's K = {topk}")
            weights = check_topk_weights(topk_weights[src].cpu(), ids)
            owner = owner_of[ids]
            live, lost = is_active[owner] & active[src], (owner != NO_OWNER) & ~is_active[owner]
            kept_sum = torch.where(live, weights, 0.0).sum(1, dtype=torch.float64)
            lost_sum = torch.where(lost, weights, 0.0).sum(1, dtype=torch.float64)
            rescale = torch.where(kept_sum != 0, (kept_sum + lost_sum) / kept_sum, 0.0)
            step.ids.append(torch.where(live, ids, ABSENT))
            step.weights.append(weights)
            step.factors.append(torch.where(lost.any(1), rescale, 1.0))
        return step

    @property
    def world_size(self) -> int:
        return len(self.active)

    @property
    def active_ranks(self) -> list[int]:
        return [rank for rank, active in enumerate(self.active) if active]

    @property
    def layout(self) -> EpLayout:
        return self.params.resolved_layout

    @property
    def capacity(self) -> int:
        """Rows that one block of a receive buffer holds."""
        if self.layout is EpLayout.RANK_MAJOR:
            return self.params.max_tokens_per_rank
        return self.params.recv_capacity(self.world_size)

    def local_ids(self, dst: int) -> list[torch.Tensor]:
        """Per source rank int64 ``[T, K]``: each slot's local index on ``dst``, -1 where its expert is not there."""
        table = _with_absent(self.placement.local_table(dst))
        return [table[ids] for ids in self.ids]

    def blocks(self, dst: int) -> list[list[_Piece]]:
        """What ``dst`` receives: one list of pieces for each local expert, each source rank, or the whole (FLAT)."""
        local = self.local_ids(dst)
        if self.layout is EpLayout.EXPERT_MAJOR:
            experts = range(self.placement.num_local(dst))
            named = [[(src, ids == expert) for src, ids in enumerate(local)] for expert in experts]
        else:
            here = [(src, ids != ABSENT) for src, ids in enumerate(local)]
            named = [[each] for each in here] if self.layout is EpLayout.RANK_MAJOR else [here]
        return [self._lay_out(dst, slots) for slots in named]

    def _lay_out(self, dst: int, named: list[tuple[int, torch.Tensor]]) -> list[_Piece]:
        """Pieces one after the other, from (source, bool ``[T, K]``: the slots that bring a token here)."""
        pieces, end = [], 0
        for src, slots in named:
            tokens = slots.any(1).nonzero().squeeze(1)
            share = torch.ones(len(tokens))
            if self.layout is EpLayout.EXPERT_MAJOR:  # elsewhere compute has already applied the weights
                share = torch.where(slots, self.weights[src], 0.0).sum(1)[tokens]
            start, end = end, end + len(tokens)
            pieces.append(_Piece(src, tokens, share, slice(start, end)))
        if end > self.capacity:
            raise config_error(
                "FleetParams.max_recv_tokens_per_rank",
                self.capacity,
                f"at least {end}, the rows that rank {dst} receives in this step",
                "raise it, or leave it out and nothing can overflow",
            )
        return pieces

    def rescaled(self, src: int, y_TH: torch.Tensor, renormalize: bool) -> torch.Tensor:
        """``y_TH`` of rank ``src`` after renormalisation, if it is wanted."""
        if not renormalize:
            return y_TH
        factor = self.factors[src][:, None].to(y_TH)
        return torch.where(factor != 0, y_TH * factor, 0.0)


def _receive(
    step: _Step,
    dst: int,
    xs: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
    fill: float,
    combine_dtype: torch.dtype | None,
) -> DispatchOutput:
    blocks, device = step.blocks(dst), xs[dst].device

    def packed(source: Sequence[torch.Tensor], fill: float) -> torch.Tensor:
        buffer = source[dst].new_zeros(len(blocks), step.capacity, source[dst].shape[1], device=device)
        if fill != 0:  # zeroed, not filled with 0: float8_e8m0fnu has no zero
            buffer.fill_(fill)
        for block, pieces in zip(buffer, blocks, strict=True):
            for piece in pieces:
                block[piece.rows] = source[piece.src][piece.tokens]
        return buffer[0] if step.layout is EpLayout.FLAT else buffer

    tokens = packed(xs, fill)
    scale_rows = None if scales is None else packed(scales, fill if scales[dst].is_floating_point() else 0)
    counts = torch.tensor([pieces[-1].rows.stop for pieces in blocks], dtype=torch.int32, device=device)
    out = partial(DispatchOutput, tokens, expert_scales=scale_rows, combine_dtype=combine_dtype)
    if step.layout is EpLayout.EXPERT_MAJOR:
        return out(expert_counts=counts)
    local = step.local_ids(dst)
    ids = packed(local, ABSENT)
    weights = packed([torch.where(ids != ABSENT, w, 0.0) for ids, w in zip(local, step.weights, strict=True)], 0)
    if step.layout is EpLayout.RANK_MAJOR:
        return out(ids, weights, expert_counts=counts)
    return out(ids, weights, recv_total_counter=counts)


def _numbers(out: DispatchOutput, here: torch.Tensor | tuple[int, slice]) -> torch.Tensor:
    """What received rows stand for, in float64: ``expert_tensors[here]``, fp8 times its scales."""
    rows = out.expert_tensors[here]
    if rows.dtype != quant.ROW_DTYPE or out.expert_scales is None:
        return rows.double()
    return quant.decode(rows, out.expert_scales[here], torch.float64)


def _after_fp8(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What experts see of tokens that were quantised on their way: float64 ``[T, H]``."""
    return [quant.decode(*quant.encode(x), torch.float64) for x in xs]


def _roomy(num_experts: int, hidden: int, topk_ids: Sequence[torch.Tensor]) -> FleetParams:
    """Parameters of a Fleet that this routing fits."""
    tokens, topk = (max([1, *(ids.shape[dim] for ids in topk_ids)]) for dim in (0, -1))
    return FleetParams(num_experts, tokens, hidden, max_topk=topk)


def _answer(
    step: _Step, xs: Sequence[torch.Tensor], expert: Expert, renormalize: bool, dtype: torch.dtype
) -> list[torch.Tensor | None]:
    _check_rows("xs", xs, step, step.params.token_hidden_size)
    out: list[torch.Tensor | None] = [None] * step.world_size
    for src in step.active_ranks:
        y_TH = _weighted_sum(xs[src], step.ids[src], step.weights[src], expert)
        out[src] = step.rescaled(src, y_TH, renormalize).to(dtype)
    return out


def _weighted_sum(x_NH: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor, expert: Expert) -> torch.Tensor:
    """float64 ``[N, H]``: the sum of weight times expert output over each row's ids; -1 adds nothing."""
    y_NH = torch.zeros_like(x_NH, dtype=torch.float64)
    for index in ids_NK[ids_NK != ABSENT].unique().tolist():
        slots = ids_NK == index
        rows = slots.any(1).nonzero().squeeze(1)
        share = torch.where(slots, weights_NK, 0.0).sum(1, dtype=torch.float64)[rows]
        y_NH[rows] += share[:, None].to(y_NH) * expert(x_NH[rows].double(), index)
    return y_NH


def _with_absent(table: torch.Tensor) -> torch.Tensor:
    """A table of ids with -1 at the end, which is where id -1 looks."""
    return torch.cat([table, torch.tensor([ABSENT])])


def _read_mask(mask: torch.Tensor | Sequence[int] | None, world_size: int) -> list[bool]:
    values = [1] * world_size if mask is None else [int(value) for value in mask]
    if len(values) != world_size or not set(values) <= {0, 1}:
        raise config_error("mask", values, f"{world_size} values, each 0 (masked) or 1 (active)")
    return [value == 1 for value in values]


def _check_rows(
    field: str, rows: Sequence[torch.Tensor], step: _Step, width: int | None, row_bytes: int | None = None
) -> None:
    """One ``[T, width]`` for each rank of the step, all of one dtype, each row ``row_bytes`` long."""
    if len(rows) != step.world_size:
        raise config_error(field, f"{len(rows)} tensors", f"{step.world_size}, one per rank as in topk_ids")
    for rank, (each, ids) in enumerate(zip(rows, step.ids, strict=True)):
        check_tensor(f"{field}[{rank}]", each, shape=(len(ids), width), dtypes=(rows[0].dtype,))
        got_bytes = each.shape[1] * each.element_size()
        if row_bytes is not None and got_bytes != row_bytes:
            got = f"{each.dtype} rows of {got_bytes} bytes"
            raise config_error(f"{field}[{rank}]", got, f"{row_bytes} bytes, as FleetParams says")


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name not in ACTIVATIONS:
        raise config_error("activation", repr(name), ", ".join(map(repr, ACTIVATIONS)))
    return ACTIVATIONS[name]
