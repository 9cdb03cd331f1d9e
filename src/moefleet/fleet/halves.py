"""A Handle as four halves: the phases, checks and error paths that our own transports share.

A transport's Handle fills in the halves alone; a transport's Fleet keeps the sequence of steps.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..config import BootstrapConfig, EpLayout, FleetParams
from ..errors import MoEEpConfigError, config_error
from ..knobs import (
    HandleAlgoKnob,
    HandleAlgoKnobNumReceivedTokens,
    HandleAlgoKnobSplitOperation,
    HandleAlgoKnobTopKWeights,
)
from ..routing import check_topk_ids, check_topk_weights
from ..substrate.rowtypes import DTYPES
from ..tensors import (
    CombineInputParams,
    CombineOutput,
    DispatchInputParams,
    DispatchOutput,
    HandleParams,
    check_tensor,
    is_plain,
)
from .base import Handle


class StepKeeper(Protocol):
    """The sequence of a Fleet's steps."""

    def begin(self) -> int:
        """Open the next step and return its number. Raises MoEEpConfigError where two are open already."""

    def close(self, step: int) -> None:
        """The step went well on this rank."""

    def fail(self, step: int, error: BaseException | str) -> None:
        """Give an open step up, and tell the peers."""

    def fail_next(self, error: BaseException) -> None:
        """Give up the step that was about to begin, and tell the peers."""


class SteppedFleet(Protocol):
    """What a :class:`HalvesHandle` needs of its Fleet."""

    bootstrap: BootstrapConfig
    params: FleetParams
    device: torch.device
    row_dtypes: tuple[torch.dtype, ...]
    failed_steps: int

    @property
    def steps(self) -> StepKeeper: ...

    def require_alive(self) -> None:
        """Raise MoEEpError once the Fleet was destroyed."""


class Phase(enum.Enum):
    """Where a handle stands; the value is what its user has to call next."""

    IDLE = "dispatch"
    DISPATCH_SENT = "dispatch_recv_only (or complete)"
    RECEIVED = "combine"
    COMBINE_SENT = "combine_recv_only (or complete)"
    DESTROYED = "nothing: it was destroyed"


@dataclass
class OpenStep:
    """What an open step keeps between its phases. Transports add what they need.

    Attributes:
        step: its number.
        dtype, scale_dtype: of the rows on the way there; ``dtype`` becomes that of the rows on the way back.
        output: what dispatch returns.
        result: where combine writes, if the caller gave a place.
    """

    step: int
    dtype: torch.dtype
    scale_dtype: torch.dtype | None
    output: DispatchOutput
    result: torch.Tensor | None = None


F = TypeVar("F", bound=SteppedFleet)
S = TypeVar("S", bound=OpenStep)


