"""A layer's forward as a CUDA graph: read its inputs from fixed memory, run all of it with one call from the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .config import BootstrapConfig
from .errors import MoEEpError, MoEEpNotBuiltError, config_error
from .fleet import Fleet, Handle
from .fleet.streams import beside, stream_of
from .placement import Placement
from .tensors import HandleParams, MoEEpTensors

WARM_UPS = 2
"""Forwards before the one that is captured: one for each of a transport's two buffer sets."""

_pools: WeakKeyDictionary[Fleet, Any] = WeakKeyDictionary()
"""The memory of a Fleet's graphs. They share it, as they run one after the other and leave nothing in it."""


class CapturedForward:
    """One forward of a layer for a fixed number of tokens, as :meth:`moefleet.MoEEpLayer.capture` makes it.

    Write new numbers into ``inputs`` in place and call :meth:`replay`, or call the object with tensors of the same
    shapes. All ranks replay (or run an eager step) in the same order; they may use different sizes in the same step.
    A replay reads ids, weights and the mask of its moment. It must not run while an eager step of the Fleet is open.

    Args:
        fleet: what it runs over.
        tensors: the first inputs.
        route: makes a handle of the inputs' ids and weights.
        run: dispatches, computes and combines the inputs over that handle.

    Attributes:
        inputs: the tensors that each replay reads. They belong to this object: copies of those given to ``capture``.
        output: ``[T, H]``, the tensor that each replay writes; the one given to ``capture``, if one was.
    """

    def __init__(
        self,
        fleet: Fleet,
        tensors: MoEEpTensors,
        route: Callable[[MoEEpTensors], Handle],
        run: Callable[[Handle, MoEEpTensors], Tensor],
    ) -> None:
        _require_graphs(fleet)
        self.inputs = replace(tensors, **{name: tensor.detach().clone() for name, tensor in _read(tensors).items()})
        self._fleet, self._made_for = fleet, _ranks_of(fleet)
        self._ended, self._stream = "", stream_of(fleet.bootstrap)
        with torch.no_grad(), beside(self._stream):
            self._handle = route(self.inputs)
            try:
                self.output, self._replay = record(fleet, self._step_of(run), self.inputs)
            except BaseException:
                self._handle.destroy()
                raise

    def replay(self) -> Tensor:
        """Run the forward on what ``inputs`` holds now. Returns ``output``, which the next replay overwrites.

        Raises:
            MoEEpError: the layer or Fleet was destroyed, its ranks or weights changed since the capture, or a kernel
                met an error in an earlier step, as an eager step would raise it.
            MoEEpConfigError: another device is current, or a step of the Fleet is open.
        """
        if self._ended or not _same(_ranks_of(self._fleet), self._made_for):
            why = self._ended or "the Fleet has other ranks since update_topology"
            raise MoEEpError(f"CapturedForward: {why}; capture again")
        if self._current_device() != self.output.device:
            raise config_error(
                "current device",
                str(self._current_device()),
                str(self.output.device),
                "replay on the device of the capture: call torch.cuda.set_device first",
            )
        with beside(self._stream):
            self._fleet.require_replayable()
            self._replay()
        return self.output

    def __call__(self, tensors: MoEEpTensors | None = None) -> Tensor:
        """Copy ``tensors`` into ``inputs``, where given, and replay.

        Raises:
            MoEEpConfigError: tensors of other shapes, dtypes or devices than those captured; also as :meth:`replay`.
        """
        if tensors is not None:
            self._refill(tensors)
        return self.replay()

    def end(self, why: str = "it was ended") -> None:
        """Let go of the graph and its memory. Idempotent; later replays raise with this reason."""
        if not self._ended:
            self._ended = why
            self._handle.destroy()
            del self._replay

    def _current_device(self) -> torch.device:
        if self.output.is_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return self.output.device

    def _step_of(self, run: Callable[[Handle, MoEEpTensors], Tensor]) -> Callable[[MoEEpTensors], Tensor]:
        def step(inputs: MoEEpTensors) -> Tensor:
            self._handle.update(HandleParams(inputs.topk_ids))
            return run(self._handle, inputs)

        return step

    def _refill(self, tensors: MoEEpTensors) -> None:
        mine, given = _read(self.inputs), _read(tensors)
        if mine.keys() != given.keys():
            raise config_error("CapturedForward", f"tensors {', '.join(given)}", ", ".join(mine))
        for name, tensor in given.items():
            want = mine[name]
            if tensor.shape != want.shape or tensor.dtype != want.dtype:
                raise config_error(
                    f"CapturedForward: {name}",
                    f"{list(tensor.shape)} {tensor.dtype}",
                    f"{list(want.shape)} {want.dtype}, as captured",
                    "capture one forward for each number of tokens",
                )
        for name, tensor in given.items():
            mine[name].copy_(tensor)


def record(
    fleet: Fleet, step: Callable[[MoEEpTensors], Tensor], inputs: MoEEpTensors
) -> tuple[Tensor, Callable[[], object]]:
    """Warm up, then capture ``step``, on the Fleet's stream or a side stream.

    Returns:
        The tensor that it writes, and the graph's replay.
    """
    side = stream_of(fleet.bootstrap) or torch.cuda.Stream()
    with beside(side):
        for _ in range(WARM_UPS):
            made = step(inputs)
    output = torch.empty_like(made) if inputs.output is None else inputs.output
    inputs = replace(inputs, output=output)
    with beside(side):
        step(inputs)  # once into the output itself, whose strides kernels depend on
    graph = torch.cuda.CUDAGraph()
    pool = _pools.setdefault(fleet, torch.cuda.graph_pool_handle())
    with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
        step(inputs)
    return output, graph.replay


def _require_graphs(fleet: Fleet) -> None:
    capability = type(fleet).probe()
    if "graphs" in capability.features:
        return
    limits = capability.limits
    on_cpu = limits is not None and "cuda" not in limits.device_types
    why = "its tensors live on the CPU, and CUDA graphs are a GPU's" if on_cpu else "its steps need the host in between"
    raise MoEEpNotBuiltError(f"MoEEpLayer.capture: transport {fleet.name!r} cannot be captured: {why}; run forward()")


def _ranks_of(fleet: Fleet) -> tuple[BootstrapConfig, Placement]:
    return fleet.bootstrap, fleet.placement


def _same(left: tuple[object, ...], right: tuple[object, ...]) -> bool:
    """Whether these are the same objects: a change of topology makes new ones, equal or not."""
    return all(a is b for a, b in zip(left, right, strict=True))


def _read(tensors: MoEEpTensors) -> dict[str, Tensor]:
    """The tensors that a forward reads, by field."""
    names = ("hidden_states", "topk_ids", "topk_weights", "scales")
    return {name: tensor for name in names if (tensor := getattr(tensors, name)) is not None}
