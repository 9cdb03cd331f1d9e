"""All that belongs to one set of ranks: made together, and replaced together when the set changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch.distributed import PrefixStore

from ...config import BootstrapConfig, FleetParams, ShmConfig
from ...fleet.agreement import Agreement
from ...fleet.rendezvous import Meeting
from ...knobs import FleetAlgoKnobFaultTolerance
from ...placement import Placement
from ...substrate.faults import FaultState
from ...substrate.group import HostGroup
from ...substrate.routes import Ints
from .buffers import Buffers
from .layout import SegmentLayout
from .steps import Steps

DEFAULT_SILENCE_MS = 2000
"""How long a peer may be silent where the fault-tolerance knob says ``timeout_ms=0``."""


@dataclass(frozen=True)
class Topology:
    """Ranks, what they share, and who holds what.

    Attributes:
        meeting: where the ranks met; its store is this topology's.
        bootstrap, placement: who this rank is and where experts are.
        faults, group, steps, buffers: accusations, shared memory, sequence, views.
        agreement: what the ranks decide together; ``None`` without fault tolerance.
        local_table: int64 ``[E+1]``: this rank's local index of an expert, or -1; the last entry is for id -1.
        owner_table: int64 ``[E+1]``: the rank that holds an expert, or -1.
    """

    meeting: Meeting
    bootstrap: BootstrapConfig
    placement: Placement
    faults: FaultState
    group: HostGroup
    steps: Steps
    buffers: Buffers
    agreement: Agreement | None
    local_table: Ints
    owner_table: Ints

    @classmethod
    def build(
        cls,
        meeting: Meeting,
        params: FleetParams,
        placement: Placement,
        config: ShmConfig,
        tolerance: FleetAlgoKnobFaultTolerance | None,
    ) -> Topology:
        """Together with the other ranks of the meeting."""
        silence_ms = None if tolerance is None else tolerance.timeout_ms or DEFAULT_SILENCE_MS
        bootstrap, rank, world = meeting.bootstrap, meeting.rank, meeting.world_size
        layout = SegmentLayout.of(params, world)
        faults = FaultState(rank, world, tolerant=silence_ms is not None)
        group = HostGroup(
            rank,
            world,
            size=layout.size,
            align=layout.align,
            exchange=meeting.exchange,
            incarnation=meeting.incarnation,
            spin_s=None if config.spin_us is None else config.spin_us * 1e-6,
            timeout_s=bootstrap.timeout_s,
            silence_s=bootstrap.timeout_s if silence_ms is None else silence_ms / 1000,
            faults=faults,
        )
        agreement = None
        if tolerance is not None:
            try:
                agreement = Agreement(
                    PrefixStore("agreement", meeting.store),
                    rank,
                    world,
                    tolerance,
                    incarnation=meeting.incarnation,
                    dead=group.gone,
                    in_round=group.enter_round,
                )
            except BaseException:
                group.close()
                raise
        return cls(
            meeting,
            bootstrap,
            placement,
            faults,
            group,
            Steps(group, faults, meeting.generation),
            Buffers.over(group, layout, params, placement.num_local(rank)),
            agreement,
            np.append(placement.local_table(rank).numpy(), -1),
            np.append(placement.owner_table.numpy(), -1),
        )

    def live_owner_table(self) -> Ints:
        """``owner_table`` without the ranks that are masked."""
        active = np.append(np.array(self.faults.active(), bool), False)  # entry -1: nobody
        return np.where(active[self.owner_table], self.owner_table, -1)