class HalvesHandle(Handle, Generic[F, S]):
    """A step's routing; see :class:`moefleet.fleet.Handle` for the contract, and below for what a transport adds."""

    def __init__(self, fleet: F, params: HandleParams, knobs: Sequence[HandleAlgoKnob]) -> None:
        self._fleet = fleet
        self._phase = Phase.IDLE
        self._open: S | None = None
        self._failing_alone = _FailingAlone(self)
        self._split = False
        self._expected_rows: int | None = None
        self._given_weights: torch.Tensor | None = None
        self._shape = torch.Size()
        try:
            self._read(params, knobs)
        except MoEEpConfigError as error:
            self._fail_next(error)
            raise

    @abstractmethod
    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        """Keep copies of ids ``[T, K]`` (int32 or int64) and float32 weights ``[T, K]``; both are checked already."""

    @abstractmethod
    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> S:
        """The step's record, with the DispatchOutput whose memory :meth:`_receive_tokens` will fill."""

    @abstractmethod
    def _send_tokens(self, open_: S, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        """First half of dispatch."""

    @abstractmethod
    def _receive_tokens(self, open_: S) -> None:
        """Second half of dispatch: fill ``open_.output``."""

    def _exchange_tokens(self, open_: S, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Both halves of dispatch, where nothing happens between them."""
        self._send_tokens(open_, tokens, scales)
        self._receive_tokens(open_)

    @abstractmethod
    def _send_rows(self, open_: S, rows: torch.Tensor) -> None:
        """First half of combine: ``rows`` has ``expert_tensors``' shape."""

    def _exchange_rows(self, open_: S, rows: torch.Tensor) -> torch.Tensor:
        """Both halves of combine, where nothing happens between them."""
        self._send_rows(open_, rows)
        return self._receive_rows(open_)

    @abstractmethod
    def _receive_rows(self, open_: S) -> torch.Tensor:
        """Second half of combine: ``[T, H]``, a tensor of its own."""

    def update(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> None:
        self._expect(Phase.IDLE, "update")
        try:
            if params.topk_ids.shape != self._shape:
                raise config_error(
                    "update: topk_ids",
                    f"shape {list(params.topk_ids.shape)}",
                    f"{list(self._shape)}, which this handle was created with",
                    "create another handle for another number of tokens",
                )
            self._read(params, algo_knobs)
        except MoEEpConfigError as error:
            self._fail_next(error)
            raise

    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        if self._split:
            self.dispatch_send_only(params)
            return self._opened().output
        open_, tokens, scales = self._start(params)
        with self._failing_alone:
            self._exchange_tokens(open_, tokens, scales)
            self._phase = Phase.RECEIVED
        return open_.output

    def dispatch_send_only(self, params: DispatchInputParams) -> None:
        open_, tokens, scales = self._start(params)
        with self._failing_alone:
            self._send_tokens(open_, tokens, scales)
            self._phase = Phase.DISPATCH_SENT

    def dispatch_recv_only(self) -> DispatchOutput:
        self._expect(Phase.DISPATCH_SENT, "dispatch_recv_only")
        open_ = self._opened()
        with self._failing_alone:
            self._receive_tokens(open_)
            self._phase = Phase.RECEIVED
        return open_.output

    def combine(self, params: CombineInputParams) -> CombineOutput:
        if not self._split:
            self._expect(Phase.RECEIVED, "combine")
            open_ = self._opened()
            with self._failing_alone:
                return self._close(open_, self._exchange_rows(open_, self._rows_of(params, open_)))
        self.combine_send_only(params)
        open_ = self._opened()
        if open_.result is None:
            shape = (self._shape[0], self._fleet.params.token_hidden_size)
            open_.result = torch.empty(shape, dtype=open_.dtype, device=self._fleet.device)
        return CombineOutput(open_.result)

    def combine_send_only(self, params: CombineInputParams) -> None:
        self._expect(Phase.RECEIVED, "combine")
        open_ = self._opened()
        with self._failing_alone:
            self._send_rows(open_, self._rows_of(params, open_))
            self._phase = Phase.COMBINE_SENT

    def combine_recv_only(self) -> CombineOutput:
        self._expect(Phase.COMBINE_SENT, "combine_recv_only")
        open_ = self._opened()
        with self._failing_alone:
            return self._close(open_, self._receive_rows(open_))

    def complete(self) -> None:
        if self._phase is Phase.DISPATCH_SENT:
            self.dispatch_recv_only()
        elif self._phase is Phase.COMBINE_SENT:
            self.combine_recv_only()

    def destroy(self) -> None:
        if self._open is not None:
            self._fleet.failed_steps += 1
            self._fleet.steps.fail(self._open.step, "its handle was destroyed before the step was combined")
            self._open = None
        self._phase = Phase.DESTROYED

    def give_up(self, error: BaseException) -> None:
        """Fail the open step for the peers as well; the handle is idle again."""
        if self._open is not None:
            self._fleet.failed_steps += 1
            self._fleet.steps.fail(self._open.step, error)
            self._open.result = None
        self._open, self._phase = None, Phase.IDLE

    def _start(self, params: DispatchInputParams) -> tuple[S, torch.Tensor, torch.Tensor | None]:
        """Check what dispatch was given, and open the step."""
        tokens, scales = self._checked_input(params)
        self._open = open_ = self._opening(tokens, scales)
        return open_, tokens, scales

    def _checked_input(self, params: DispatchInputParams) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and scales; a mistake in them fails the step that was about to begin."""
        self._expect(Phase.IDLE, "dispatch")
        try:
            return self._check_input(params)
        except MoEEpConfigError as error:
            self._fail_next(error)
            raise

    def _opening(self, tokens: torch.Tensor, scales: torch.Tensor | None) -> S:
        """Begin the next step; what goes wrong then, such as memory that is not there, fails it."""
        step = self._fleet.steps.begin()
        try:
            return self._open_step(step, tokens.dtype, None if scales is None else scales.dtype)
        except BaseException as error:
            self._fleet.failed_steps += 1
            self._fleet.steps.fail(step, error)
            raise

    def _rows_of(self, params: CombineInputParams, open_: S) -> torch.Tensor:
        """Check what combine was given."""
        rows, open_.result = self._check_rows(params, open_)
        open_.dtype = rows.dtype
        return rows

    def _close(self, open_: S, summed: torch.Tensor) -> CombineOutput:
        """Put the result where the caller wants it, and close the step."""
        result, open_.result = open_.result, None
        if result is not None and result is not summed:
            summed = result.copy_(summed)
        self._open, self._phase = None, Phase.IDLE
        self._fleet.steps.close(open_.step)
        return CombineOutput(summed)

    def _fail_next(self, error: BaseException) -> None:
        self._fleet.failed_steps += 1
        self._fleet.steps.fail_next(error)

    def _read(self, params: HandleParams, knobs: Sequence[HandleAlgoKnob]) -> None:
        fleet = self._fleet
        ids = check_topk_ids(params.topk_ids, fleet.params, fleet.device)
        given, split, expected_rows = self._given_weights, self._split, self._expected_rows
        for knob in knobs:
            match knob:
                case HandleAlgoKnobTopKWeights(weights):
                    given = weights
                case HandleAlgoKnobSplitOperation():
                    split = True
                case HandleAlgoKnobNumReceivedTokens(target):
                    expected_rows = target
                case _:
                    self._honour(knob)
        if given is None:
            raise config_error(
                "algo_knobs",
                "no HandleAlgoKnobTopKWeights",
                "routing weights [T, K] at creation, in every layout",
                "pass algo_knobs=[HandleAlgoKnobTopKWeights(weights)]",
            )
        weights = check_topk_weights(given, ids)
        # Only now, so that a refused update changes nothing.
        self._given_weights, self._split, self._expected_rows = given, split, expected_rows
        self._shape = ids.shape
        self._snapshot(ids, weights.detach() if weights.requires_grad else weights)

    def _honour(self, knob: HandleAlgoKnob) -> None:
        """Apply a knob of the transport's own, or raise."""
        raise config_error(
            "algo_knobs",
            type(knob).__name__,
            "HandleAlgoKnobTopKWeights, HandleAlgoKnobSplitOperation, HandleAlgoKnobNumReceivedTokens",
            "leave it out: this transport cannot honour it",
        )

    def _check_input(self, params: DispatchInputParams) -> tuple[torch.Tensor, torch.Tensor | None]:
        p, count, device = self._fleet.params, self._shape[0], self._fleet.device
        shape, dtypes = (count, p.token_hidden_size), self._fleet.row_dtypes
        want = 2 if p.scale_bytes_per_token else 1
        if want == len(params.x) == 1 and is_plain(params.x[0], shape, dtypes, device):
            return params.x[0], None
        if len(params.x) != want:
            raise config_error(
                "DispatchInputParams.x",
                f"{len(params.x)} tensors",
                "[tokens, scales]" if want == 2 else "[tokens]",
                f"scale_bytes_per_token is {p.scale_bytes_per_token}",
            )
        check_tensor("DispatchInputParams.x[0]", params.x[0], shape=shape, dtypes=dtypes, device=device)
        if want == 1:
            return _own_values(params.x[0]), None
        scales = params.x[1]
        check_tensor("DispatchInputParams.x[1]", scales, shape=(count, None), dtypes=(scales.dtype,), device=device)
        if scales.shape[1] * scales.element_size() != p.scale_bytes_per_token:
            raise config_error(
                "DispatchInputParams.x[1]",
                f"{scales.shape[1]} scales of {scales.dtype} per token",
                f"scale_bytes_per_token = {p.scale_bytes_per_token} bytes in all",
            )
        return _own_values(params.x[0]), _own_values(scales)

    def _check_rows(self, params: CombineInputParams, open_: OpenStep) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(params.x) != 1:
            raise config_error("CombineInputParams.x", f"{len(params.x)} tensors", "[rows]")
        rows, out, device = params.x[0], params.out, self._fleet.device
        shape, dtypes = open_.output.expert_tensors.shape, DTYPES[self._fleet.params.combine_bytes]
        if out is None and is_plain(rows, shape, dtypes, device):
            return rows, None
        check_tensor("CombineInputParams.x[0]", rows, shape=shape, dtypes=dtypes, device=device)
        if out is not None:
            want = (self._shape[0], rows.shape[-1])
            check_tensor("CombineInputParams.out", out, shape=want, dtypes=(rows.dtype,), device=device)
        return _own_values(rows), out

    def _check_room(self, rows: int) -> None:
        """Whether the rows that arrived fit, and are as many as the caller said."""
        p, rank, world = self._fleet.params, self._fleet.bootstrap.rank, self._fleet.bootstrap.world_size
        if p.layout is EpLayout.FLAT and rows > p.recv_capacity(world):
            raise config_error(
                "FleetParams.max_recv_tokens_per_rank",
                f"{rows} rows arrived on rank {rank}",
                f"at most {p.recv_capacity(world)}",
                f"build the Fleet with max_recv_tokens_per_rank >= {rows}; M*W always suffices",
            )
        if self._expected_rows is not None and rows != self._expected_rows:
            raise config_error(
                "HandleAlgoKnobNumReceivedTokens.target", self._expected_rows, f"the {rows} that arrived"
            )

    def _expect(self, phase: Phase, call: str) -> None:
        self._fleet.require_alive()
        if self._phase is not phase:
            raise config_error(
                call, f"a handle whose next call is {self._phase.value}", f"one whose next is {phase.value}"
            )

    def _opened(self) -> S:
        assert self._open is not None, "phases and open steps go together"
        return self._open


def _own_values(tensor: torch.Tensor) -> torch.Tensor:
    """What transports may read as memory: no gradient, and no view of the negative of what is there."""
    return tensor.detach().resolve_neg()


class _FailingAlone:
    """What goes wrong on this rank in an open step is told to the peers before the error goes on."""

    def __init__(self, handle: HalvesHandle[Any, Any]) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if error is not None:
            self._handle.give_up(error)
