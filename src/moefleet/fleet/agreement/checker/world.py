"""What a state of the agreement model is made of: where each rank is, and what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from ..protocol import Call, Member, Operation, Quorum, Response, State, Step, begin
from ..values import Decision, Kind, View, everybody, first_decision

T = TypeVar("T")


@dataclass(frozen=True)
class Overwrite:
    """Write a decision even where one exists. The protocol has no such operation; a mutant has."""

    decision: Decision


AnyOperation: TypeAlias = Operation | Overwrite
Advance: TypeAlias = Callable[[State, Response], tuple[State, AnyOperation]]
Begin: TypeAlias = Callable[[Member, Decision, Call, bool, int], Step]
Graph: TypeAlias = tuple[int, ...]
"""For each rank the set of those that it accuses."""


def begin_call(member: Member, adopted: Decision, call: Call, evicted: bool, calls: int) -> Step:
    """Enter a call; ``calls``, how many this rank made before, is of no concern to the protocol."""
    return begin(member, adopted, call, evicted=evicted)


@dataclass(frozen=True)
class Setting:
    """What can happen.

    Attributes:
        world: ranks.
        rounds: decisions until the horizon.
        calls: calls that each rank makes at most.
        kinds: what each call is for; the last holds for all further ones.
        fresh: whether a rank may accuse anybody still active in its later calls, else nobody.
        crashes, timeouts: whether these happen.
        calm: whether nothing at all goes wrong, accusations included.
        quorum: the rule.
    """

    world: int
    rounds: int
    calls: int
    kinds: tuple[Kind, ...] = (Kind.RECONCILE,)
    fresh: bool = False
    crashes: bool = True
    timeouts: bool = True
    calm: bool = False
    quorum: Quorum = "majority"


@dataclass(frozen=True)
class Place:
    """Where a rank is: in a call (``state`` and ``operation``), between calls (neither), or crashed.

    Attributes:
        rank, calls: who, and how many calls it has begun.
        adopted, evicted: what its Fleet holds.
        call: the last call, or before the first what that will start from. Its accusations stand until settled.
    """

    rank: int
    calls: int
    adopted: Decision
    evicted: bool
    call: Call
    state: State | None = None
    operation: AnyOperation | None = None
    crashed: bool = False


def first_place(rank: int, world: int, accused: int) -> Place:
    """A rank before its first call. Odd ranks are a step ahead of even ones."""
    return Place(rank, 0, first_decision(world), False, Call(Kind.RECONCILE, accused, rank % 2 - 1))


def crashed_place(rank: int, world: int) -> Place:
    return replace(first_place(rank, world, 0), crashed=True)


@dataclass(frozen=True)
class Store:
    """The history (index 0 is decision 1), and the views posted by round (index 0 is round 1)."""

    history: tuple[Decision | None, ...]
    posted: tuple[tuple[View, ...], ...]

    def decision(self, number: int) -> Decision | None:
        return self.history[number - 1] if number <= len(self.history) else None

    def decided(self) -> dict[int, Decision]:
        return {decision.number: decision for decision in self.history if decision is not None}

    def post(self, number: int, view: View) -> Store:
        others = [other for other in self.posted[number - 1] if other.rank != view.rank]
        views = tuple(sorted([*others, view], key=lambda each: each.rank))
        return replace(self, posted=_put(self.posted, number - 1, views))

    def decide(self, decision: Decision) -> Store:
        return replace(self, history=_put(self.history, decision.number - 1, decision))

    def forget_views(self, number: int) -> Store:
        return replace(self, posted=_put(self.posted, number - 1, ()))


def empty_store(rounds: int) -> Store:
    return Store((None,) * rounds, ((),) * rounds)


def subsets(ranks: int) -> Iterator[int]:
    """Every subset of a set of ranks, the empty one first."""
    subset = 0
    while True:
        yield subset
        subset = (subset - ranks) & ranks
        if not subset:
            return


def all_graphs(world: int) -> list[Graph]:
    """Every way in which ranks may accuse one another."""
    graphs: list[Graph] = [()]
    for rank in range(world):
        others = everybody(world) & ~(1 << rank)
        graphs = [(*graph, accused) for graph in graphs for accused in subsets(others)]
    return graphs


def named_graphs(world: int) -> dict[str, Graph]:
    """The shapes that accusations mostly have."""
    victim = world // 2
    return {
        "none": (0,) * world,
        "one victim": tuple(1 << victim if rank == victim - 1 else 0 for rank in range(world)),
        "mutual pair": tuple({0: 2, 1: 1}.get(rank, 0) for rank in range(world)),
        "all accuse one": tuple(0 if rank == victim else 1 << victim for rank in range(world)),
        "one accuses all": tuple(everybody(world) & ~1 if rank == 0 else 0 for rank in range(world)),
        "chain": tuple(1 << rank + 1 if rank + 1 < world else 0 for rank in range(world)),
    }


def _put(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
