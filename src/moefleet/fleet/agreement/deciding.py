"""What a round decides, as functions of the views posted in it: who stays, whether enough have spoken, who offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .values import Decision, Kind, View, bit_set, everybody, members


def reconcile(accusations: Mapping[int, int], reported: int) -> int:
    """The mask that survivors agree on.

    Ranks that did not report go. Then, while anybody left accuses anybody left, the rank that appears in the most of
    these accusations goes, as accuser or accused; of equals the one that more accuse; of equals the highest. So a rank
    that all accuse goes, a rank that accuses all goes, and somebody is always left.

    Args:
        accusations: for each rank the set that it accuses; a rank without an entry accuses nobody.
        reported: ranks whose view was posted in time.
    """
    left = reported
    accuses = {rank: accusations.get(rank, 0) & ~(1 << rank) for rank in members(reported)}
    accusers = dict.fromkeys(accuses, 0)
    for rank, accused in accuses.items():
        for other in members(accused & reported):
            accusers[other] |= 1 << rank
    while True:
        worst, most = -1, (0, 0)
        for rank in members(left):
            by = (accusers[rank] & left).bit_count()
            named = by + (accuses[rank] & left).bit_count()
            if named and (named, by) >= most:
                worst, most = rank, (named, by)
        if worst < 0:
            return left
        left &= ~(1 << worst)


def round_kind(views: Sequence[View], active: int) -> Kind:
    """What a round is for: readmission, unless an active rank came to reconcile. Those wait in the next round."""
    wants = any(view.kind is Kind.RECONCILE and active >> view.rank & 1 for view in views)
    return Kind.RECONCILE if wants else Kind.READMIT


def missing(views: Sequence[View], active: int, world: int) -> int:
    """Whose view a round still waits for: all active ranks, and for a readmission the masked ones as well."""
    waited = active if round_kind(views, active) is Kind.RECONCILE else everybody(world)
    return waited & ~bit_set(view.rank for view in views)


def has_quorum(views: Sequence[View], active: int, dead: int, rule: str) -> bool:
    """Whether these views may decide for the ranks that the last decision left active.

    A majority may, and so may half of them with the lowest, and any number if every other is proven dead.
    """
    spoke = bit_set(view.rank for view in views) & active
    if rule == "any" or not active & ~spoke & ~dead:
        return True
    twice, all_of_them = 2 * spoke.bit_count(), active.bit_count()
    return twice > all_of_them or (twice == all_of_them and bool(spoke & active & -active))


def turn_of(rank: int, views: Sequence[View], active: int, dead: int) -> int:
    """How many ranks may offer before this one: active ones first, then lower ones, those proven dead not at all."""
    order = sorted((not active >> view.rank & 1, view.rank) for view in views if not dead >> view.rank & 1)
    return order.index((not active >> rank & 1, rank))


def decide(last: Decision, views: Sequence[View]) -> Decision:
    """The decision after ``last`` that these views lead to.

    To reconcile drops whoever did not post and resolves the accusations; to readmit adds whoever did. All go on one
    past the largest step that anybody posted.
    """
    posted = bit_set(view.rank for view in views)
    kind = round_kind(views, last.mask)
    if kind is Kind.RECONCILE:
        mask = reconcile({view.rank: view.accused for view in views}, posted & last.mask)
    else:
        mask = last.mask | posted
    resume_step = max(last.resume_step, 1 + max(view.step for view in views))
    return Decision(last.number + 1, kind, mask, resume_step)
