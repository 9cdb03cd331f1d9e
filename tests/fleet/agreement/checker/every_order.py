"""The agreement model without any reduction: one operation per move, nothing done early, nothing forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moefleet.fleet.agreement.checker.plain import answers, writes
from moefleet.fleet.agreement.checker.world import (
    Graph,
    Place,
    Setting,
    Store,
    begin_call,
    crashed_place,
    empty_store,
    first_place,
    subsets,
)
from moefleet.fleet.agreement.protocol import Call, Done, Fail, Failure, Member, Phase, Read, Response, advance
from moefleet.fleet.agreement.values import Decision, Kind

End = tuple[tuple[Decision | None, ...], tuple[object, ...]]


class EveryOrder:
    """Searched by plain recursion on values; small settings only."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def ends(self, graph: Graph) -> set[End]:
        """The history and what every rank holds, wherever nothing more can happen."""
        world = self.setting.world
        start = (empty_store(self.setting.rounds), *(first_place(rank, world, graph[rank]) for rank in range(world)))
        seen, todo, ends = {start}, [start], set()
        while todo:
            store, *places = todo.pop()
            crashed = sum(1 << place.rank for place in places if place.crashed)
            moved = False
            for rank, here in enumerate(places):
                for place, after in self.moves(here, store, crashed):
                    moved = True
                    node = (after, *places[:rank], place, *places[rank + 1 :])
                    if node not in seen:
                        seen.add(node)
                        todo.append(node)
            if not moved:
                ends.add((store.history, tuple(map(held, places))))
        return ends

    def moves(self, here: Place, store: Store, crashed: int) -> Iterator[tuple[Place, Store]]:
        operation, state = here.operation, here.state
        if here.crashed:
            return
        if state is None:
            yield from ((begun, store) for begun in self.enter(here))
            return
        if isinstance(operation, Read) and operation.number > self.setting.rounds:
            return
        if writes(operation):
            yield crashed_place(here.rank, self.setting.world), store
        for answer in answers(operation, store, crashed):
            yield self.respond(here, answer.response), answer.store

    def respond(self, here: Place, response: Response) -> Place:
        assert here.state is not None
        assert here.state.phase is not Phase.OVER
        state, operation = advance(here.state, response)
        if isinstance(operation, Done):
            last_step = max(here.call.last_step, operation.decision.resume_step - 1)
            call = replace(here.call, accused=0, last_step=last_step)
            return Place(here.rank, here.calls, operation.decision, False, call)
        if isinstance(operation, Fail):
            evicted = here.evicted or operation.failure is Failure.EVICTED
            return Place(here.rank, here.calls, here.adopted, evicted, here.call)
        return replace(here, state=state, operation=operation)

    def enter(self, here: Place) -> Iterator[Place]:
        setting = self.setting
        kind = setting.kinds[min(here.calls, len(setting.kinds) - 1)]
        if here.calls >= setting.calls or (here.evicted and kind is Kind.RECONCILE):
            return
        standing = here.call.accused & here.adopted.mask
        last_step = max(here.call.last_step + 1, here.adopted.resume_step)
        others = here.adopted.mask & ~(1 << here.rank) & ~standing
        for more in subsets(others) if here.calls and setting.fresh else (0,):
            call = Call(kind, standing | more if kind is Kind.RECONCILE else 0, last_step)
            state, operation = begin_call(
                Member(here.rank, setting.world, setting.quorum), here.adopted, call, here.evicted, here.calls
            )
            yield replace(here, calls=here.calls + 1, call=call, state=state, operation=operation)


def held(place: Place) -> object:
    """What counts of a rank at the end."""
    return "crashed" if place.crashed else (place.adopted, place.evicted)
