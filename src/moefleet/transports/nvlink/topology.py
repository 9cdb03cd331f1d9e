"""All that belongs to one set of ranks: made together, and replaced together when the set changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore

from ...config import BootstrapConfig, NVLinkConfig
from ...errors import config_error
from ...fleet.agreement import Agreement
from ...fleet.base import FleetSpec
from ...fleet.rendezvous import Meeting
from ...fleet.tolerance import agreement_at, silence_s
from ...knobs import FleetAlgoKnobFaultTolerance
from ...placement import Placement
from ...substrate.control import BLOCK_BYTES
from ...substrate.faults import FaultState
from ...substrate.group import HostGroup
from ...substrate.symmetric import SymmetricMemory
from .counts import CountReader
from .geometry import BOARD, MOST_JUDGED, Geometry
from .notes import Notes

if TYPE_CHECKING:
    from .engine import Engine, Grids


@dataclass
class Topology:
    """Ranks, what they share, and who holds what.

    Attributes:
        generation: how often the ranks of this Fleet have changed.
        bootstrap, placement: who this rank is and where experts are.
        geometry, memory, engine, reader: sizes, what peers write to, the kernels over it, what they counted.
        spare: a slot for steps that are given up before they begin.
        notes: why steps were given up, here and elsewhere.
        faults: accusations and mask.
        group: how hosts see one another, sockets that end with a process and control blocks; ``None`` for more ranks
            than kernels look at.
        agreement: what the ranks decide together; ``None`` without fault tolerance.
    """

    generation: int
    bootstrap: BootstrapConfig
    placement: Placement
    geometry: Geometry
    memory: SymmetricMemory
    engine: Engine
    reader: CountReader
    spare: torch.Tensor
    notes: Notes
    faults: FaultState
    group: HostGroup | None = None
    agreement: Agreement | None = None

    @classmethod
    def build(
        cls,
        meeting: Meeting,
        spec: FleetSpec,
        placement: Placement,
        device: torch.device,
        grids: tuple[Grids, Grids],
        tolerance: FleetAlgoKnobFaultTolerance | None,
    ) -> Topology:
        """Together with the other ranks of the meeting. Sockets come after CUDA, so that they end before it does."""
        from .engine import Engine

        rank, world, bootstrap = meeting.rank, meeting.world_size, meeting.bootstrap
        config = spec.config if isinstance(spec.config, NVLinkConfig) else NVLinkConfig()
        if tolerance is not None and world > MOST_JUDGED:
            raise config_error(
                "world_size with FleetAlgoKnobFaultTolerance", world, f"at most {MOST_JUDGED}", "leave the knob out"
            )
        geometry = Geometry.of(spec.params, placement, rank, spec.knobs)

        own: list[torch.Tensor] = []

        def allocate() -> dict[str, Any]:
            with torch.cuda.device(device):
                own.append(SymmetricMemory.allocate(geometry.shared_bytes, device, world))
            return {}

        def share(store: Any) -> SymmetricMemory:
            name = f"moefleet-{meeting.fleet_id}-{meeting.generation}"
            with torch.cuda.device(device):
                return SymmetricMemory.map(
                    own[0], rank=rank, world_size=world, store=PrefixStore("nvlink", store), name=name
                )

        meeting.exchange("nvlink/memory", allocate)  # first: nobody holds memory while it waits for one that has none
        memory = meeting.attend(share)
        with torch.cuda.device(device):
            engine = Engine(
                geometry,
                device,
                memory.addresses,
                *grids,
                silence_s(tolerance, bootstrap.timeout_s),
                config.count,
                tolerant=tolerance is not None,
                renormalize=tolerance is not None and tolerance.renormalize,
            )
            spare = engine.new_slot()
            torch.cuda.synchronize(device)
            reader, notes = CountReader(engine), Notes(geometry, memory.own, device)
        faults = FaultState(rank, world, tolerant=tolerance is not None)
        topology = cls(
            meeting.generation, bootstrap, placement, geometry, memory, engine, reader, spare, notes, faults
        )  # fmt: skip
        try:
            if world <= MOST_JUDGED:
                topology._meet(meeting, tolerance)
            meeting.exchange("nvlink/ready", dict)
        except BaseException:
            topology.close()
            raise
        return topology

    def _meet(self, meeting: Meeting, tolerance: FleetAlgoKnobFaultTolerance | None) -> None:
        rank, world, engine = meeting.rank, meeting.world_size, self.engine
        self.group = group = HostGroup(
            rank,
            world,
            size=BLOCK_BYTES,
            align=8,
            exchange=meeting.exchange,
            look=meeting.look,
            incarnation=meeting.incarnation,
            spin_s=0.0,
            timeout_s=meeting.bootstrap.timeout_s,
            silence_s=meeting.bootstrap.timeout_s,
            faults=self.faults,
            dead=engine.board[BOARD.dead : BOARD.dead + world],
        )

        def enter_round(number: int) -> None:
            group.enter_round(number)
            with torch.cuda.device(engine.device):
                engine.announce(number)

        if tolerance is not None:
            self.agreement = agreement_at(meeting, tolerance, group.gone, enter_round)

    def leave_round(self) -> None:
        """Tell the peers that this rank is back from a round, with the decision that it has adopted."""
        if self.group is not None and not self.group.closed:
            self.group.leave_round(self.faults.epoch)
            self.engine.announce(self.faults.epoch)

    def look(self) -> None:
        """Bring ``faults`` in line with what the operating system, the kernels and the peers have told so far. Waits
        for nothing."""
        faults, group, board = self.faults, self.group, self.engine.board
        if group is None:
            return
        for peer in group.gone():
            faults.accuse(peer)
        if board[BOARD.accused :].any():
            for peer in board[BOARD.accused : BOARD.accused + faults.world_size].nonzero()[0].tolist():
                faults.accuse(peer)
            faults.behind |= bool(board[BOARD.behind])
        # One that goes on after a decision may write over what this rank reads, where it was not told in time.
        faults.behind |= group.decided(faults.epoch)

    def close(self) -> None:
        """Let the peers know that this rank has left, and let go of the engine's counts. Waits for nobody."""
        if self.group is not None:
            self.group.close()
        self.reader.close()
