"""The sequence of steps of a Fleet: numbered, at most two open, each committed or failed for all peers to see."""

from __future__ import annotations

from ...errors import MoEEpPeerError, config_error
from ...substrate.control import SETS, Header, Operation, State, Word
from ...substrate.faults import FaultState
from ...substrate.futex import fence
from ...substrate.group import HostGroup
from .layout import SegmentLayout


class Steps:
    """Step numbers live with the Fleet and advance as steps run; step ``s`` uses buffer set ``s % 2``.

    Why a set may be written again at step ``s + 2``: this rank finished step ``s``, so all peers had committed their
    combine of ``s``, so they had read its tokens; and it writes combined rows only after all peers committed their
    dispatch of ``s + 2``, so they had finished reading those of ``s``. Where step ``s`` failed, that argument does not
    hold, and the peers' CLOSED flags are waited for instead. A rank that the others went on without can still be
    reading; it finds that out by :meth:`overtaken`.
    """

    def __init__(self, group: HostGroup, faults: FaultState, generation: int) -> None:
        self._group, self._faults, self._generation = group, faults, generation
        self._last = 0
        self.open: set[int] = set()  # dispatched and not yet combined
        self._spoiled = [0] * SETS

    @property
    def last(self) -> int:
        """Number of the last step begun; 0 before the first."""
        return self._last

    @property
    def blocked(self) -> bool:
        """Whether the next step's buffer set is still taken by an open step."""
        return self._last + 1 - SETS in self.open

    def begin(self) -> int:
        """Open the next step.

        Raises:
            MoEEpConfigError: the step before last is still open; nothing is lost.
        """
        step = self._last + 1
        if self.blocked:
            raise config_error(
                "dispatch",
                f"step {step} while step {step - SETS} is not combined",
                f"at most {SETS} steps dispatched and not yet combined",
                "combine (or destroy the handle of) the older one first",
            )
        waiter = self._group.waiter
        if spoiled := self._spoiled[step % SETS]:
            waiter.wait([peer for peer in self._others() if self._faults.trusts(peer)], Operation.CLOSED, spoiled)
            self._spoiled[step % SETS] = 0
        self._last = step
        self.open.add(step)
        waiter.publish(Word.STATE, State.RUNNING)
        waiter.publish(Word.STEP, step)
        waiter.publish(Word.OPERATION, Operation.DISPATCH)
        fence()  # a reader that sees data of this step sees its number too: overtaken() relies on it
        return step

    def commit(self, operation: Operation, step: int, *, tokens: int, topk: int, dtype: int) -> None:
        """Write the header and let the peers see this phase's data."""
        self._group.waiter.publish(Word.OPERATION, operation)
        self._write(Header(0, 0, step, operation, tokens, topk, dtype), SegmentLayout.header(operation, step))
        self._group.commit(operation, step)

    def _write(self, header: Header, place: int) -> None:
        header = header._replace(generation=self._generation, round=self._faults.epoch, mask=self._faults.trusted)
        header.write(self._group.memory, self._segment(self._group.rank) + place)

    def collect(self, operation: Operation, step: int, among: int = -1) -> list[Header | None]:
        """Wait for every rank's commit and return their headers, in rank order; None for who is masked or missing.

        Args:
            among: ranks that still count in this step, as bits: absent in dispatch is absent in combine.

        Raises:
            MoEEpPeerError: a rank failed in this step, ended, or is in another call.
            MoEEpTimeoutError: a rank did not come.
        """
        group, faults = self._group, self._faults
        headers: list[Header | None] = [None] * group.world_size
        peers = [peer for peer in self._others() if among & faults.trusted >> peer & 1]
        lost = group.waiter.wait(peers, operation, step)
        for peer in peers:
            self._raise_if_failed(peer, operation, step)
        for peer in (*peers, group.rank):
            if peer in lost:
                continue
            header = Header.read(group.memory, self._segment(peer) + SegmentLayout.header(operation, step))
            if header.step != step or header.operation is not operation:
                if faults.tolerant and header.step > step:
                    faults.behind = True
                    continue
                raise MoEEpPeerError(
                    f"rank {group.rank} is in {operation.name.lower()} of step {step}, rank {peer} in "
                    f"{header.operation.name.lower()} of step {header.step}",
                    rank=peer,
                    reason="another call",
                )
            faults.heard(header.round, header.mask)
            headers[peer] = header
        return headers

    def _raise_if_failed(self, peer: int, operation: Operation, step: int) -> None:
        failed_step, failed_phase = divmod(self._group.waiter.said(peer, Word.FAILED + step % SETS), 4)
        if failed_step == step and failed_phase <= operation:
            header = Header.read(self._group.memory, self._segment(peer) + SegmentLayout.failure(step))
            raise MoEEpPeerError(
                f"rank {header.origin} failed in step {step}, {operation.name.lower()}: {header.reason}",
                rank=header.origin,
                reason=header.reason,
            )

    def overtaken(self, step: int) -> bool:
        """Whether a peer may have begun to reuse the memory of ``step``: what was read of it is then worth nothing.

        Only possible where the others went on without this rank; it is a fault, and the step's output is flagged.
        """
        if self._faults.tolerant:
            fence()
            waiter = self._group.waiter
            if any(waiter.said(peer, Word.STEP) >= step + SETS for peer in self._others()):
                self._faults.behind = True
                return True
        return False

    def resume(self, step: int) -> None:
        """Begin again at ``step``, which all survivors of a decision agreed on; nobody is reading old memory."""
        self._last = step - 1
        self.open.clear()
        self._spoiled = [0] * SETS

    def close(self, step: int) -> None:
        """The step went well."""
        self.open.discard(step)
        self._group.commit(Operation.CLOSED, step)

    def fail(self, step: int, error: BaseException | str) -> None:
        """Give an open step up: commit a row-less header for every phase that is left, and close it.

        Peers stop waiting and raise MoEEpPeerError that names the rank whose mistake it was.
        """
        if step not in self.open or self._group.closed:
            return
        origin = error.rank if isinstance(error, MoEEpPeerError) and error.rank >= 0 else self._group.rank
        reason = getattr(error, "reason", "") or str(error)
        waiter = self._group.waiter
        waiter.publish(Word.STATE, State.FAILED_STEP)
        phases = (Operation.DISPATCH, Operation.COMBINE)
        left = [phase for phase in phases if not waiter.committed(self._group.rank, phase, step)]
        if left:
            header = Header(0, 0, step, left[0], failed=True, origin=origin, reason=reason)
            self._write(header, SegmentLayout.failure(step))
            waiter.publish(Word.FAILED + step % SETS, 4 * step + left[0])
        for phase in left:
            self._group.commit(phase, step)
        waiter.wake_sleepers()
        self._spoiled[step % SETS] = step
        self.close(step)

    def fail_next(self, error: BaseException) -> None:
        """Give up the step that this rank was about to begin, for a mistake made before anything was sent."""
        if not self.blocked and not self._group.closed:
            self.fail(self.begin(), error)

    def _others(self) -> list[int]:
        rank, world = self._group.rank, self._group.world_size
        return [(rank + away) % world for away in range(1, world)]

    def _segment(self, rank: int) -> int:
        return rank * self._group.range.stride
