"""One MoE layer over a Fleet, as a torch module."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor, nn

from .config import BootstrapConfig, CommConfig, FleetParams, KernelConfig, MegaConfig, SplitConfig
from .errors import MoEEpNotBuiltError, config_error
from .fleet import Fleet, create_fleet
from .kernels import get_kernel
from .knobs import FleetAlgoKnob, HandleAlgoKnobTopKWeights
from .tensors import CombineInputParams, DispatchInputParams, HandleParams, MoEEpTensors
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
        comm, kernel = _split(backend)
        self.kernel = get_kernel(kernel)
        self._owns_fleet = fleet is None
        if fleet is not None and fleet.params != fleet_params:
            raise config_error("MoEEpLayer.fleet", f"a Fleet of {fleet.params}", f"one of {fleet_params}")
        self._fleet = create_fleet(bootstrap, fleet_params, fleet_knobs, comm) if fleet is None else fleet
        try:
            _check_local_count(weights, self._fleet)
            self.kernel.validate(fleet_params, weights)
            self.weights = self.kernel.preprocess(weights)
        except BaseException:
            self.destroy()
            raise

    @property
    def fleet(self) -> Fleet:
        """The Fleet that this layer runs over."""
        return self._fleet

    def forward(self, tensors: MoEEpTensors) -> Tensor:
        """Route, dispatch, compute, combine. All ranks of the Fleet call it in the same order, also without tokens.

        Returns:
            ``[T, H]`` in the dtype of the expert rows.

        Raises:
            MoEEpConfigError: a bad input here; the peers raise MoEEpPeerError, and the next forward works.
            MoEEpPeerError, MoEEpTimeoutError: another rank failed, ended or did not come.
        """
        x = [tensors.hidden_states] if tensors.scales is None else [tensors.hidden_states, tensors.scales]
        handle = self._fleet.create_handle(
            HandleParams(tensors.topk_ids), [HandleAlgoKnobTopKWeights(tensors.topk_weights)]
        )
        try:
            arrived = handle.dispatch(DispatchInputParams(x))
            layout = self._fleet.params.resolved_layout
            rows = self.kernel.compute(arrived, layout, self.weights, into=handle.combine_buffer())
            return handle.combine(CombineInputParams([rows], out=tensors.output)).x
        finally:
            handle.destroy()

    def destroy(self) -> None:
        """Give the Fleet back if this layer built it. Idempotent; a shared Fleet is left alone."""
        if self._owns_fleet:
            self._fleet.destroy()

    def extra_repr(self) -> str:
        return f"{self._fleet.describe()}; kernel {self.kernel.config.name or type(self.kernel).__name__}"

    def __enter__(self) -> MoEEpLayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()


def _split(backend: str | CommConfig | SplitConfig | MegaConfig) -> tuple[str | CommConfig, str | KernelConfig]:
    if isinstance(backend, MegaConfig):
        raise MoEEpNotBuiltError(
            f"MegaConfig(megakernel={backend.megakernel!r}): no fused kernel is registered; use SplitConfig"
        )
    split = backend if isinstance(backend, SplitConfig) else SplitConfig(comm=backend)
    return split.comm, split.kernel


def _check_local_count(weights: MoEWeights | None, fleet: Fleet) -> None:
    if weights is None:
        return
    rank = fleet.bootstrap.rank
    want = fleet.placement.num_local(rank)
    if weights.num_local_experts != want:
        raise config_error(
            "weights",
            f"{weights.num_local_experts} experts on rank {rank}",
            f"{want}, experts {list(fleet.placement.experts_of(rank))} of {fleet.params.num_experts}",
            "pass only this rank's experts, w13[first:first + L]",
        )
