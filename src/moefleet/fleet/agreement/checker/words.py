"""Operations and responses in words, for traces."""

from __future__ import annotations

from ..protocol import Done, Fail, Failure, Offer, Post, Read, ReadViews, Response, Views, Wait, Woken
from ..values import Decision, bit_set, members
from .world import AnyOperation, Graph, Overwrite


def names(ranks: int) -> str:
    """A set of ranks."""
    return ", ".join(map(str, members(ranks))) or "nobody"


def decided(decision: Decision) -> str:
    """A decision."""
    return f"decision {decision.number} ({decision.kind.value}: {names(decision.mask)} at step {decision.resume_step})"


def does(operation: AnyOperation) -> str:
    """What a rank does next."""
    if isinstance(operation, Read):
        return f"reads decision {operation.number}"
    if isinstance(operation, Post):
        view = operation.view
        return f"posts in round {operation.number}, accusing {names(view.accused)}, at step {view.step}"
    if isinstance(operation, Wait):
        turn = "" if operation.turn is None else f", turn {operation.turn}"
        return f"waits for decision {operation.number}{turn}"
    if isinstance(operation, ReadViews):
        return f"reads the views of round {operation.number}"
    if isinstance(operation, (Offer, Overwrite)):
        return f"writes {decided(operation.decision)}"
    if isinstance(operation, Done):
        return f"adopts {decided(operation.decision)}"
    assert isinstance(operation, Fail)
    if operation.failure is Failure.EVICTED:
        return f"is evicted by {decided(operation.decision)}"
    return f"finds no quorum in round {operation.decision.number + 1}"


def gets(response: Response) -> str:
    """What an operation gave."""
    if isinstance(response, Decision):
        return decided(response)
    if isinstance(response, Views):
        dead = f", knowing that {names(response.dead)} died" if response.dead else ""
        return f"views of {names(bit_set(view.rank for view in response.views))}{dead}"
    if isinstance(response, Woken):
        return response.value
    return "none yet"


def accusations(graph: Graph) -> str:
    """An accusation graph."""
    words = [f"{rank} accuses {names(accused)}" for rank, accused in enumerate(graph) if accused]
    return "; ".join(words) or "nobody accuses anybody"
