"""Gated experts ``w2 @ (act(gate) * up)`` over the rows that exist, with or without biases, as grouped products.

``N`` below is the number of pairs (row, local expert) that exist. Three functions multiply each expert's rows by its
matrices. Which one runs on the CPU was measured; ``python benchmarks/expert_gemm.py`` repeats that:

- :class:`FewRows`, one call of the compiled helper, for float32 and few rows, where torch has one thread or the
  weights are small: up to 2.6 times as fast as the next where calls take the time (H 128, I 96), and 1.04 to 1.9 times
  where memory does, as it reads each matrix once. Before and after it there is next to nothing to do.

- :func:`grouped_experts`, two ``torch.nn.functional.grouped_mm`` over rows gathered by expert, for RANK_MAJOR and
  FLAT, which gather anyway: 1.2 to 1.7 times as fast for few rows of small experts, where calls take the time, and
  equal elsewhere.
- :func:`each_expert`, ``torch.mm`` per expert, for EXPERT_MAJOR, whose blocks it reads and writes in place (the
  copies around ``grouped_mm`` cost what it saves), and for weights that ``grouped_mm`` does not take.

On CUDA :func:`grouped_experts` runs in every layout, with the counts left on the device, if it takes the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F

from .. import quant
from ..config import EpLayout, FleetParams, GroupedGemmConfig, KernelConfig
from ..errors import config_error
from ..tensors import DispatchOutput
from ..weights import MoEWeights, PrequantizedMoEWeights, UnquantizedMoEWeights
from . import prequantized
from .base import ExpertKernel
from .few_rows import FewRows
from .received import gathered, numbers

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_VIA_FLOAT_ROWS = 4
"""Rows of an expert from which a CPU without float16 arithmetic is faster in float32, conversion included."""

FEW_ROWS = 8
"""Rows of an expert, on average, up to which :class:`FewRows` is faster."""
SMALL_BYTES = 1 << 21
"""Weights up to this, about a core's own cache, take no second thread: torch's other threads are of no use to them."""


@dataclass(frozen=True)
class ClampedGate:
    """An activation with what :class:`GroupedGemmConfig` may do to its inputs first."""

    activation: Activation
    limit: float | None
    up_shift: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.activation(gate).mul_(up + self.up_shift)


class GroupedGemmKernel(ExpertKernel):
    """Gated experts, w13 ``[L, 2I, H]`` and w2 ``[L, H, I]``, in the dtype of combine's rows.

    Rows that came as fp8 are decoded to that type first: on CUDA the whole buffer (in EXPERT_MAJOR a row
    for each of the experts that a token can have here), elsewhere what exists.
    Prequantised weights are decoded to bfloat16 once, at construction: see :mod:`moefleet.kernels.prequantized`.

    Raises:
        MoEEpConfigError: no activation has this name, or an option does not go with it.
    """

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        assert isinstance(config, GroupedGemmConfig), f"a GroupedGemmConfig, not a {type(config).__name__}"
        if config.activation not in ACTIVATIONS:
            raise config_error("GroupedGemmConfig.activation", repr(config.activation), ", ".join(ACTIVATIONS))
        if config.alpha != 1.0 and config.activation != "silu":
            raise config_error("GroupedGemmConfig.alpha", config.alpha, f"1 with {config.activation!r}")
        if config.limit is not None and not config.limit > 0:
            raise config_error("GroupedGemmConfig.limit", config.limit, "more than 0, or None")
        self.activation: Activation | ClampedGate = ACTIVATIONS[config.activation]
        if config.alpha != 1.0:
            self.activation = partial(_scaled_silu, alpha=config.alpha)
        if config.limit is not None or config.up_shift:
            self.activation = ClampedGate(self.activation, config.limit, config.up_shift)
        self._few_rows = FewRows.of(config)
        self._most_topk = sys.maxsize

    def validate(self, params: FleetParams, weights: MoEWeights | None) -> None:
        """Raise :class:`MoEEpConfigError` unless the weights are of a known format and fit this Fleet's rows."""
        if weights is None:
            raise config_error("weights", "none", "some with kernel 'grouped_gemm'", "give MoEWeightPack(w13, w2)")
        experts, _, hidden = weights.w13.shape
        if isinstance(weights, PrequantizedMoEWeights):
            prequantized.check(weights)
            dtype = prequantized.DECODED
        else:
            dtype = weights.w13.dtype
        if dtype not in DTYPES:
            raise config_error("weights.w13", f"dtype {dtype}", " or ".join(str(allowed) for allowed in DTYPES))
        if dtype.itemsize != params.combine_bytes:
            raise config_error(
                "weights.w13",
                f"dtype {dtype}",
                f"a type of {params.combine_bytes} bytes, like combine's rows",
                f"convert the weights, or change FleetParams.dtype_bytes = {params.dtype_bytes}",
            )
        self._most_topk = params.max_topk
        if hidden != params.token_hidden_size:
            raise config_error(
                "weights.w13", f"H = {hidden}", f"FleetParams.token_hidden_size = {params.token_hidden_size}"
            )
        if experts > params.num_experts:
            raise config_error(
                "weights.w13", f"{experts} local experts", f"at most FleetParams.num_experts = {params.num_experts}"
            )

    def preprocess(self, weights: MoEWeights | None) -> MoEWeights | None:
        """Prequantised weights decoded to bfloat16; others as they are."""
        return prequantized.decoded(weights) if isinstance(weights, PrequantizedMoEWeights) else weights

    def compute(
        self,
        out: DispatchOutput,
        layout: EpLayout,
        weights: MoEWeights | None,
        *,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of ``out.expert_tensors``' shape in the weights' dtype, in ``into`` (which may be the memory of
        ``expert_tensors`` where the type is the same) or a new tensor.

        RANK_MAJOR and FLAT sum a row's weighted experts in float32 and round once. On CUDA nothing waits for the
        stream if ``grouped_mm`` takes the weights: contiguous bfloat16, ``H`` and ``I`` multiples of 8. Temporaries are
        then sized for all rows that can arrive. For other weights the host reads the counts, which does wait.

        Raises:
            MoEEpConfigError: the rows' dtype, or their ``L`` in EXPERT_MAJOR, is not that of the weights.
        """
        assert isinstance(weights, UnquantizedMoEWeights), "validate() says which weights this kernel takes"
        rows, w13 = out.expert_tensors, weights.w13
        if rows.dtype not in (w13.dtype, quant.ROW_DTYPE):
            raise config_error(
                "expert_tensors", f"dtype {rows.dtype}", f"the weights' {w13.dtype}", "convert one of them"
            )
        if layout is EpLayout.EXPERT_MAJOR and len(rows) != len(w13):
            raise config_error("expert_tensors", f"{len(rows)} blocks", f"the weights' L = {len(w13)}, one per expert")
        result = torch.empty_like(rows, dtype=w13.dtype) if into is None else into
        few = self._few_rows if torch.get_num_threads() == 1 or w13.nbytes <= SMALL_BYTES else None
        if few is not None and few.compute(out, weights, result, FEW_ROWS * w13.shape[0]):
            return result
        with torch.no_grad():
            if not len(w13):  # this rank holds no experts
                result.zero_()
            elif rows.is_cuda and takes_grouped_mm(weights):
                self._on_device(out, weights, result)
            elif layout is EpLayout.EXPERT_MAJOR:
                self._by_expert(out, weights, result)
            else:
                self._by_token(out, weights, result)
        return result

    def _by_expert(self, out: DispatchOutput, weights: UnquantizedMoEWeights, result: torch.Tensor) -> None:
        """EXPERT_MAJOR: rows and results stay where they are."""
        assert out.expert_counts is not None
        counts = out.expert_counts.tolist()
        sources = [numbers(out, (index, slice(n)), result.dtype) for index, n in enumerate(counts)]
        each_expert(sources, weights, self.activation, [block[:n] for block, n in zip(result, counts)])

    def _by_token(self, out: DispatchOutput, weights: UnquantizedMoEWeights, result: torch.Tensor) -> None:
        """RANK_MAJOR, and FLAT as if from one source: sort the pairs by expert, compute each, sum those of each row.

        Suffixes: B sources, C their capacity, R rows that exist, N pairs.
        """
        rows, ids, factors = out.expert_tensors, out.recv_topk_idx, out.recv_topk_weights
        counts = out.recv_total_counter if out.expert_counts is None else out.expert_counts
        assert counts is not None and ids is not None and factors is not None
        fronts = [(block, count) for block, count in enumerate(counts.tolist()) if count]
        if not fronts:
            return
        capacity, hidden = rows.shape[-2:]
        experts = weights.num_local_experts

        def existing(plane: torch.Tensor) -> np.ndarray:
            plane_BCK = plane.cpu().numpy().reshape(-1, capacity, plane.shape[-1])
            return np.concatenate([plane_BCK[block, :count] for block, count in fronts])

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(rows.device)

        ids_RK = existing(ids)
        here_RK = (ids_RK >= 0) & (ids_RK < experts)
        row_N, expert_N = here_RK.nonzero()[0], ids_RK[here_RK]
        sort_N = expert_N.argsort(kind="stable")
        ends_L = expert_N[sort_N].searchsorted(np.arange(experts), side="right")

        position_R = np.concatenate([np.arange(block * capacity, block * capacity + n) for block, n in fronts])
        x_NH = gathered(out, tensor(position_R[row_N[sort_N]]), result.dtype)
        if takes_grouped_mm(weights):
            y_NH = grouped_experts(x_NH, weights, self.activation, tensor(ends_L.astype(np.int32)))
        else:
            y_NH, sizes = torch.empty_like(x_NH), np.diff(ends_L, prepend=0).tolist()
            each_expert(x_NH.split(sizes), weights, self.activation, y_NH.split(sizes))

        # As an embedding bag: the table is y, and a row's bag holds the places of its pairs in it.
        place_N = np.empty_like(sort_N)
        place_N[sort_N] = np.arange(len(sort_N))
        sums_RH = F.embedding_bag(
            tensor(place_N),
            y_NH.float(),
            tensor(row_N.searchsorted(np.arange(len(ids_RK)))),
            mode="sum",
            per_sample_weights=tensor(existing(factors)[here_RK]),
        )
        start, result_BCH = 0, result.view(-1, capacity, hidden)
        for block, count in fronts:
            result_BCH[block, :count] = sums_RH[start : start + count]
            start += count

    def _blocks_on_device(self, out: DispatchOutput, weights: UnquantizedMoEWeights, result: torch.Tensor) -> None:
        """EXPERT_MAJOR, in shapes that do not depend on the counts: the rows that exist side by side, computed, and
        back where they were. Of what arrives, a token has a row for at most ``K`` experts.
        """
        assert out.expert_counts is not None
        counts = out.expert_counts.to(torch.int32)
        experts, capacity = out.expert_tensors.shape[:2]
        ends = counts.cumsum(0, dtype=torch.int32)
        number = torch.arange(min(experts, self._most_topk) * capacity, dtype=torch.int32, device=counts.device)
        expert = torch.searchsorted(ends, number, right=True).clamp_(max=experts - 1)
        padding = counts.argmin()  # the block of a row that does not exist, for numbers past the last end
        place = torch.where(
            number < ends[-1],
            expert * capacity + (number - (ends - counts)[expert]),
            padding * capacity + counts.min(),
        )
        y = grouped_experts(gathered(out, place, result.dtype), weights, self.activation, ends)
        result[place // capacity, place % capacity] = y

    def _on_device(self, out: DispatchOutput, weights: UnquantizedMoEWeights, result: torch.Tensor) -> None:
        """Any layout, in shapes that do not depend on the counts: pairs that are not here sort behind the last expert,
        where ``grouped_mm`` computes nothing, and what lies there is selected away.
        """
        rows, ids, factors = out.expert_tensors, out.recv_topk_idx, out.recv_topk_weights
        if ids is None or factors is None:
            return self._blocks_on_device(out, weights, result)
        counts = out.recv_total_counter if out.expert_counts is None else out.expert_counts
        assert counts is not None
        capacity = rows.shape[-2]
        experts = torch.arange(weights.num_local_experts, device=rows.device)
        absent = len(experts)
        ids = ids.reshape(len(counts), capacity, -1)
        exists = (torch.arange(capacity, device=rows.device) < counts[:, None])[..., None]
        key = torch.where(exists & (ids >= 0), ids, absent)
        sorted_key, order = key.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_key, experts, right=True, out_int32=True)
        x = numbers(out, ..., result.dtype).flatten(0, -2).index_select(0, order // key.shape[2])
        y = grouped_experts(x, weights, self.activation, ends).index_select(0, order.argsort()).unflatten(0, key.shape)
        terms = y.float() * factors.reshape(key.shape)[..., None]
        result.copy_(torch.where(key[..., None] < absent, terms, 0.0).sum(2).view(result.shape))


def takes_grouped_mm(weights: UnquantizedMoEWeights) -> bool:
    """Whether ``grouped_mm`` accepts these weights and is no slower with them than other products."""
    w13, w2 = weights.w13, weights.w2
    if w13.is_cuda:
        fast = w13.dtype is torch.bfloat16
    else:
        fast = w13.dtype is not torch.float16 or _half_is_native()
    _, hidden, inter = w2.shape
    aligned = not (hidden * w2.itemsize % 16 or inter * w2.itemsize % 16)
    return fast and aligned and w13.is_contiguous() and w2.is_contiguous()


def grouped_experts(
    x_NH: torch.Tensor, weights: UnquantizedMoEWeights, activation: Activation | ClampedGate, ends_L: torch.Tensor
) -> torch.Tensor:
    """All experts at once: rows sorted by expert, expert ``e``'s up to ``ends_L[e]`` (int32). Rows past the last end
    are not computed and undefined in the result ``[N, H]``.
    """
    h = F.grouped_mm(x_NH, weights.w13.mT, offs=ends_L)
    if weights.w13_bias is None or weights.w2_bias is None:
        return F.grouped_mm(_gated(h, activation), weights.w2.mT, offs=ends_L)
    rows = torch.arange(len(x_NH), dtype=torch.int32, device=x_NH.device)
    expert_N = torch.searchsorted(ends_L, rows, right=True).clamp_(max=len(ends_L) - 1)
    h += weights.w13_bias[expert_N]
    return F.grouped_mm(_gated(h, activation), weights.w2.mT, offs=ends_L).add_(weights.w2_bias[expert_N])


def each_expert(
    sources: Sequence[torch.Tensor],
    weights: UnquantizedMoEWeights,
    activation: Activation | ClampedGate,
    targets: Sequence[torch.Tensor],
) -> None:
    """Expert by expert: ``sources[e]`` ``[n_e, H]`` through expert ``e`` into ``targets[e]``."""
    counts = [len(source) for source in sources]
    h_NI = weights.w13.new_empty(sum(counts), weights.w13.shape[1])
    _products(sources, weights.w13, weights.w13_bias, h_NI.split(counts))
    _products(_gated(h_NI, activation).split(counts), weights.w2, weights.w2_bias, targets)


def _products(
    sources: Sequence[torch.Tensor],
    matrices: torch.Tensor,
    biases: torch.Tensor | None,
    targets: Sequence[torch.Tensor],
) -> None:
    via_float = matrices.dtype is torch.float16 and not matrices.is_cuda and not _half_is_native()
    for expert, (source, matrix, target) in enumerate(zip(sources, matrices.mT, targets)):
        if via_float and len(source) >= HALF_VIA_FLOAT_ROWS:
            target.copy_(source.float() @ matrix.float())
        elif len(source):
            torch.mm(source, matrix, out=target)
        if biases is not None:
            target += biases[expert]


def _gated(h: torch.Tensor, activation: Activation | ClampedGate) -> torch.Tensor:
    gate, up = h.chunk(2, -1)
    if isinstance(activation, ClampedGate):
        return activation(gate, up)
    return activation(gate).mul_(up)


def _scaled_silu(gate: torch.Tensor, alpha: float) -> torch.Tensor:
    return gate * torch.sigmoid(gate * alpha)


@cache
def _half_is_native() -> bool:
    """Whether this CPU has float16 arithmetic; elsewhere torch multiplies float16 in a scalar loop."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False
