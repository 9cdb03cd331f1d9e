"""The agreement as a model to search: all ranks' places and the store in one integer.

A state is a number with one field for the store, one for the set of crashed ranks and one for each rank's place; the
fields hold numbers that stand for the values of :mod:`.world`. What a rank may do depends on three of the fields only,
so it is computed once (by :mod:`.moves`, which calls the protocol) and kept as differences to add to a state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import Generic, NamedTuple, TypeVar

from .moves import Move, Moves
from .search import Violation
from .world import Graph, Place, Store, empty_store, first_place

V = TypeVar("V", bound=Hashable)
PLACE_BITS, STORE_BITS = 16, 24


class Numbers(Generic[V]):
    """Values by number, and numbers by value."""

    def __init__(self, bits: int) -> None:
        self.values: list[V] = []
        self._numbers: dict[V, int] = {}
        self._most = 1 << bits

    def __call__(self, value: V) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            assert number < self._most, "more values than a field can number"
            self.values.append(value)
        return number


class Known(NamedTuple):
    """What a rank may do, as differences between states.

    ``plain`` leaves the history as it is. Each of ``writes`` writes a decision, which the others then read.
    """

    plain: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    words: tuple[str, ...]


class AgreementModel:
    """States of ranks that agree, from any of the given accusation graphs.

    Args:
        moves: what ranks do, and in what setting.
    """

    def __init__(self, moves: Moves) -> None:
        self.moves, self.setting = moves, moves.setting
        self._ranks = range(self.setting.world)
        self._places: Numbers[Place] = Numbers(PLACE_BITS)
        self._stores: Numbers[Store] = Numbers(STORE_BITS)
        self._crashed_at = STORE_BITS
        self._place_at = [STORE_BITS + self.setting.world + PLACE_BITS * rank for rank in self._ranks]
        self._store_field = (1 << STORE_BITS) - 1
        place_fields = [(1 << PLACE_BITS) - 1 << at for at in self._place_at]
        crashed_field = (1 << self.setting.world) - 1 << self._crashed_at
        self._sees = [self._store_field | crashed_field | field for field in place_fields]
        self._wakes = [self._store_field | field for field in place_fields]
        self._known: list[dict[int, Known]] = [{} for _ in self._ranks]
        self._woken: list[dict[int, tuple[int, ...]]] = [{} for _ in self._ranks]
        self._after: dict[int, dict[int, int]] = {}

    def start(self, graph: Graph) -> int:
        """All ranks before their first call, with these accusations."""
        node = self._stores(empty_store(self.setting.rounds))
        for rank, at in zip(self._ranks, self._place_at):
            node |= self._places(first_place(rank, self.setting.world, graph[rank])) << at
        return node

    def successors(self, node: int) -> Sequence[int]:
        found: list[int] = []
        for rank in self._ranks:
            key = node & self._sees[rank]
            known = self._known[rank].get(key)
            if known is None:
                known = self._known[rank][key] = self._learn(rank, node)
            for difference in known.plain:
                found.append(node + difference)
            for difference, number in known.writes:
                found += self._wake_others(node + difference, rank, number)
        return found

    def labels(self, node: int) -> Sequence[str]:
        words: list[str] = []
        for rank in self._ranks:
            known = self._known[rank][node & self._sees[rank]]
            words += known.words[: len(known.plain)]
            for (difference, number), text in zip(known.writes, known.words[len(known.plain) :]):
                words += [text for _ in self._wake_others(node + difference, rank, number)]
        return words

    def values(self, node: int) -> tuple[Store, list[Place]]:
        """What the numbers in a state stand for."""
        return self._stores.values[node & self._store_field], [self._read(node, rank)[1] for rank in self._ranks]

    def most_operations(self) -> int:
        """Most store operations that a call can take, over all calls seen; property (f) says that there is a most."""
        most: dict[int, int] = {}
        open_places: set[int] = set()

        def longest(place: int) -> int:
            if place in open_places:
                raise Violation("f", f"a call may go on for ever: {self._places.values[place]}")
            if place not in most:
                open_places.add(place)
                ways = [count + longest_within(after) for after, count in self._after.get(place, {}).items()]
                most[place] = max(ways, default=0)
                open_places.discard(place)
            return most[place]

        def longest_within(place: int) -> int:
            return longest(place) if self._places.values[place].state is not None else 0

        return max((longest(place) for place in list(self._after)), default=0)

    def _read(self, node: int, rank: int) -> tuple[int, Place, Store]:
        number = node >> self._place_at[rank] & (1 << PLACE_BITS) - 1
        return number, self._places.values[number], self._stores.values[node & self._store_field]

    def _learn(self, rank: int, node: int) -> Known:
        place, here, store = self._read(node, rank)
        crashed = node >> self._crashed_at & (1 << self.setting.world) - 1
        plain: dict[int, str] = {}
        writes: dict[tuple[int, int], str] = {}
        for move in self.moves.of(here, store, crashed):
            difference = self._difference(rank, place, node & self._store_field, move)
            if move.wrote:
                writes.setdefault((difference, move.wrote), move.words)
            else:
                plain.setdefault(difference, move.words)
        return Known(tuple(plain), tuple(writes), (*plain.values(), *writes.values()))

    def _difference(self, rank: int, place: int, store: int, move: Move) -> int:
        after = self._places(move.place)
        if not move.place.crashed:
            self._count(place, after, move.operations)
        crash = move.place.crashed << self._crashed_at + rank
        return (after - place << self._place_at[rank]) + self._stores(move.store) - store + crash

    def _count(self, place: int, after: int, operations: int) -> None:
        ways = self._after.setdefault(place, {})
        ways[after] = max(operations, ways.get(after, 0))

    def _wake_others(self, node: int, writer: int, number: int) -> Iterator[int]:
        """The states after decision ``number`` was written and every rank that could read it has."""
        choices: list[tuple[int, ...]] = []
        for rank in self._ranks:
            if rank == writer:
                continue
            key = node & self._wakes[rank]
            woken = self._woken[rank].get(key)
            if woken is None:
                woken = self._woken[rank][key] = self._wake(node, rank, number)
            choices.append(woken)
        for differences in product(*choices):
            yield node + sum(differences)

    def _wake(self, node: int, rank: int, number: int) -> tuple[int, ...]:
        place, here, store = self._read(node, rank)
        woken: dict[int, None] = {}
        for move in self.moves.woken(here, store, number):
            assert move.store is store, "a rank that only reads has written"
            after = self._places(move.place)
            woken[after - place << self._place_at[rank]] = None
            if after != place:
                self._count(place, after, move.operations)
        return tuple(woken)
