"""One MoE layer over a Fleet, as a torch module."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .captured import CapturedForward
from .config import BootstrapConfig, CommConfig, FleetParams, KernelConfig, MegaConfig, SplitConfig
from .errors import MoEEpNotBuiltError, config_error
from .fleet import Fleet, Handle, create_fleet
from .fleet import Meeting as Meeting
from .fleet.streams import beside, stream_of
from .kernels import get_kernel
from .knobs import FleetAlgoKnob, HandleAlgoKnobTopKWeights
from .placement import Placement
from .tensors import CombineInputParams, DispatchInputParams, DispatchOutput, HandleParams, MoEEpTensors
from .timing import Watch
from .weights import MoEWeights


class MoEEpLayer(nn.Module):
    """Routed experts of one layer, spread over the ranks of a Fleet.

    Args:
        bootstrap: this rank and its group; not used where ``fleet`` is given.
        fleet_params: sizes; must equal the Fleet's where ``fleet`` is given.
        weights: this rank's experts, ``L`` of them as the placement says; ``None`` for kernels that need none.
        fleet_knobs: options of the Fleet.
        backend: ``"auto"``, a transport's name or config, or a ``SplitConfig`` that names transport and kernel.
        fleet: a Fleet to share. Many layers of one model share one: one set of buffers, one mask, one epoch.

    Raises:
        MoEEpConfigError: weights that do not belong to this rank and Fleet.
        MoEEpNotBuiltError: a transport or fused kernel that is not usable here.
    """

    def __init__(
        self,
        bootstrap: BootstrapConfig,
        fleet_params: FleetParams,
        weights: MoEWeights | None,
        fleet_knobs: Sequence[FleetAlgoKnob] = (),
        backend: str | CommConfig | SplitConfig | MegaConfig = "auto",
        *,
        fleet: Fleet | None = None,
    ) -> None:
        super().__init__()
        self._watch: Watch | None = None
        self._captures: WeakSet[CapturedForward] = WeakSet()
        comm, kernel = _split(backend)
        self.kernel = get_kernel(kernel)
        self._owns_fleet = fleet is None
        if fleet is not None and fleet.params != fleet_params:
            raise config_error("MoEEpLayer.fleet", f"a Fleet of {fleet.params}", f"one of {fleet_params}")
        self._fleet = create_fleet(bootstrap, fleet_params, fleet_knobs, comm) if fleet is None else fleet
        try:
            self.weights = self._prepared(weights, self._fleet.placement, self._fleet.bootstrap.rank)
        except BaseException:
            self.destroy()
            raise

    @property
    def fleet(self) -> Fleet:
        """The Fleet that this layer runs over."""
        return self._fleet

    def forward(self, tensors: MoEEpTensors) -> Tensor:
        """Route, dispatch, compute, combine. All ranks of the Fleet call it in the same order, also without tokens.

        On a GPU all of it runs on ``BootstrapConfig.stream``, where that names one, in order with the current stream.

        Returns:
            ``[T, H]`` in the dtype of the expert rows.

        Raises:
            MoEEpConfigError: a bad input here; the peers raise MoEEpPeerError, and the next forward works.
            MoEEpPeerError, MoEEpTimeoutError: another rank failed, ended or did not come.
        """
        stream = stream_of(self._fleet.bootstrap)
        with beside(stream):
            y = self._forward(tensors)
        if stream is not None:
            y.record_stream(torch.cuda.current_stream(y.device))
        return y

    def capture(self, tensors: MoEEpTensors) -> CapturedForward:
        """This layer's forward for ``T`` tokens as a CUDA graph, to be replayed any number of times.

        All ranks call it together, each with its own ``T`` (0 too) and tensors of real numbers: a few forwards run
        first, so that nothing is compiled in the capture. Captures of many sizes may live at once; they, and eager
        forwards, may run in any order that all ranks keep. It ends with the layer, and when its weights are replaced
        or the ranks of its Fleet change; :attr:`last_timings_ms` and the ranges do not see a replay.

        Args:
            tensors: copied, to be the first inputs; ``output``, where given, is the tensor that replays write.

        Raises:
            MoEEpNotBuiltError: a transport whose steps cannot be captured, such as all on CPUs.
        """
        captured = CapturedForward(self._fleet, tensors, self._route, self._run)
        self._captures.add(captured)
        return captured

    def enable_timing(self, enabled: bool = True) -> None:
        """Time each later forward, for :attr:`last_timings_ms`. A forward waits for nothing on that account."""
        self._set_watch(timing=enabled, ranges=self._watch is not None and self._watch.ranges)

    def enable_ranges(self, enabled: bool = True) -> None:
        """Show the phases of each later forward to profilers.

        As ``torch.profiler.record_function`` ranges, ``moefleet.forward`` and in it ``moefleet.route``, ``.dispatch``,
        ``.compute`` and ``.combine``; on a GPU as NVTX ranges too. With timing on, torch's own profiler sees them
        without this.
        """
        self._set_watch(timing=self._watch is not None and self._watch.timing, ranges=enabled)

    @property
    def last_timings_ms(self) -> dict[str, float]:
        """Milliseconds of the last forward: ``route``, ``dispatch``, ``compute``, ``combine``, ``total``.

        On a CPU they are the host's, with the waits for other ranks; on a GPU they are those of the forward's stream,
        and reading them waits for that forward. Empty before the first forward, after one that raised, and after one
        that a CUDA graph captured; a replay is not timed.

        Raises:
            MoEEpConfigError: timing is off.
        """
        if self._watch is None or not self._watch.timing:
            raise config_error("last_timings_ms", "timing that is off", "timing that is on", "call enable_timing()")
        return self._watch.timings_ms()

    def _set_watch(self, *, timing: bool, ranges: bool) -> None:
        self._watch = Watch(timing, ranges) if timing or ranges else None

    def _forward(self, tensors: MoEEpTensors) -> Tensor:
        if self._watch is not None:
            return self._watched_forward(tensors, self._watch)
        with self._route(tensors) as handle:
            return self._run(handle, tensors)

    def _watched_forward(self, tensors: MoEEpTensors, watch: Watch) -> Tensor:
        """:meth:`forward`, phase by phase."""
        with watch.forward(tensors.hidden_states.device):
            with watch.phase("route"):
                handle = self._route(tensors)
            with handle:
                with watch.phase("dispatch"):
                    arrived = handle.dispatch(_rows_of(tensors))
                with watch.phase("compute"):
                    rows = self._compute(arrived, handle)
                with watch.phase("combine"):
                    return handle.combine(CombineInputParams([rows], out=tensors.output)).x

    def _route(self, tensors: MoEEpTensors) -> Handle:
        weights = HandleAlgoKnobTopKWeights(tensors.topk_weights)
        return self._fleet.create_handle(HandleParams(tensors.topk_ids), [weights])

    def _run(self, handle: Handle, tensors: MoEEpTensors) -> Tensor:
        arrived = handle.dispatch(_rows_of(tensors))
        rows = self._compute(arrived, handle)
        return handle.combine(CombineInputParams([rows], out=tensors.output)).x

    def _end_captures(self, why: str) -> None:
        for captured in list(self._captures):
            captured.end(why)
        self._captures.clear()

    def _compute(self, arrived: DispatchOutput, handle: Handle) -> Tensor:
        layout = self._fleet.params.resolved_layout
        return self.kernel.compute(arrived, layout, self.weights, into=handle.combine_buffer())

    def update_topology(
        self, bootstrap: BootstrapConfig, weights: MoEWeights | None = None, *, placement: Placement | None = None
    ) -> None:
        """Go on with other ranks, and with the experts that this one then holds; see Fleet.update_topology.

        For layers that built their Fleet. Those that share one replace its ranks once, with
        ``fleet.update_topology``, and then each gets its weights by :meth:`replace_weights`.

        Args:
            bootstrap: the new world size, and this rank in it.
            weights: this rank's experts under the new placement; ``None`` keeps those that it has, if they stay.
            placement: where experts are from now on; ``None`` for contiguous blocks.

        Raises:
            MoEEpConfigError: a shared Fleet, or weights that do not belong to this rank; nothing has changed.
        """
        if not self._owns_fleet:
            raise config_error(
                "MoEEpLayer.update_topology",
                "a layer on a shared Fleet",
                "a layer that built its own",
                "call fleet.update_topology once, then replace_weights on each layer",
            )
        before, rank = self._fleet.placement, bootstrap.rank
        after = placement or Placement.contiguous(self._fleet.params.num_experts, bootstrap.world_size)
        if weights is not None:
            ready = self._prepared(weights, after, rank)
        elif self.kernel.requires_weights and (
            list(after.experts_of(rank)) != list(before.experts_of(self._fleet.bootstrap.rank))
        ):
            raise config_error(
                "MoEEpLayer.update_topology: weights",
                f"None while rank {rank} goes over to experts {list(after.experts_of(rank))}",
                "the weights of these",
            )
        else:
            ready = self.weights
        self._fleet.update_topology(bootstrap, placement=placement)
        self._end_captures("the Fleet's ranks changed")
        self.weights = ready

    def replace_weights(self, weights: MoEWeights | None) -> None:
        """Take other weights for this rank's experts, between steps: after the ranks of a shared Fleet changed.

        Raises:
            MoEEpConfigError: weights that do not belong to this rank and Fleet; the old ones stay.
        """
        self.weights = self._prepared(weights, self._fleet.placement, self._fleet.bootstrap.rank)
        self._end_captures("the layer's weights were replaced")

    def _prepared(self, weights: MoEWeights | None, placement: Placement, rank: int) -> MoEWeights | None:
        _check_local_count(weights, placement, rank)
        self.kernel.validate(self._fleet.params, weights)
        return self.kernel.preprocess(weights)

    def destroy(self) -> None:
        """Give the Fleet back if this layer built it. Idempotent; a shared Fleet is left alone. Captures end."""
        self._end_captures("its layer was destroyed")
        if self._owns_fleet:
            self._fleet.destroy()

    def extra_repr(self) -> str:
        return f"{self._fleet.describe()}; kernel {self.kernel.config.name or type(self.kernel).__name__}"

    def __enter__(self) -> MoEEpLayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()


def _rows_of(tensors: MoEEpTensors) -> DispatchInputParams:
    if tensors.scales is None:
        return DispatchInputParams([tensors.hidden_states])
    return DispatchInputParams([tensors.hidden_states, tensors.scales])


def _split(backend: str | CommConfig | SplitConfig | MegaConfig) -> tuple[str | CommConfig, str | KernelConfig]:
    if isinstance(backend, MegaConfig):
        raise MoEEpNotBuiltError(
            f"MegaConfig(megakernel={backend.megakernel!r}): no fused kernel is registered; use SplitConfig"
        )
    split = backend if isinstance(backend, SplitConfig) else SplitConfig(comm=backend)
    return split.comm, split.kernel


def _check_local_count(weights: MoEWeights | None, placement: Placement, rank: int) -> None:
    if weights is not None and weights.num_local_experts != placement.num_local(rank):
        raise config_error(
            "weights",
            f"{weights.num_local_experts} experts on rank {rank}",
            f"{placement.num_local(rank)}, experts {list(placement.experts_of(rank))} of {placement.num_experts}",
            "pass only this rank's experts, w13[first:first + L]",
        )
