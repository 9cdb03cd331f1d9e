"""The movements of a step in C and in numpy and torch: the same bits, whatever the routing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefleet import EpAlgorithm, EpLayout, FleetParams, Placement, native
from moefleet.substrate.memory import AddressRange
from moefleet.substrate.rowtypes import DTYPES
from moefleet.transports.shm import compiled
from moefleet.transports.shm.buffers import Buffers
from moefleet.transports.shm.compiled import NativeInbox, NativeMoves
from moefleet.transports.shm.layout import SegmentLayout
from moefleet.transports.shm.moves import Moves, Routing
from moefleet.transports.shm.portable import PortableInbox, PortableMoves
from tests.native.needs import needs_the_helper
from tests.strategies import make_placement

pytestmark = needs_the_helper

quickly = settings(max_examples=80, deadline=None, derandomize=True)


@dataclass
class Rank:
    """One rank of a world that lives in this process."""

    moves: Moves[Any]
    buffers: Buffers[Any]


def world_of(params: FleetParams, placement: Placement, in_c: bool) -> list[Rank]:
    """All ranks over one stretch of memory, as segments are."""
    world = placement.world_size
    layout = SegmentLayout.of(params, world, max(placement.slots_per_rank) if in_c else None)
    stride = -(-layout.size // layout.align) * layout.align
    if layout.align % 8:
        stride *= 8
    buffer = (ctypes.c_char * (stride * world + 64))()
    shift = -ctypes.addressof(buffer) % 64
    memory = (ctypes.c_char * (stride * world)).from_buffer(buffer, shift)
    owners = np.append(placement.owner_table.numpy(), -1)
    ranks = []
    for rank in range(world):
        segments = AddressRange(memory, ctypes.addressof(memory), stride)
        group: Any = SimpleNamespace(
            rank=rank, world_size=world, range=segments, memory=memoryview(memory).cast("B")
        )  # fmt: skip
        held = placement.num_local(rank)
        if in_c:
            library = native.library()
            assert library is not None
            buffers: Buffers[Any] = Buffers.over(group, layout, params, held, NativeInbox)
            ranks.append(Rank(NativeMoves(params, placement, rank, owners, library, segments, layout), buffers))
        else:
            buffers = Buffers.over(group, layout, params, held, PortableInbox)
            ranks.append(Rank(PortableMoves(params, placement, rank, owners, buffers), buffers))
    return ranks


@dataclass
class Step:
    """What all ranks bring to a step; ``absent``: a rank that nobody hears of, ``deaf``: one that did not hear of
    rank 0, and so serves nothing of it; ``placed``: ranks that place their rows, where ranks can; ``stay``: whether
    experts write where their rows can stay."""

    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    tokens: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    absent: int = -1
    deaf: int = -1
    placed: tuple[int, ...] = ()
    stay: bool = False


def routing_of(ids: torch.Tensor, weights: torch.Tensor) -> Routing:
    routing = Routing(ids.shape)
    routing.read(ids, weights)
    return routing


def run(ranks: list[Rank], number: int, step: Step) -> Iterator[Any]:
    """Take a step, and yield all that users see of it, bits as integers."""
    world, topk = len(ranks), step.ids[0].shape[1]
    routings = [routing_of(ids, weights) for ids, weights in zip(step.ids, step.weights)]
    dtype, scale_dtype = step.tokens[0].dtype, None if step.scales[0] is None else step.scales[0].dtype
    present = sum(1 << rank for rank in range(world) if rank != step.absent)
    here = [rank for rank in range(world) if rank != step.absent]
    everybody = [len(ids) if present >> peer & 1 else 0 for peer, ids in enumerate(step.ids)]
    placing = bool(ranks[0].buffers.landings)
    placed = [int(placing and rank in step.placed) for rank in range(world)]
    for rank in here:
        at = ranks[rank].buffers.sets[number % 2]
        ranks[rank].moves.store(at, None if placed[rank] else step.tokens[rank], step.scales[rank], routings[rank])
    for rank in here:
        if placed[rank]:
            at = ranks[rank].buffers.sets[number % 2]
            ranks[rank].moves.push(at, step.tokens[rank], routings[rank], everybody, present)
    outputs, stayed = {}, []
    for rank in here:
        heard = present & ~1 if rank == step.deaf else present
        counts = [len(ids) if heard >> peer & 1 else 0 for peer, ids in enumerate(step.ids)]
        buffers, moves = ranks[rank].buffers, ranks[rank].moves
        inbox = buffers.landings[number % 2] if placing else buffers.inbox(number, ())
        outputs[rank] = out = inbox.output(dtype, topk, scale_dtype)
        arrived = moves.arrive(buffers.sets[number % 2], inbox, counts, placed, heard, topk)
        yield arrived
        moves.gather(buffers.sets[number % 2], inbox, dtype, number)
        filled = out.expert_counts if out.recv_total_counter is None else out.recv_total_counter
        assert filled is not None
        yield filled.tolist()
        blocks = out.expert_tensors.unsqueeze(0) if out.expert_tensors.dim() == 2 else out.expert_tensors
        for block, count in enumerate(filled.tolist()):
            yield bits(blocks[block, :count])
            if out.expert_scales is not None:
                yield bits(out.expert_scales.reshape(*blocks.shape[:2], -1)[block, :count])
        if out.recv_topk_idx is not None and out.recv_topk_weights is not None:
            yield out.recv_topk_idx.tolist()
            yield bits(out.recv_topk_weights)
        made = out.expert_tensors * 1.5  # what the experts do; what lies past the counts stays what it is
        room = buffers.made[moves.making(number)] if buffers.made else buffers.sets[number % 2].returned
        if step.stay and room is not None:
            made = room[dtype].copy_(made)
        stayed.append(int(moves.give(buffers.sets[number % 2], inbox, made)))
    for rank in here:
        at, moves = ranks[rank].buffers.sets[number % 2], ranks[rank].moves
        stays = dict(zip(here, stayed, strict=True))
        all_stays = [stays.get(peer, 0) for peer in range(world)]
        summed, unserved = moves.sum(at, routings[rank], present, all_stays, dtype, None)
        yield unserved
        yield bits(summed)
        yield moves.rows_received.tolist(), moves.rows_sent.tolist(), moves.tokens_per_expert()


def bits(numbers: torch.Tensor) -> list[Any]:
    """As integers; what is no number is all the same."""
    if numbers.is_floating_point():
        numbers = numbers.masked_fill(numbers.isnan(), torch.nan)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[numbers.itemsize]
    return numbers.contiguous().view(width).tolist()


def same(params: FleetParams, placement: Placement, steps: list[Step]) -> None:
    in_c, in_python = (world_of(params, placement, kind) for kind in (True, False))
    for number, step in enumerate(steps):
        for one, other in zip(run(in_c, number, step), run(in_python, number, step), strict=True):
            assert one == other


def params_of(layout: EpLayout, experts: int, most: int, hidden: int, **more: int) -> FleetParams:
    algorithm = EpAlgorithm.HIGH_THROUGHPUT if layout is EpLayout.FLAT else EpAlgorithm.LOW_LATENCY
    return FleetParams(experts, most, hidden, algorithm=algorithm, layout=layout, **more)


MOST, TOPK = 5, 16


@st.composite
def problems(draw: st.DrawFn) -> tuple[FleetParams, Placement, list[Step]]:
    """A few steps of a small world: duplicates, -1, ranks without tokens or experts, other K, other row types."""
    world, experts = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    placement = Placement.contiguous(experts, world)
    if draw(st.booleans()):
        placement = make_placement(draw(st.integers(0, 99)), experts, world)
    hidden = draw(st.sampled_from([1, 3, 16, 40, 64, 100, 200]))
    scale_bytes, wide = draw(st.sampled_from([0, 6])), draw(st.booleans())
    layout = draw(st.sampled_from(list(EpLayout)))
    params = params_of(
        layout, experts, MOST, hidden, dtype_bytes=4 if wide else 2, max_topk=TOPK, scale_bytes_per_token=scale_bytes
    )
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        topk, dtype = draw(st.sampled_from([1, 2, 3, 4, 8, TOPK])), draw(st.sampled_from(DTYPES[params.dtype_bytes]))
        dice = torch.Generator().manual_seed(draw(st.integers(0, 999)))
        counts = [draw(st.integers(0, MOST)) for _ in range(world)]
        step = Step([], [], [], [])
        for count in counts:
            step.ids.append(torch.randint(-1, experts, (count, topk), generator=dice))
            step.weights.append(torch.randn(count, topk, generator=dice))
            step.tokens.append(torch.randn(count, hidden, generator=dice).to(dtype))
            noise = torch.randint(0, 255, (count, scale_bytes), generator=dice, dtype=torch.uint8)
            step.scales.append(noise if scale_bytes else None)
        if world > 2 and draw(st.booleans()):
            step.absent = draw(st.integers(-1, world - 1))
            step.deaf = draw(st.integers(1, world - 1))
        if step.deaf < 0:  # who places rows relies on what all ranks heard
            step.placed, step.stay = tuple(draw(st.sets(st.integers(0, world - 1)))), draw(st.booleans())
        steps.append(step)
    return params, placement, steps


@quickly
@given(problems())
def test_both_kinds_give_the_same_bits(problem: tuple[FleetParams, Placement, list[Step]]) -> None:
    same(*problem)


@pytest.mark.parametrize("placed", [(), (0, 2), (0, 1, 2)], ids=["fetched", "mixed", "placed"])
@pytest.mark.parametrize("stream_bytes", [0, 1 << 20], ids=["past_the_caches", "through_the_caches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_wide_rows(
    monkeypatch: pytest.MonkeyPatch, layout: EpLayout, dtype: torch.dtype, stream_bytes: int, placed: tuple[int, ...]
) -> None:
    """Also sums that lie half way between two numbers of the row type, and those too large or too small for it."""
    monkeypatch.setattr(compiled, "STREAM_BYTES", stream_bytes)
    dice, hidden, topk = torch.Generator().manual_seed(1), 2080, 4
    params = params_of(layout, 6, 8, hidden, dtype_bytes=dtype.itemsize, max_topk=topk)
    steps = []
    for counts in ([8, 3, 0], [1, 8, 8]):
        step = Step([], [], [], [None] * 3, placed=placed, stay=bool(placed))
        for count in counts:
            step.ids.append(torch.randint(-1, 6, (count, topk), generator=dice, dtype=torch.int32))
            step.weights.append(torch.randn(count, topk, generator=dice))
            rows = torch.randn(count, hidden, generator=dice)
            rows[:, ::3] = 1 + torch.randint(0, 9, rows[:, ::3].shape, generator=dice) * torch.finfo(dtype).eps / 2
            rows[:, 1::9] *= torch.finfo(dtype).max / 4
            rows[:, 2::9] *= torch.finfo(dtype).tiny / 4
            step.tokens.append(rows.to(dtype))
        steps.append(step)
    same(params, Placement.contiguous(6, 3), steps)


@pytest.mark.parametrize("layout", list(EpLayout), ids=lambda layout: layout.name.lower())
def test_more_ranks_than_bits_of_a_word(layout: EpLayout) -> None:
    world, dice = 66, torch.Generator().manual_seed(2)
    step = Step([], [], [], [None] * world, placed=tuple(range(0, world, 2)), stay=True)
    for _ in range(world):
        step.ids.append(torch.randint(-1, world, (2, 3), generator=dice))
        step.weights.append(torch.randn(2, 3, generator=dice))
        step.tokens.append(torch.randn(2, 4, generator=dice))
    same(params_of(layout, world, 2, 4, dtype_bytes=4, max_topk=3), Placement.contiguous(world, world), [step])


def test_rows_that_are_not_contiguous() -> None:
    """Slices, rows of one tensor again and again, and rows whose elements lie far apart."""
    params, placement = params_of(EpLayout.RANK_MAJOR, 2, 4, 6, dtype_bytes=4, max_topk=1), Placement.contiguous(2, 1)
    ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    wide = torch.arange(96.0).view(8, 12)
    for tokens in (wide[::2, 3:9], wide[:4, ::2], wide[0, :6].expand(4, 6), torch.arange(24.0).view(6, 4).T):
        step = Step([ids], [weights], [tokens], [None])
        same(params, placement, [step])


def test_what_peers_say_is_taken_within_bounds() -> None:
    """Offsets and tokens that cannot be: such rows count as nothing, and nobody else's memory is touched."""
    params, placement = (
        params_of(EpLayout.EXPERT_MAJOR, 2, 2, 16, dtype_bytes=4, max_topk=1),
        Placement.contiguous(2, 2),
    )
    ranks = world_of(params, placement, in_c=True)
    step = Step([torch.tensor([[1], [0]])] * 2, [torch.ones(2, 1)] * 2, [torch.ones(2, 16)] * 2, [None] * 2)
    routings = [routing_of(ids, weights) for ids, weights in zip(step.ids, step.weights)]
    for rank, routing in zip(ranks, routings):
        rank.moves.store(rank.buffers.sets[0], step.tokens[0], None, routing)
    inbox = ranks[0].buffers.inbox(0, ())
    inbox.output(torch.float32, 1, None)
    assert ranks[0].moves.arrive(ranks[0].buffers.sets[0], inbox, [2, 2**40], [0, 0], 3, 1) == 2
    assert ranks[0].moves.arrive(ranks[0].buffers.sets[0], inbox, [2, -5], [0, 0], 3, 1) == 1
    for wrong in (-1, 4, 2**60):
        ranks[1].buffers.sets[0].offsets[:] = wrong
        summed, unserved = ranks[0].moves.sum(ranks[0].buffers.sets[0], routings[0], 0b10, [0, 0], torch.float32, None)
        assert not summed.any() and unserved == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routing_is_checked_and_copied_at_once(dtype: torch.dtype) -> None:
    params, placement = params_of(EpLayout.FLAT, 6, 4, 16, dtype_bytes=4, max_topk=3), Placement.contiguous(6, 1)
    moves = world_of(params, placement, in_c=True)[0].moves
    ids, weights = torch.tensor([[5, -1, 0], [2, 2, 3]], dtype=dtype), torch.rand(2, 3)
    routing = routing_of(torch.zeros_like(ids), torch.zeros_like(weights))
    for wrong in (6, -2, torch.iinfo(dtype).max, torch.iinfo(dtype).min):
        bad = ids.clone()
        bad[1, 2] = wrong
        assert not moves.read(routing, bad, weights)
        assert not routing.ids.any() and not routing.weights.any(), "nothing has changed"
    assert moves.read(routing, ids, weights)
    assert routing.ids.tolist() == ids.tolist() and routing.weights.tolist() == weights.tolist()
    none = Routing(ids[:0].shape)
    assert moves.read(none, ids[:0], weights[:0])
