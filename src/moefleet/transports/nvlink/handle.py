"""One step over NVLink: three launches, or more where the halves are called apart.

A step's host work is a large part of an eager step, so what was checked and bound for one kind of tensors (type,
shape, strides, device, alignment) is kept with the slot, and later tensors of that kind go straight to the launch,
also those of later handles of the same ``[T, K]`` on that slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...config import EpLayout
from ...errors import MoEEpConfigError, MoEEpError, config_error
from ...fleet.halves import HalvesHandle, OpenStep, Phase
from ...knobs import HandleAlgoKnob, HandleAlgoKnobTopKWeights, HandleAlgoKnobUserStream
from ...tensors import CombineInputParams, CombineOutput, DispatchInputParams, DispatchOutput, HandleParams
from .outputs import AnnouncedOutput

if TYPE_CHECKING:
    from .fleet import NVLinkFleet
    from .launch import Launch


@dataclass
class NVLinkStep(OpenStep):
    """``index``: its output set; ``sent``, ``scales``: what the receiving half takes this rank's own rows from;
    ``kinds``: theirs, and the handle's shape."""

    index: int = 0
    kinds: Hashable = None
    sent: torch.Tensor | None = None
    scales: torch.Tensor | None = None


class NVLinkHandle(HalvesHandle["NVLinkFleet", NVLinkStep]):
    """See :class:`moefleet.fleet.Handle` for the contract.

    A handle that was used while its stream was being captured keeps its memory when destroyed: the graph reads it.
    """

    def __init__(self, fleet: NVLinkFleet, params: HandleParams, knobs: Sequence[HandleAlgoKnob]) -> None:
        self._slot: torch.Tensor | None = None
        self._captured = False
        self._bound: dict[Hashable, Launch] = {}
        self._generation = fleet.generation
        super().__init__(fleet, params, knobs)

    def update(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> None:
        ids, weights = params.topk_ids, self._given_weights
        if len(algo_knobs) == 1 and type(algo_knobs[0]) is HandleAlgoKnobTopKWeights:
            weights, algo_knobs = algo_knobs[0].weights, ()
        launch = None if algo_knobs else self._bound.get(("update", self._shape, _kind(ids), _kind(weights)))
        if launch is None or not self._ready(Phase.IDLE):
            super().update(params, algo_knobs or (() if weights is None else (HandleAlgoKnobTopKWeights(weights),)))
            return
        self._given_weights = weights
        launch(self._stream(), ids, weights)  # type: ignore[arg-type]  # a kind that was bound is a tensor's

    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        if self._split:
            return super().dispatch(params)
        open_ = self._begin(params)
        try:
            self._launch_dispatch(open_, send=True, receive=True)
            if self._fleet.checking:
                self._fleet.check_now()
        except BaseException as error:
            self.give_up(error)
            raise
        self._phase = Phase.RECEIVED
        return open_.output

    def combine(self, params: CombineInputParams) -> CombineOutput:
        if self._split:
            return super().combine(params)
        if not self._ready(Phase.RECEIVED):
            self._expect(Phase.RECEIVED, "combine")
        open_, rows, out = self._opened(), params.x[0] if len(params.x) == 1 else None, params.out
        try:
            launch = self._bound.get(("combine", self._shape, _kind(rows), _kind(out)))
            if launch is not None:
                assert rows is not None, "its kind was bound"
                if out is None:
                    out = self._new_result(rows)
                launch(self._stream(), rows, out)
            else:
                rows, open_.result = self._check_rows(params, open_)
                open_.dtype = rows.dtype
                out = self._launch_combine(open_, rows, send=True, receive=True)
        except BaseException as error:
            self.give_up(error)
            raise
        self._open, self._phase = None, Phase.IDLE
        self._fleet.steps.close(open_.step)
        if self._fleet.checking:
            self._fleet.check_now()
        return CombineOutput(out)

    def dispatch_send_only(self, params: DispatchInputParams) -> None:
        open_ = self._begin(params)
        with self._failing_alone:
            self._launch_dispatch(open_, send=True, receive=False)
            self._phase = Phase.DISPATCH_SENT

    def combine_recv_only(self) -> CombineOutput:
        self._expect(Phase.COMBINE_SENT, "combine_recv_only")
        open_ = self._opened()
        with self._failing_alone:
            result = self._receive_rows(open_)
        self._open, self._phase = None, Phase.IDLE
        self._fleet.steps.close(open_.step)
        self._fleet.check_now()
        return CombineOutput(result)

    def destroy(self) -> None:
        super().destroy()
        if self._slot is not None and self._generation == self._fleet.generation:
            self._fleet.return_slot(self._slot, captured=self._captured)
        self._slot = None

    def _ready(self, phase: Phase) -> bool:
        """Whether this call is in order and nothing is to be raised; if not, the long way says why."""
        return self._phase is phase and self._generation == self._fleet.generation and self._fleet.quiet()

    def _expect(self, phase: Phase, call: str) -> None:
        if self._generation != self._fleet.generation:
            raise config_error(
                call, "a handle from before update_topology", "one of the present ranks", "create it anew"
            )
        try:
            super()._expect(phase, call)
        except MoEEpConfigError:
            raise  # a call out of order leaves the step as it is
        except MoEEpError as error:
            self.give_up(error)
            raise

    def _begin(self, params: DispatchInputParams) -> NVLinkStep:
        """Check the input and open the step. What was bound once was checked."""
        tokens, scales = params.x[0] if params.x else None, params.x[1] if len(params.x) == 2 else None
        kinds = self._shape, _kind(tokens), _kind(scales)
        known = ("dispatch", 0, kinds) in self._bound and len(params.x) == (1 if scales is None else 2)
        if not known or not self._ready(Phase.IDLE):
            tokens, scales = self._checked_input(params)
            kinds = self._shape, _kind(tokens), _kind(scales)
        assert tokens is not None, "it was checked"
        open_ = self._opening(tokens, scales)
        open_.kinds, open_.sent, open_.scales, self._open = kinds, tokens, scales, open_
        return open_

    def _snapshot(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        engine = self._fleet.engine
        if self._slot is None:
            self._slot = engine.take_slot()
            self._bound = engine.launches_of(self._slot)
        key = ("update", self._shape, _kind(topk_ids), _kind(topk_weights))
        launch = self._bound.get(key)
        if launch is None:
            launch = self._bound[key] = engine.bind_update(self._slot, topk_ids, topk_weights)
        launch(self._stream(), topk_ids, topk_weights)

    def _open_step(self, step: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> NVLinkStep:
        fleet = self._fleet
        index = fleet.steps.output_of(step)
        output = fleet.views.of(index, dtype, self._shape[1], scale_dtype)
        if self._expected_rows is not None and fleet.params.layout is not EpLayout.EXPERT_MAJOR:
            output = AnnouncedOutput(**vars(output), announced=self._expected_rows)
        return NVLinkStep(step, dtype, scale_dtype, output, None, index)

    def _send_tokens(self, open_: NVLinkStep, tokens: torch.Tensor, scales: torch.Tensor | None) -> None:
        raise AssertionError("dispatch_send_only is this class's own")

    def _receive_tokens(self, open_: NVLinkStep) -> None:
        self._launch_dispatch(open_, send=False, receive=True)
        self._fleet.check_now()

    def _send_rows(self, open_: NVLinkStep, rows: torch.Tensor) -> None:
        open_.sent = rows.contiguous()
        self._launch_combine(open_, open_.sent, send=True, receive=False)

    def _receive_rows(self, open_: NVLinkStep) -> torch.Tensor:
        assert open_.sent is not None, "the sending half came first"
        return self._launch_combine(open_, open_.sent, send=False, receive=True)

    def _launch_dispatch(self, open_: NVLinkStep, *, send: bool, receive: bool) -> None:
        tokens, scales, fleet, index = open_.sent, open_.scales, self._fleet, open_.index
        assert tokens is not None and self._slot is not None, "a step has both"
        halves = "dispatch" if send and receive else "send" if send else "receive"
        key = halves, index, open_.kinds
        launch = self._bound.get(key)
        if launch is None:
            output = fleet.engine.outputs[index]
            staged = not (send and receive)  # the caller may reuse the input once the sending half is done
            launch = fleet.engine.bind_dispatch(
                self._slot, tokens, self._shape[1], output, send, receive, scales, staged
            )
            self._bound[key] = launch
        if scales is None:
            launch(self._stream(), tokens)
        else:
            launch(self._stream(), tokens, scales)
        fleet.steps.sent(index, self._slot)
        if receive and self._expected_rows is not None:
            fleet.engine.expect(self._slot, self._expected_rows, self._stream())

    def _launch_combine(self, open_: NVLinkStep, rows: torch.Tensor, *, send: bool, receive: bool) -> torch.Tensor:
        assert self._slot is not None, "a handle has a slot from its creation on"
        result, out, tight = open_.result, open_.result, rows.contiguous()
        if out is None or not out.is_contiguous() or out.is_neg():
            out = self._new_result(rows)
        staged = not (send and receive)
        launch = self._fleet.engine.bind_combine(self._slot, tight, out, self._shape[1], send, receive, staged)
        launch(self._stream(), tight, out)
        if tight is rows and not staged and (result is None or result is out):
            self._bound["combine", self._shape, _kind(rows), _kind(result)] = launch
        if result is None or result is out:
            return out
        return result.copy_(out) if receive else result

    def _new_result(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.empty((self._shape[0], rows.shape[-1]), dtype=rows.dtype, device=rows.device)

    def _honour(self, knob: HandleAlgoKnob) -> None:
        if isinstance(knob, HandleAlgoKnobUserStream):
            raise config_error(
                "algo_knobs",
                "HandleAlgoKnobUserStream",
                "work on the current stream, which is where nvlink launches each call",
                "call inside `with torch.cuda.stream(torch.cuda.ExternalStream(stream))`, or give "
                "BootstrapConfig.stream; a Fleet's steps stay in order, whatever streams they are on",
            )
        super()._honour(knob)

    def _stream(self) -> int:
        stream, captured = self._fleet.ordered_stream()
        if captured:
            self._captured = True
        return stream


def _kind(tensor: object) -> Hashable:
    """All that checks and kernels depend on, the numbers aside; of what is no tensor, whether it is None."""
    if not isinstance(tensor, torch.Tensor):
        return tensor is None
    place = tensor.get_device(), tensor.data_ptr() & 15
    return tensor.dtype, tensor.shape, tensor.stride(), *place, tensor.is_neg()
