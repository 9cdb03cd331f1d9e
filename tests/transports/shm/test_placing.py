"""Rows that their senders place in the receivers' memory: the bits of rows that are fetched, whoever does which."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    CombineInputParams,
    DispatchInputParams,
    EpLayout,
    Fleet,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    HandleAlgoKnobTopKWeights,
    HandleParams,
    MoEEpPeerError,
    ShmConfig,
    create_fleet,
)
from moefleet.transports.shm.buffers import BufferSet
from moefleet.transports.shm.fleet import ShmFleet
from tests.conformance.pool import shared_pool
from tests.native.needs import needs_the_helper
from tests.strategies import make_problem
from tests.transports.shm.ranks import EXPERTS, HIDDEN, MOST, TOPK, fleet_of

pytestmark = needs_the_helper

W = 3
ALWAYS, HALF, NEVER = 0, 4 * HIDDEN * MOST // 2, 1 << 40
"""Of ``place_bytes``: at ``HALF`` some ranks of a step place their rows, and others do not."""


class Steps:
    """Steps of one rank with random routing, halves or not, rows given back from one place or another."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._rank = fleet, fleet.bootstrap.rank

    def begin(self, number: int, halves: bool = False) -> None:
        tokens = [(5 * number + 3 * peer) % (MOST + 1) for peer in range(W)]
        problem = make_problem(number, W, EXPERTS, HIDDEN, TOPK, tokens)
        x, ids, weights = (part[self._rank] for part in (problem.xs, problem.topk_ids, problem.topk_weights))
        self._handle = self._fleet.create_handle(HandleParams(ids), [HandleAlgoKnobTopKWeights(weights)])
        if halves:
            self._handle.dispatch_send_only(DispatchInputParams([x]))
            x.fill_(torch.nan)  # it may change from now on
            self._out = self._handle.dispatch_recv_only()
        else:
            self._out = self._handle.dispatch(DispatchInputParams([x]))

    def send_rows(self) -> None:
        self._handle.combine_send_only(CombineInputParams([self._out.expert_tensors]))

    def end(self, buffer: bool) -> torch.Tensor:
        rows = self._out.expert_tensors
        made = rows * torch.arange(1, rows.shape[0] + 1).view(-1, *[1] * (rows.dim() - 1))
        if buffer and (room := self._handle.combine_buffer()) is not None:
            made = room.copy_(made)
        y = self._handle.combine(CombineInputParams([made])).x
        self._handle.destroy()
        return y


def outputs(bootstrap: BootstrapConfig, layout: EpLayout, place_bytes: int) -> list[torch.Tensor]:
    """Steps of all kinds, among them two that are open together."""
    with fleet_of(bootstrap, layout, place_bytes) as fleet:
        one, other, found = Steps(fleet), Steps(fleet), []
        for number in range(12):
            one.begin(number, halves=number % 5 == 1)
            found.append(one.end(buffer=number % 3 > 0))
        for number in range(12, 24, 2):
            one.begin(number)
            other.begin(number + 1, halves=number % 4 == 0)
            found.append(one.end(buffer=number % 4 == 2))
            found.append(other.end(buffer=number % 3 == 0))
        return found


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_the_same_bits(layout: EpLayout) -> None:
    ways = [shared_pool().run(outputs, layout, place, world_size=W) for place in (ALWAYS, HALF, NEVER)]
    for rank in range(W):
        for way in ways:
            assert way[rank].error is None, way[rank].error
        for one, *others in zip(*(way[rank].value for way in ways), strict=True):
            for other in others:
                assert torch.equal(one, other)


def fails_between(bootstrap: BootstrapConfig, layout: EpLayout) -> list[str]:
    """Rank 1 brings too many rows, or none at all, in every third step; the others are in the middle of placing."""
    said = []
    with fleet_of(bootstrap, layout, ALWAYS) as fleet:
        assert isinstance(fleet, ShmFleet) and fleet.placing
        steps = Steps(fleet)
        for number in range(9):
            try:
                if number % 3 == 1 and bootstrap.rank == 1:
                    fleet.steps.fail_next(ValueError(f"step {number}"))
                    continue
                steps.begin(number)
                steps.end(buffer=True)
            except MoEEpPeerError as error:
                said.append(f"{error.rank}: {error.reason}")
                steps._handle.destroy()
    return said


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_a_rank_that_fails_a_step(layout: EpLayout) -> None:
    """Peers that wait for its routing alone hear of it as well, and the next step works."""
    outcomes = shared_pool().run(fails_between, layout, world_size=W)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        assert outcome.value == ([] if rank == 1 else [f"1: ValueError: step {number}" for number in (1, 4, 7)])


