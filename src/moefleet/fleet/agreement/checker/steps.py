"""Steps and rounds together: ranks that also wait for one another in shared memory.

A rank runs steps. In one it commits, then waits for every active peer, lowest first. A wait ends when the peer has
committed under the same decision; or is in a round, or past one that we do not know (then the step is faulty, and
nobody is accused); or is dead (then it is accused); or when time runs out (likewise). A commit under an earlier
decision is no commit. After a faulty step the rank calls, and once it has adopted
a decision it goes on from there. A rank that got no quorum may leave, or run more steps first. One that has run all its
steps rests, and calls when it sees that others do.

Beside what :mod:`.properties` says of agreement, two things must hold:

g. A rank never runs a step number twice, nor takes for its peer's commit one that was made under another decision.
h. Nobody needs a time-out to get on: as long as some rank is neither at rest nor gone, somebody can move without one.
   A rank that is in a round therefore has to free those who wait for it in a step.

Store operations are single moves; only a wait and the reading of views that follows are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..protocol import Call, Done, Fail, Failure, Member, Offer, Post, Read, State, Wait, advance
from ..values import Decision, Kind, first_decision, members
from .model import Numbers
from .plain import answers, writes
from .properties import check_adopted, check_offer, check_told
from .search import Violation
from .words import does, gets, names
from .world import Advance, AnyOperation, Begin, Store, begin_call, empty_store


@dataclass(frozen=True)
class StepSetting:
    """What can happen.

    Attributes:
        world: ranks.
        steps: steps that each rank runs.
        rounds, calls: decisions until the horizon, and calls that each rank makes at most.
        timeouts: whether waits in steps and rounds may run out of time.
        heeds_rounds: whether being in a round frees those who wait (a mutant ignores it).
        heeds_later: whether a peer that follows a later decision frees those who wait (a mutant ignores it).
        reads_headers: whether a commit under an earlier decision is seen to be that (a mutant looks at flags only).
    """

    world: int
    steps: int
    rounds: int
    calls: int
    timeouts: bool = True
    heeds_rounds: bool = True
    heeds_later: bool = True
    reads_headers: bool = True


@dataclass(frozen=True)
class Block:
    """What others read of a rank: the decision that it follows, its last commit and the decision that was made under.

    ``gone`` means dead or departed, as the operating system shows.
    """

    epoch: int = 0
    step: int = -1
    step_epoch: int = 0
    in_round: bool = False
    gone: bool = False


@dataclass(frozen=True)
class Runner:
    """Where a rank is.

    Attributes:
        rank, calls, adopted: who, how many calls it made, what it holds.
        step: the step that runs, or the next one.
        waits: peers that this step still waits for; ``None`` between steps.
        accused, faulty: what it will bring to its next call, and whether there will be one.
        state, operation: where it is in a call.
        block: what others see.
    """

    rank: int
    adopted: Decision
    calls: int = 0
    step: int = 0
    waits: int | None = None
    accused: int = 0
    faulty: bool = False
    state: State | None = None
    operation: AnyOperation | None = None
    block: Block = Block()


Node = tuple[int, ...]
"""Number of the store, then the number of each rank's :class:`Runner`."""


@dataclass(frozen=True)
class Move:
    """What one rank does: where it is afterwards, what the store holds, and whether time had to run out."""

    runner: Runner
    store: Store
    words: str
    timeout: bool = False


