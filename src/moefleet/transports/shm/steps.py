"""The sequence of steps of a Fleet: numbered, at most two open, each committed or failed for all peers to see."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import MoEEpPeerError, config_error
from ...fleet.stepping import blame
from ...substrate.control import SETS, TOKENS_AT, Header, Operation, State, Word
from ...substrate.faults import FaultState
from ...substrate.futex import fence, full_fence
from ...substrate.group import HostGroup
from ...substrate.rowtypes import code_name
from .layout import SegmentLayout
from .quick import QuickFlags, Tokens

_STATE, _STEP, _OPERATION, _FAILED = map(int, (Word.STATE, Word.STEP, Word.OPERATION, Word.FAILED))
_WAITING_ON, _COMBINING = int(Word.WAITING_ON), int(Word.COMBINING)
_RUNNING, _DISPATCH = int(State.RUNNING), int(Operation.DISPATCH)


class Steps:
    """Step numbers live with the Fleet and advance as steps run; step ``s`` uses buffer set ``s % 2``.

    Why a set may be written again at step ``s + 2``: this rank finished step ``s``, so all peers had committed their
    combine of ``s``, so they had read its tokens, and done with rows that were placed with them; and it writes combined
    rows only after all peers committed their dispatch of ``s + 2``, so they had finished reading those of ``s``. Where
    step ``s`` failed, that argument does not hold, and the peers' CLOSED flags are waited for instead. A rank that the
    others went on without can still be reading; it finds that out by :meth:`overtaken`. What experts make in
    EXPERT_MAJOR may be written over at ``s + 1``, where all ranks say that they are done with ``s``, see
    :meth:`Moves.making`.

    Args:
        group, faults, generation: shared memory, accusations, and the number of this set of ranks.
        quick: what is asked first, where the helper in C is there.

    Attributes:
        last: number of the last step begun; 0 before the first.
        open: steps that were begun, and not yet closed.
    """

    def __init__(self, group: HostGroup, faults: FaultState, generation: int, quick: QuickFlags | None = None) -> None:
        self._quick = quick
        self._group, self._faults, self._generation = group, faults, generation
        rank, world = group.rank, group.world_size
        self._others = [(rank + away) % world for away in range(1, world)]
        self._segments = [peer * group.range.stride for peer in range(world)]
        self.last = 0
        self.open: set[int] = set()
        self._spoiled = [0] * SETS

    @property
    def blocked(self) -> bool:
        """Whether the next step's buffer set is still taken by an open step."""
        return self.last + 1 - SETS in self.open

    def begin(self) -> int:
        """Open the next step.

        Raises:
            MoEEpConfigError: the step before last is still open; nothing is lost.
        """
        step = self.last + 1
        if step - SETS in self.open:
            raise config_error(
                "dispatch",
                f"step {step} while step {step - SETS} is not combined",
                f"at most {SETS} steps dispatched and not yet combined",
                "combine (or destroy the handle of) the older one first",
            )
        if spoiled := self._spoiled[step % SETS]:
            trusted = [peer for peer in self._others if self._faults.trusts(peer)]
            self._group.waiter.wait(trusted, Operation.CLOSED, spoiled)
            self._spoiled[step % SETS] = 0
        self.begin_now()
        words, mine = self._group.words, self._group.blocks[self._group.rank]
        words[mine + _STATE], words[mine + _STEP], words[mine + _OPERATION] = _RUNNING, step, _DISPATCH
        fence()  # a reader that sees data of this step sees its number too: overtaken() relies on it
        return step

    def begin_now(self) -> int:
        """The same where nothing is in the way and the helper says it; else nothing happens, and 0 is returned."""
        step = self.last + 1
        if step - SETS in self.open or self._spoiled[step % SETS]:
            return 0
        self.last = step
        self.open.add(step)
        return step

    def commit(self, operation: Operation, step: int, *, tokens: int, topk: int, dtype: int, placed: int = 0) -> None:
        """Write the header and let the peers see this phase's data.

        Args:
            placed: where rows lie, if where they are used: 1, of a combine what :meth:`Moves.give` said; else 0.
        """
        group, faults = self._group, self._faults
        if self._quick is not None:
            return self._quick.commit(operation, step, tokens, topk, dtype, placed)
        words, mine = group.words, group.blocks[group.rank]
        words[mine + _OPERATION], words[mine + _WAITING_ON] = operation.phase, 0
        header = Header(
            self._generation,
            faults.epoch,
            step,
            operation.phase,
            tokens,
            topk,
            dtype,
            mask=faults.trusted,
            placed=placed,
        )
        header.write(group.memory, self._segments[group.rank] + SegmentLayout.header(operation.phase, step))
        group.waiter.commit(operation, step)

    def collect(
        self, operation: Operation, step: int, among: int = -1, *, looked: bool = False
    ) -> tuple[Sequence[int] | Tokens, Sequence[int] | Tokens, int]:
        """Wait for every rank's commit.

        Args:
            among: ranks that still count in this step, as bits: absent in dispatch is absent in combine.
            looked: whether the helper has been asked already, and said no.

        Returns:
            Of each rank its tokens, and whether it placed its rows, 0 for who is masked or missing; both are good
            until the next call. And who is present, as bits.

        Raises:
            MoEEpPeerError: a rank failed in this step, ended, is in another call, or brings other rows or another K.
            MoEEpTimeoutError: a rank did not come.
        """
        group, rank = self._group, self._group.rank
        memory, words, blocks = group.memory, group.words, group.blocks
        taking = among & self._faults.trusted
        if not looked and self._quick is not None and self._quick.collect(operation, step, taking):
            return self._quick.tokens, self._quick.placed, taking | 1 << rank
        peers = [peer for peer in self._others if taking >> peer & 1]
        spun_s = 0.0 if self._quick is None else self._quick.spin_s
        lost = group.waiter.wait(peers, operation, step, spun_s=spun_s)
        given_up, operation = _FAILED + step % SETS, operation.phase
        for peer in peers:
            if 4 * step < words[blocks[peer] + given_up] <= 4 * step + operation:
                self._raise_failure(peer, operation, step)
        place = SegmentLayout.header(operation, step)
        at = self._segments[rank] + place
        mine = bytes(memory[at : at + TOKENS_AT])
        tokens, placed, present = [0] * group.world_size, [0] * group.world_size, 1 << rank
        tokens[rank], placed[rank] = words[(at + TOKENS_AT) // 8], words[(at + TOKENS_AT) // 8 + 1]
        for peer in peers:
            at = self._segments[peer] + place
            # A peer in the same call, of the same mind, differs in nothing but its tokens.
            if peer in lost or (bytes(memory[at : at + TOKENS_AT]) != mine and not self._accept(peer, operation, step)):
                continue
            tokens[peer], placed[peer] = words[(at + TOKENS_AT) // 8], words[(at + TOKENS_AT) // 8 + 1]
            present |= 1 << peer
        return tokens, placed, present

    def _accept(self, peer: int, operation: Operation, step: int) -> bool:
        """Whether a peer whose header differs from ours takes part; raises where it is in another call."""
        place, rank, faults = SegmentLayout.header(operation, step), self._group.rank, self._faults
        header = Header.read(self._group.memory, self._segments[peer] + place)
        mine = Header.read(self._group.memory, self._segments[rank] + place)
        if header.step != step or header.operation is not operation:
            if faults.tolerant and header.step > step:
                faults.behind = True
                return False
            raise MoEEpPeerError(
                f"rank {rank} is in {operation.name.lower()} of step {step}, rank {peer} in "
                f"{header.operation.name.lower()} of step {header.step}",
                rank=peer,
                reason="another call",
            )
        if header.topk != mine.topk or header.dtype != mine.dtype:
            theirs = f"K = {header.topk} and {code_name(header.dtype)}"
            raise MoEEpPeerError(
                f"rank {peer} brought {theirs} to step {step}, this rank K = {mine.topk} and {code_name(mine.dtype)}; "
                "a step has one K and one row type",
                rank=peer,
                reason=theirs,
            )
        faults.heard(header.round, header.mask)
        if faults.tolerant and header.round != mine.round:
            faults.behind = True  # made under another decision, its steps are others than ours
            return False
        return True

    def _raise_failure(self, peer: int, operation: Operation, step: int) -> None:
        fence()  # it may have said so just now
        header = Header.read(self._group.memory, self._segments[peer] + SegmentLayout.failure(step))
        raise MoEEpPeerError(
            f"rank {header.origin} failed in step {step}, {operation.name.lower()}: {header.reason}",
            rank=header.origin,
            reason=header.reason,
        )

    def write_combined(self, step: int) -> None:
        """Say that this rank is about to write over the rows that it combined for step ``step - 2``.

        Only :meth:`overtaken` asks, where the others may go on without a rank.
        """
        if self._faults.tolerant:
            self._group.words[self._group.blocks[self._group.rank] + _COMBINING] = step
            fence()  # a reader that sees rows of this step sees its number too

    def overtaken(self, operation: Operation, step: int) -> bool:
        """Whether a peer may have begun to reuse what was read for this phase: it is then worth nothing.

        Only possible where the others went on without this rank; it is a fault, and the step's output is flagged.
        """
        if self._faults.tolerant:
            fence()
            words, blocks = self._group.words, self._group.blocks
            word = _STEP if operation is Operation.DISPATCH else _COMBINING
            for peer in self._others:
                if words[blocks[peer] + word] >= step + SETS:
                    self._faults.behind = True
                    return True
        return False

    def resume(self, step: int) -> None:
        """Begin again at ``step``, which all survivors of a decision agreed on; nobody is reading old memory."""
        self.last = step - 1
        self.open.clear()
        self._spoiled = [0] * SETS

    def close(self, step: int) -> None:
        """The step went well."""
        self.open.discard(step)
        self._group.waiter.mark(Operation.CLOSED, step)

    def fail(self, step: int, error: BaseException | str) -> None:
        """Give an open step up: commit a row-less header for every phase that is left, and close it.

        Peers stop waiting and raise MoEEpPeerError that names the rank whose mistake it was.
        """
        if step not in self.open or self._group.closed:
            return
        origin, reason = blame(error, self._group.rank)
        waiter = self._group.waiter
        waiter.publish(Word.STATE, State.FAILED_STEP)
        phases = (Operation.DISPATCH, Operation.COMBINE)
        left = [phase for phase in phases if not waiter.committed(self._group.rank, phase, step)]
        if left:
            epoch, trusted = self._faults.epoch, self._faults.trusted
            header = Header(self._generation, epoch, step, left[0], 0, 0, 0, True, origin, reason, trusted)
            header.write(self._group.memory, self._segments[self._group.rank] + SegmentLayout.failure(step))
            fence()  # who sees that it failed sees why
            waiter.publish(Word.FAILED + step % SETS, 4 * step + left[0])
        if Operation.DISPATCH in left:
            waiter.mark(Operation.ROUTES, step)
        for phase in left:
            waiter.mark(phase, step)
        full_fence()
        waiter.wake_sleepers()
        self._spoiled[step % SETS] = step
        self.close(step)

    def fail_next(self, error: BaseException) -> None:
        """Give up the step that this rank was about to begin, for a mistake made before anything was sent."""
        if not self.blocked and not self._group.closed:
            self.fail(self.begin(), error)
