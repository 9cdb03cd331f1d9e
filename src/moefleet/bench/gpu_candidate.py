"""What is measured on a GPU: one way to run the steps of a case."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..config import BootstrapConfig, CommConfig, FleetParams, NVLinkConfig
from ..errors import config_error
from ..fleet import create_fleet, probe
from ..knobs import FleetAlgoKnob, FleetAlgoKnobFaultTolerance, HandleAlgoKnobTopKWeights
from ..tensors import CombineInputParams, DispatchInputParams, DispatchOutput, HandleParams


class GpuCandidate(ABC):
    """Steps over fixed tokens; ``number`` says with which routing. All ranks call everything in the same order."""

    graphs: bool = False
    """Whether its steps can be captured."""

    @abstractmethod
    def dispatch(self, number: int) -> None:
        """Read routing ``number`` and dispatch."""

    @abstractmethod
    def combine(self, number: int) -> torch.Tensor:
        """Send the rows that were received back, as they are. Returns ``[T, H]``."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Collective."""

    def step(self, number: int = 0) -> torch.Tensor:
        self.dispatch(number)
        return self.combine(number)


class TransportCandidate(GpuCandidate):
    """A transport of this package.

    Args:
        name: a transport's, or ``nvlink:programs=32:senders=16:count=0`` for NVLinkConfig's options; ``faults=1`` is
            fault tolerance.
    """

    def __init__(
        self,
        name: str,
        params: FleetParams,
        pool: Sequence[tuple[torch.Tensor, torch.Tensor]],
        x: torch.Tensor,
        bootstrap: BootstrapConfig,
    ) -> None:
        backend, knobs = options_of(name)
        self._fleet = create_fleet(bootstrap, params, knobs, backend=backend)
        self.graphs = "graphs" in probe(self._fleet.name).features
        self._updates = [(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)]) for ids, weights in pool]
        self._x, self._y = DispatchInputParams([x]), torch.empty_like(x)
        self._handle = self._fleet.create_handle(*self._updates[0])
        self._arrived: DispatchOutput | None = None

    def dispatch(self, number: int) -> None:
        self._handle.update(*self._updates[number])
        self._arrived = self._handle.dispatch(self._x)

    def combine(self, number: int) -> torch.Tensor:
        assert self._arrived is not None, "dispatch comes first"
        rows = [self._arrived.expert_tensors]
        return self._handle.combine(CombineInputParams(rows, out=self._y, out_is_stable=True)).x

    def close(self) -> None:
        self._handle.destroy()
        self._fleet.destroy()


def options_of(name: str) -> tuple[str | CommConfig, list[FleetAlgoKnob]]:
    """Which transport ``nvlink:programs=32:faults=1`` is, and the Fleet's knobs; any other name as it is.

    Raises:
        MoEEpConfigError: options of another transport, or unknown ones.
    """
    transport, *options = name.split(":")
    if not options:
        return transport, []
    values = [re.fullmatch(r"(programs|senders|count|faults)=(\d+)", option) for option in options]
    if transport != NVLinkConfig.name or not all(values):
        raise config_error("transport", repr(name), "a name, or nvlink:programs=N:senders=N:count=0:faults=1")
    given = {match[1]: int(match[2]) for match in values if match}
    config = NVLinkConfig(given.get("programs"), given.get("senders"), bool(given.get("count", 1)))
    return config, [FleetAlgoKnobFaultTolerance()] if given.get("faults") else []