class StepModel:
    """The model to search."""

    def __init__(self, setting: StepSetting, advance: Advance = advance, begin: Begin = begin_call) -> None:
        self.setting, self._advance, self._begin = setting, advance, begin
        self._runners: Numbers[Runner] = Numbers(30)
        self._stores: Numbers[Store] = Numbers(30)
        self._blocks: Numbers[Block] = Numbers(30)
        self._block_of: dict[int, int] = {}
        self._known: dict[tuple[int, ...], tuple[tuple[int, int, str, bool], ...]] = {}

    def start(self) -> Node:
        first = first_decision(self.setting.world)
        runners = [self._number(Runner(rank, first)) for rank in range(self.setting.world)]
        return (self._stores(empty_store(self.setting.rounds)), *runners)

    def successors(self, node: Node) -> Sequence[Node]:
        found, stuck = [], True
        for at, after, store, _, timeout in self._after(node):
            stuck = stuck and timeout
            found.append((store, *node[1:at], after, *node[at + 1 :]))
        if stuck:
            self._check_stuck(node)
        return found

    def labels(self, node: Node) -> Sequence[str]:
        return [words for _, _, _, words, _ in self._after(node)]

    def _after(self, node: Node) -> Iterator[tuple[int, int, int, str, bool]]:
        blocks = tuple(self._block_of[number] for number in node[1:])
        for at in range(1, len(node)):
            key = (node[at], node[0], *blocks)
            known = self._known.get(key)
            if known is None:
                seen = [self._blocks.values[block] for block in blocks]
                moves = dict.fromkeys(self._moves(self._runners.values[node[at]], self._stores.values[node[0]], seen))
                known = self._known[key] = tuple(
                    (self._number(move.runner), self._stores(move.store), move.words, move.timeout) for move in moves
                )
            for after, store, words, timeout in known:
                yield at, after, store, words, timeout

    def _number(self, runner: Runner) -> int:
        number = self._runners(runner)
        self._block_of.setdefault(number, self._blocks(runner.block))
        return number

    def _check_stuck(self, node: Node) -> None:
        runners = [self._runners.values[number] for number in node[1:]]
        if any(self._beyond_horizon(each) for each in runners):
            return
        for each in runners:
            if not each.block.gone and not self._rests(each):
                waits = f"waits in step {each.step} for {names(each.waits or 0)}"
                doing = does(each.operation) if each.operation else waits
                raise Violation("h", f"rank {each.rank} {doing}, and only a time-out can help")

    def _rests(self, me: Runner) -> bool:
        return me.state is None and me.waits is None and not me.faulty and me.step >= self.setting.steps

    def _beyond_horizon(self, me: Runner) -> bool:
        return isinstance(me.operation, Read) and me.operation.number > self.setting.rounds

    # Moves.

    def _moves(self, me: Runner, store: Store, blocks: Sequence[Block]) -> Iterator[Move]:
        if me.block.gone:
            return
        if me.state is not None:
            yield from self._call_moves(me, store, blocks)
        elif me.waits:
            yield from self._wait_moves(me, store, blocks)
        elif me.waits == 0:
            yield Move(replace(me, waits=None, step=me.step + 1), store, f"rank {me.rank} ends step {me.step}")
        elif me.faulty:
            yield self._enter(me, store)
        elif me.step < self.setting.steps:
            if me.step <= me.block.step:
                raise Violation("g", f"rank {me.rank} runs step {me.step} again; its flags say {me.block.step}")
            yield Move(self._gone(me), store, f"rank {me.rank} crashes before step {me.step}")
            block = replace(me.block, step=me.step, step_epoch=me.adopted.number)
            waits = me.adopted.mask & ~(1 << me.rank)
            yield Move(replace(me, waits=waits, block=block), store, f"rank {me.rank} commits step {me.step}")
        else:
            others = [blocks[rank] for rank in members(me.adopted.mask & ~(1 << me.rank))]
            if any(other.in_round or other.epoch > me.adopted.number for other in others):
                yield self._enter(me, store)

    def _wait_moves(self, me: Runner, store: Store, blocks: Sequence[Block]) -> Iterator[Move]:
        assert me.waits
        peer = next(members(me.waits))
        block, rest = blocks[peer], me.waits & ~(1 << peer)
        where = f"rank {me.rank}, in step {me.step},"
        same = block.step_epoch == me.adopted.number
        if block.step >= me.step and (same or not self.setting.reads_headers):
            if not same:
                raise Violation(
                    "g", f"{where} takes what rank {peer} committed under decision {block.step_epoch} for this step"
                )
            yield Move(replace(me, waits=rest), store, f"{where} has rank {peer}'s commit")
        elif self.setting.heeds_later and block.epoch > me.adopted.number:
            yield Move(replace(me, waits=rest, faulty=True), store, f"{where} sees that rank {peer} is past a round")
        elif self.setting.heeds_rounds and block.in_round:
            yield Move(replace(me, waits=rest, faulty=True), store, f"{where} sees rank {peer} in a round")
        else:
            accuse = replace(me, waits=rest, faulty=True, accused=me.accused | 1 << peer)
            if block.gone:
                yield Move(accuse, store, f"{where} sees that rank {peer} died")
            elif self.setting.timeouts:
                yield Move(accuse, store, f"{where} gives up on rank {peer}", timeout=True)

    def _enter(self, me: Runner, store: Store) -> Move:
        if me.calls >= self.setting.calls:
            return Move(self._gone(me), store, f"rank {me.rank} leaves")
        member = Member(me.rank, self.setting.world)
        call = Call(Kind.RECONCILE, me.accused, me.step - 1)
        state, operation = self._begin(member, me.adopted, call, False, me.calls)
        block = replace(me.block, in_round=True)
        entered = replace(me, calls=me.calls + 1, state=state, operation=operation, block=block)
        return Move(entered, store, f"rank {me.rank} calls, accusing {names(me.accused)}")

    def _call_moves(self, me: Runner, store: Store, blocks: Sequence[Block]) -> Iterator[Move]:
        state, operation = me.state, me.operation
        assert state is not None and operation is not None
        gone = sum(1 << rank for rank, block in enumerate(blocks) if block.gone)
        if self._beyond_horizon(me):
            return
        if isinstance(operation, Post):
            check_told(me.rank, me.adopted.number, _before(store, operation.number), "posts")
        if writes(operation):
            yield Move(self._gone(me), store, f"rank {me.rank} crashes before it {does(operation)}")
        for answer in answers(operation, store, gone):
            if answer.timeout and not self.setting.timeouts:
                continue
            after, then = self._advance(state, answer.response)
            words = f"rank {me.rank} {does(operation)}: {gets(answer.response)}"
            if isinstance(operation, Wait) and not isinstance(answer.response, Decision):
                for look in answers(then, store, gone):
                    looked, again = self._advance(after, look.response)
                    if (looked, again) != (state, operation):
                        yield from self._settle(
                            me, looked, again, store, gone, f"{words}; {gets(look.response)}", answer.timeout
                        )
            else:
                yield from self._settle(me, after, then, answer.store, gone, words, answer.timeout)

    def _gone(self, me: Runner) -> Runner:
        """Dead or departed. What it had committed stays."""
        block = replace(me.block, in_round=False, gone=True)
        return Runner(me.rank, first_decision(self.setting.world), block=block)

    def _settle(
        self, me: Runner, state: State, operation: AnyOperation, store: Store, gone: int, words: str, timeout: bool
    ) -> Iterator[Move]:
        """Where a rank is once a response has brought it to this state; a call that is over is left."""
        if isinstance(operation, Offer):
            views = store.posted[operation.decision.number - 1]
            check_offer(state.last, views, operation.decision, gone, state.member.quorum)
        if not isinstance(operation, (Done, Fail)):
            yield Move(replace(me, state=state, operation=operation), store, words, timeout)
            return
        words = f"{words}; it {does(operation)}"
        left = replace(me, state=None, operation=None, block=replace(me.block, in_round=False))
        if isinstance(operation, Done):
            decision = operation.decision
            number, world = decision.number, self.setting.world
            check_told(me.rank, me.adopted.number, _before(store, number + 1), "ends a call")
            check_adopted(me.rank, decision, me.adopted.number, me.step - 1, store.decided(), world, False)
            block = replace(left.block, epoch=number)
            adopted = replace(left, adopted=decision, step=decision.resume_step, accused=0, faulty=False, block=block)
            yield Move(adopted, store, words, timeout)
        else:
            yield Move(self._gone(me), store, words, timeout)
            if operation.failure is Failure.NO_QUORUM:
                check_told(me.rank, me.adopted.number, _before(store, state.last.number + 1), "ends a call")
                yield Move(replace(left, faulty=me.step >= self.setting.steps), store, f"{words}, but goes on", timeout)


def _before(store: Store, number: int) -> dict[int, Decision]:
    return {each: decision for each, decision in store.decided().items() if each < number}
