"""All that belongs to one set of ranks: made together, and replaced together when the set changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import native
from ...config import BootstrapConfig, EpLayout, FleetParams, ShmConfig
from ...fleet.agreement import Agreement
from ...fleet.rendezvous import Meeting
from ...fleet.tolerance import agreement_at, silence_s
from ...knobs import FleetAlgoKnobFaultTolerance
from ...placement import Placement
from ...substrate.faults import FaultState
from ...substrate.group import HostGroup
from ...substrate.routes import Ints
from .buffers import Buffers
from .compiled import NativeInbox, NativeMoves
from .layout import SegmentLayout
from .moves import Moves
from .portable import PortableInbox, PortableMoves
from .quick import QuickFlags
from .steps import Steps
from .whole import WholePhases


@dataclass(frozen=True)
class Topology:
    """Ranks, what they share, and who holds what.

    Attributes:
        meeting: where the ranks met; its store is this topology's.
        bootstrap, placement: who this rank is and where experts are.
        faults, group, steps, buffers: accusations, shared memory, sequence, views.
        moves: what a step does over them.
        agreement: what the ranks decide together; ``None`` without fault tolerance.
        owner_table: int64 ``[E+1]``: the rank that holds an expert, or -1.
        places: whether ranks can place rows in each other's memory: all of them have the helper.
        whole: phases in one call, where this rank has the helper.
    """

    meeting: Meeting
    bootstrap: BootstrapConfig
    placement: Placement
    faults: FaultState
    group: HostGroup
    steps: Steps
    buffers: Buffers[Any]
    moves: Moves[Any]
    agreement: Agreement | None
    owner_table: Ints
    places: bool
    whole: WholePhases | None

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
        library = native.library()  # first: nobody waits for this rank while it compiles
        bootstrap, rank, world = meeting.bootstrap, meeting.rank, meeting.world_size
        places = all(said["helper"] for said in meeting.exchange("helper", lambda: {"helper": library is not None}))
        layout = SegmentLayout.of(params, world, max(placement.slots_per_rank) if places else None)
        faults = FaultState(rank, world, tolerant=tolerance is not None)
        group = HostGroup(
            rank,
            world,
            size=layout.size,
            align=layout.align,
            allocated=layout.allocated,
            open_from=layout.open_from,
            exchange=meeting.exchange,
            look=meeting.look,
            incarnation=meeting.incarnation,
            spin_s=None if config.spin_us is None else config.spin_us * 1e-6,
            timeout_s=bootstrap.timeout_s,
            silence_s=silence_s(tolerance, bootstrap.timeout_s),
            faults=faults,
        )
        agreement = None
        if tolerance is not None:
            try:
                agreement = agreement_at(meeting, tolerance, group.gone, group.enter_round)
            except BaseException:
                group.close()
                raise
        owners = np.append(placement.owner_table.numpy(), -1)  # the last entry is for id -1
        buffers: Buffers[Any]
        moves: Moves[Any]
        quick = whole = None
        if library is None:
            buffers = Buffers.over(group, layout, params, placement.num_local(rank), PortableInbox)
            moves = PortableMoves(params, placement, rank, owners, buffers)
        else:
            buffers = Buffers.over(group, layout, params, placement.num_local(rank), NativeInbox)
            moves = in_c = NativeMoves(params, placement, rank, owners, library, group.range, layout)
            early = places and params.layout is not EpLayout.RANK_MAJOR
            quick = QuickFlags(library, in_c.struct, group.waiter, faults, meeting.generation, early=early)
            whole = WholePhases(library, in_c, faults)
        return cls(
            meeting,
            bootstrap,
            placement,
            faults,
            group,
            Steps(group, faults, meeting.generation, quick),
            buffers,
            moves,
            agreement,
            owners,
            places,
            whole,
        )

    def live_owner_table(self) -> Ints:
        """``owner_table`` without the ranks that are masked."""
        active = np.append(np.array(self.faults.active(), bool), False)  # entry -1: nobody
        return np.where(active[self.owner_table], self.owner_table, -1)
