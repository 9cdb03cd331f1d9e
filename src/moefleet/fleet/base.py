"""The two contracts: a Fleet of ranks with its buffers, and a Handle, one step's routing over it.

Optional methods are concrete and raise, so that other people's subclasses never break.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..config import BootstrapConfig, CommConfig, FleetParams
from ..errors import MoEEpFaultToleranceUnsupportedError, MoEEpNotBuiltError
from ..knobs import FleetAlgoKnob, HandleAlgoKnob, RowFormat
from ..placement import Placement
from ..tensors import CombineInputParams, CombineOutput, DispatchInputParams, DispatchOutput, HandleParams

if TYPE_CHECKING:
    from .registry import Capability
    from .rendezvous import Meeting


@dataclass(frozen=True)
class FleetSpec:
    """All that a transport builds a Fleet from: the caller's values, and the meeting at which ranks exchange theirs.

    A construction that ends with an exchange at the meeting gives all ranks a Fleet, or none; one that waits inside a
    library does so in ``meeting.attend``. What it raises, the others are told.

    ``config`` is ``None`` where the caller gave a name only; ``backend`` is that name, also if it was "auto";
    ``placement`` is ``None`` for contiguous blocks.
    """

    bootstrap: BootstrapConfig
    params: FleetParams
    knobs: tuple[FleetAlgoKnob, ...]
    config: CommConfig | None
    meeting: Meeting
    backend: str = "auto"
    placement: Placement | None = None


class Handle(ABC):
    """One step's routing. ``T`` and ``K`` are fixed for its life; ``update`` brings new ids and weights.

    The life of a step: create_handle (or update), dispatch, compute, combine, complete, destroy.
    """

    @abstractmethod
    def dispatch(self, params: DispatchInputParams) -> DispatchOutput:
        """Send this rank's rows and receive those for its experts. All ranks take part in every step.

        Raises:
            MoEEpConfigError: this rank's input is wrong; its peers raise MoEEpPeerError, the next step works.
            MoEEpPeerError: another rank failed in this step.
            MoEEpTimeoutError: a rank did not come in time; the message names it.
        """

    @abstractmethod
    def combine(self, params: CombineInputParams) -> CombineOutput:
        """Send the experts' rows home and sum them per token. Same errors as :meth:`dispatch`."""

    @abstractmethod
    def update(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> None:
        """Read new routing of the same ``[T, K]``. Without a weights knob the tensor given before is read again."""

    @abstractmethod
    def destroy(self) -> None:
        """End this handle: idempotent, safe after any failure, never waits. An open step is failed for the peers."""

    def dispatch_send_only(self, params: DispatchInputParams) -> None:
        """The sending half of dispatch; the input must stay unchanged until it returns (on a GPU: has run)."""
        raise MoEEpNotBuiltError(f"{type(self).__name__} has no separate halves: use dispatch()")

    def dispatch_recv_only(self) -> DispatchOutput:
        """The receiving half of dispatch."""
        raise MoEEpNotBuiltError(f"{type(self).__name__} has no separate halves: use dispatch()")

    def combine_send_only(self, params: CombineInputParams) -> None:
        """The sending half of combine."""
        raise MoEEpNotBuiltError(f"{type(self).__name__} has no separate halves: use combine()")

    def combine_recv_only(self) -> CombineOutput:
        """The receiving half of combine."""
        raise MoEEpNotBuiltError(f"{type(self).__name__} has no separate halves: use combine()")

    def complete(self) -> None:  # noqa: B027 - optional
        """Run the receive half that ``HandleAlgoKnobSplitOperation`` left pending; nothing if nothing is pending."""

    def combine_buffer(self) -> torch.Tensor | None:
        """Memory of ``expert_tensors``' shape: rows written straight into it are combined without a copy.

        ``None`` where combine reads any tensor in place. Valid from dispatch to combine.
        """
        return None

    def give_up(self, error: BaseException) -> None:  # noqa: B027 - optional
        """Fail the open step for ``error``, ahead of :meth:`destroy`; never waits. For what goes wrong between dispatch
        and combine: peers read its type and text, as the reason of their MoEEpPeerError.

        ``with handle:`` does this for an exception that leaves it. A transport without it tells its peers in
        ``destroy`` that the step failed, but not why.
        """

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if value is not None:
            self.give_up(value)
        self.destroy()


def row_bytes(rows: RowFormat, *, there: Sequence[int], back: Sequence[int]) -> list[int]:
    """``[W]`` bytes of the rows that went one way in dispatch (``there`` ``[W]``) and in combine (``back`` ``[W]``)."""
    return [n * rows.sent_bytes + m * rows.returned_bytes for n, m in zip(there, back, strict=True)]


class Fleet(ABC):
    """A long-lived group of ranks with its buffers. Build one with :func:`moefleet.create_fleet`.

    Subclasses are registered with :func:`moefleet.register_fleet`, are called with a :class:`FleetSpec`, and say in
    ``knobs`` which Fleet knobs they honour.

    Attributes:
        bootstrap, params, placement: what the Fleet was built from.
        row_format: how rows travel, by these parameters and the knobs.
        why_not: for knobs that the transport cannot honour, the reason, where there is more to say than that.
        passed_over: for each transport that "auto" would have liked better, why it was not taken.
    """

    name: ClassVar[str] = ""
    knobs: ClassVar[frozenset[type[FleetAlgoKnob]]] = frozenset()
    why_not: ClassVar[dict[type[FleetAlgoKnob], str]] = {}

    def __init__(self, spec: FleetSpec) -> None:
        self.bootstrap = spec.bootstrap
        self.params = spec.params
        self.placement = spec.placement or Placement.contiguous(spec.params.num_experts, spec.bootstrap.world_size)
        self.row_format = RowFormat.of(spec.params, spec.knobs)
        self.passed_over: dict[str, str] = {}

    @classmethod
    def probe(cls) -> Capability:
        """Whether this process can use the transport, why not, its features and limits. Allocates nothing."""
        from .registry import Capability

        return Capability(True)

    def describe(self) -> str:
        """One line for logs and reprs: transport, layout, ranks, and what was passed over."""
        p, b = self.params, self.bootstrap
        skipped = "".join(f"; not {name}: {why}" for name, why in self.passed_over.items())
        return (
            f"{self.name} {p.resolved_layout.name} rank {b.rank} of {b.world_size}, {p.num_experts} experts "
            f"({self.placement.num_local(b.rank)} here), M={p.max_tokens_per_rank}, H={p.token_hidden_size}{skipped}"
        )

    @abstractmethod
    def create_handle(self, params: HandleParams, algo_knobs: Sequence[HandleAlgoKnob] = ()) -> Handle:
        """Read one step's routing. ``HandleAlgoKnobTopKWeights`` is given here in every layout.

        Raises:
            MoEEpConfigError: bad ids or weights; the peers of a step that this spoils raise MoEEpPeerError.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Give everything back: explicit, idempotent, safe after any failure; never waits for a peer."""

    def stats(self) -> dict[str, Any]:
        """What this rank did since construction, or since the last ``update_topology``. Any thread may ask.

        ===================== ============ ========================================================================
        key                   value        meaning
        ===================== ============ ========================================================================
        ``steps``             int          steps begun, failed ones included
        ``failed_steps``      int          steps that this rank gave up, for a mistake of its own or of a peer
        ``tokens``            int          tokens that this rank brought
        ``tokens_per_expert`` ``[L]`` int  rows that each local expert was given: one for each token that chose it;
                                           where a token names it twice, one in EXPERT_MAJOR, two elsewhere
        ``rows_received``     ``[W]`` int  tokens of each rank that this one took, each once, however many of its
                                           experts are here
        ``rows_sent``         ``[W]`` int  tokens of this rank that each rank took and sent back
        ``bytes_received``    ``[W]`` int  bytes of these rows there and back, with their scales
        ``bytes_sent``        ``[W]`` int  the same
        ``waited_s``          ``[W]``      seconds spent waiting for each rank, for several at once counted for each;
                              float        ``None`` where the transport cannot tell
        ``bad_ids``           int          ids out of range that counted as -1; on a CPU they raise, so 0
        ===================== ============ ========================================================================

        Lists are Python lists. ``[W]`` has an entry for each rank; that of this rank is about rows that stayed. Every
        transport of ours has all keys and may add its own; a Fleet from elsewhere may lack some. After ``destroy`` the
        last counts are given, or MoEEpError is raised.
        """
        return {}

    def require_replayable(self) -> None:  # noqa: B027 - optional
        """Raise what speaks against replaying a captured step now. For transports with the feature ``graphs``."""

    @property
    def supports_fault_tolerance(self) -> bool:
        """Whether the fault calls below work on this Fleet."""
        return False

    @property
    def active_mask_epoch(self) -> int:
        """Number of the last mask decision that this rank adopted; 0 before the first."""
        return 0

    def query_fault(self) -> bool:
        """Whether a fault was seen since the last decision. Local and free."""
        raise self._no_fault_tolerance("query_fault")

    def query_active_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The mask in force: int32 ``[W]``, 1 = active, on the Fleet's device."""
        raise self._no_fault_tolerance("query_active_mask")

    def set_active_mask(self, mask: torch.Tensor | Sequence[int]) -> None:
        """Set the mask between steps, absolutely, alike on all ranks. Never masks oneself."""
        raise self._no_fault_tolerance("set_active_mask")

    def reconcile_active_mask(self, *, timeout_s: float | None = None) -> torch.Tensor:
        """Agree with the other survivors on one mask, and adopt it."""
        raise self._no_fault_tolerance("reconcile_active_mask")

    def clear_faults(self, *, readmit: bool = False) -> torch.Tensor:
        """Arm detection again; with ``readmit`` take back ranks that were merely slow (blocks, for all)."""
        raise self._no_fault_tolerance("clear_faults")

    def update_topology(
        self,
        bootstrap: BootstrapConfig,
        algo_knobs: Sequence[FleetAlgoKnob] = (),
        *,
        placement: Placement | None = None,
    ) -> None:
        """Go on with another set of ranks."""
        raise self._no_fault_tolerance("update_topology")

    def _no_fault_tolerance(self, call: str) -> MoEEpFaultToleranceUnsupportedError:
        return MoEEpFaultToleranceUnsupportedError(
            f"{call}: this {self.name or type(self).__name__} Fleet has no fault tolerance; "
            "give FleetAlgoKnobFaultTolerance at construction, on a transport that supports it"
        )

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()
