"""Store operations as single moves, without any reduction: what may be answered, and what the store then holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..protocol import Offer, Post, Read, ReadViews, Response, Views, Wait, Woken
from .world import AnyOperation, Store, subsets


@dataclass(frozen=True)
class Answer:
    """A possible outcome of an operation.

    Attributes:
        response: what the rank gets.
        store: what the store holds afterwards.
        timeout: whether time ran out for this.
    """

    response: Response
    store: Store
    timeout: bool = False


def writes(operation: AnyOperation) -> bool:
    """Whether a crash before this operation can make a difference to others."""
    return isinstance(operation, (Post, Offer))


def answers(operation: AnyOperation, store: Store, crashed: int) -> Iterator[Answer]:
    """Everything that may happen when a live rank does this operation now; ``crashed`` may be known in part."""
    if isinstance(operation, Read):
        yield Answer(store.decision(operation.number), store)
    elif isinstance(operation, Post):
        yield Answer(None, store.post(operation.number, operation.view))
    elif isinstance(operation, ReadViews):
        for dead in subsets(crashed):
            yield Answer(Views(store.posted[operation.number - 1], dead), store)
    elif isinstance(operation, Wait):
        decision = store.decision(operation.number)
        if decision is not None:
            yield Answer(decision, store)
        else:
            yield Answer(Woken.LOOK, store)
            yield Answer(Woken.EXPIRED, store, timeout=True)
    else:
        assert isinstance(operation, Offer), operation
        held = store.decision(operation.decision.number)
        if held is None:
            held, store = operation.decision, store.decide(operation.decision)
        yield Answer(held, store)