def served_wrongly(bootstrap: BootstrapConfig, layout: EpLayout) -> str:
    """Rank 1 says that it served one token more of each rank than it was brought."""
    with fleet_of(bootstrap, layout) as fleet:
        assert isinstance(fleet, ShmFleet)
        steps, give = Steps(fleet), fleet.moves.give

        def give_wrongly(at: BufferSet, inbox: Any, rows: torch.Tensor) -> bool:
            stayed = give(at, inbox, rows)
            at.offsets[1] += 1
            return stayed

        steps.begin(3)
        try:
            if bootstrap.rank == 1:
                fleet.moves.give = give_wrongly  # type: ignore[method-assign]
                steps.send_rows()
            else:
                steps.end(buffer=False)
        except MoEEpPeerError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_a_peer_that_served_other_tokens(layout: EpLayout) -> None:
    outcomes = shared_pool().run(served_wrongly, layout, world_size=W)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert outcomes[rank].value == "rank 1 in combine of step 1: it served other tokens than this rank brought"


def rows_of(number: int) -> torch.Tensor:
    return torch.arange(MOST * HIDDEN, dtype=torch.float32).view(MOST, HIDDEN) + 1000 * number


def gone_on(bootstrap: BootstrapConfig) -> torch.Tensor | None:
    """Rank 0 goes on without rank 1, which has two steps open, and writes other routing to the memory of the first."""
    store, rank = bootstrap.tcp_store, bootstrap.rank
    assert store is not None
    params = FleetParams(EXPERTS, MOST, HIDDEN, 4, max_topk=2)
    knobs, config = [FleetAlgoKnobFaultTolerance(timeout_ms=2500)], ShmConfig(place_bytes=0)
    per_rank = EXPERTS // W
    to_rank_1, to_rank_0 = (torch.tensor([[first, first + 1]] * MOST) for first in (per_rank, 0))
    weights = [HandleAlgoKnobTopKWeights(torch.ones(MOST, 2))]
    with create_fleet(bootstrap, params, knobs, config) as fleet:
        handles = [fleet.create_handle(HandleParams(to_rank_1), weights) for _ in range(2)]
        outs = [handle.dispatch(DispatchInputParams([rows_of(rank)])) for handle in handles]
        combined = CombineInputParams([outs[0].expert_tensors.clone()])
        if rank > 0:
            store.wait(["written"])
            y = handles[0].combine(combined).x
        else:
            y = handles[0].combine(combined).x
            third = fleet.create_handle(HandleParams(to_rank_0), weights)
            third.dispatch(DispatchInputParams([rows_of(9)]))
            store.set("written", "")
        found = None if rank == 0 or fleet.query_fault() else y
        store.add("done", 1)
        while store.add("done", 0) < W:
            time.sleep(0.01)
        return found


def test_rows_of_a_rank_that_others_went_on_without_are_those_of_its_step() -> None:
    """It enters rows for who still waits for them by the routing that they came with."""
    outcomes = shared_pool().run(gone_on, world_size=W)
    assert [outcome.error for outcome in outcomes] == [None] * W
    y = outcomes[2].value
    assert y is not None, "rank 2 saw no fault"
    torch.testing.assert_close(y, 2 * rows_of(2))


def huge_bytes() -> int:
    """Of this process's mappings of shared memory."""
    with open("/proc/self/smaps") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped:"))


def test_pages_of_experts_with_many_rows_are_gathered() -> None:
    tokens, hidden, experts = 256, 512, 4  # 2 KiB a row: an expert has enough of them with all tokens, else it has not
    params = FleetParams(experts, tokens, hidden, 4, max_topk=1)
    x, before = torch.randn(tokens, hidden), huge_bytes()
    with create_fleet(BootstrapConfig(1, 0, device="cpu"), params, backend=ShmConfig(place_bytes=0)) as fleet:
        assert isinstance(fleet, ShmFleet) and fleet.moves.in_c
        at_first = huge_bytes()
        weights = [HandleAlgoKnobTopKWeights(torch.ones(tokens, 1))]
        for number in range(8):
            ids = torch.full((tokens, 1), 2) if number % 4 > 1 else torch.arange(tokens)[:, None] % experts
            with fleet.create_handle(HandleParams(ids), weights) as handle:
                rows = handle.dispatch(DispatchInputParams([x])).expert_tensors
                made = handle.combine_buffer()
                assert made is not None
                assert torch.equal(handle.combine(CombineInputParams([made.copy_(rows)])).x, x)
        bytes_of_expert_2 = tokens * hidden * 4
        rows, made = fleet.moves.gathered.swapaxes(0, 1).tolist()
        assert rows == [[0, 0, bytes_of_expert_2, 0]] * 2, "in both sets"
        assert made == [[0, 0, bytes_of_expert_2, 0], [0] * experts], "one is used again and again"
        if at_first > before:  # so the kernel can: what is taken at construction is gathered then
            assert huge_bytes() > at_first
