"""What a step is made of, without ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from moefleet.fleet.witness import ENDED, identity
from moefleet.placement import Placement
from moefleet.substrate.control import REASON_BYTES, Operation
from moefleet.substrate.gather import HOST
from moefleet.substrate.routes import homecoming
from moefleet.transports.torch_dist import wire
from moefleet.transports.torch_dist.parcel import Departures, Parcel
from moefleet.transports.torch_dist.presence import Presence
from moefleet.transports.torch_dist.sizing import BlockSize
from moefleet.transports.torch_dist.status import Inline, Kind, Status, StatusCodec, StrangerError

STATUSES = [
    Status(Kind.READY, 7, Operation.DISPATCH, 4, 17, Inline.ROUTING, counts=(3, 0, 2**40)),
    Status(
        Kind.FAILED, 8, Operation.COMBINE, origin=2, reason="zu viele Wörter: " + "é" * REASON_BYTES, counts=(0,) * 3
    ),
    Status(Kind.WAITING, 9, Operation.COMBINE, counts=(0,) * 3),
]


def test_statuses_come_out_as_they_went_in() -> None:
    codec = StatusCodec(fleet_id=5, world_size=3)
    lines = np.stack([codec.encode(11, status) for status in STATUSES])
    assert lines.shape == (3, codec.size)
    ready, failed, waiting = codec.decode(11, lines)
    assert (ready, waiting) == (STATUSES[0], STATUSES[2])
    assert failed.reason.startswith("zu viele Wörter: éé") and len(failed.reason.encode()) <= REASON_BYTES + 3
    assert failed._replace(reason="") == STATUSES[1]._replace(reason="")
    assert failed.call == "combine of step 8"


@pytest.mark.parametrize("fleet_id, round_", [(5, 12), (6, 11)])
def test_what_is_not_of_this_round_is_a_stranger(fleet_id: int, round_: int) -> None:
    raw = StatusCodec(5, 3).encode(11, STATUSES[0])[None]
    with pytest.raises(StrangerError, match=rf"round 11 of Fleet 5 met round {round_} of Fleet {fleet_id}"):
        StatusCodec(fleet_id, 3).decode(round_, raw)


def dispatched(*counts: tuple[int, ...]) -> list[Status]:
    return [Status(Kind.READY, 1, Operation.DISPATCH, 2, counts=each) for each in counts]


def test_blocks_follow_what_is_sent() -> None:
    size = BlockSize(world_size=2, head=600, row_bytes=64, most=100 * 80)
    assert size.capacity == 640  # a status, and whole rows
    size.follow(dispatched((10, 8), (9, 10)), [16, 16])
    assert size.capacity % 64 == 0 and 600 + 10 * 80 < size.capacity < 600 + 12 * 80 + 64
    assert size.look >= 10 * 16
    for _ in range(4):  # and forget
        size.follow(dispatched((0, 0), (1, 0)), [16, 16])
    assert size.capacity < 600 + 2 * 80 + 64


def test_blocks_are_no_larger_than_what_there_can_be() -> None:
    size = BlockSize(world_size=2, head=600, row_bytes=64, most=128 * 80)
    size.follow(dispatched((120, 118), (119, 120)), [16, 16])
    assert 600 + 128 * 80 <= size.capacity < 600 + 128 * 80 + 64


def test_blocks_stay_small_where_most_of_them_would_be_padding() -> None:
    size = BlockSize(world_size=4, head=600, row_bytes=8192, most=2000 * 8208)
    size.follow(dispatched((100, 0, 0, 0), (0,) * 4, (0,) * 4, (0,) * 4), [16] * 4)  # 0.8 MB to one of 16
    assert size.capacity == 8192
    size.follow(dispatched(*[(100,) * 4] * 4), [16] * 4)
    assert size.capacity > 100 * 8192
    size = BlockSize(world_size=2, head=600, row_bytes=8192, most=2000 * 8208)
    size.follow(dispatched(*[(1000,) * 2] * 2), [16] * 2)  # 8 MB: another collective costs nothing beside that
    assert 600 + 1000 * 16 <= size.capacity < 600 + 1000 * 16 * 9 // 8 + 8192  # but routing is always with the status
    assert 1000 * 16 <= size.look <= size.capacity - 600


def test_departures_and_parcels() -> None:
    placement = Placement.contiguous(6, 3)
    owners = np.append(placement.owner_table.numpy(), -1)
    ids = np.array([[0, 5], [-1, -1], [4, 5], [1, 0]], np.int32)  # ranks 0 and 2; none; 2; 0
    leaving = Departures.of(homecoming(ids, owners, 3), 3)
    assert leaving.token.tolist() == [0, 3, 0, 2] and leaving.counts == (2, 0, 2)

    x = torch.arange(8.0).view(4, 2)
    meta = torch.arange(4, dtype=torch.uint8).view(4, 1) + 100
    parcel = Parcel(x, leaving.token, leaving.counts, meta)
    assert [parcel.fitting(room) for room in (18, 17, 2, 1)] == [
        Inline.ROWS, Inline.ROUTING, Inline.ROUTING, Inline.NOTHING,
    ]  # fmt: skip
    blocks = torch.zeros(3, 48, dtype=torch.uint8)
    parcel.write(blocks, 40, HOST)
    for block, tokens in zip(blocks, ([0, 3], [], [0, 2]), strict=True):
        assert torch.equal(block[: 8 * len(tokens)].view(torch.float32).view(-1, 2), x[tokens])
        assert block[40 - len(tokens) : 40].tolist() == [100 + token for token in tokens]
    assert torch.equal(parcel.gathered(HOST).table, x[[0, 3, 0, 2]])


def test_memory_of_a_lease_is_used_again_where_it_is_large_enough() -> None:
    ours = wire.Wire(None, torch.device("cpu"), None)
    first = ours.lease(100)
    memory = first.memory.data_ptr()
    del first
    second = ours.lease(50)
    assert second.memory.data_ptr() == memory and second.memory.shape == (50,)
    assert ours.lease(50).memory.data_ptr() != memory, "the second has not ended"
    del second
    assert ours.lease(1000).memory.shape == (1000,)


def test_the_stream_of_a_handle_is_made_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "stream_at", lambda raw, device: (raw, device), raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    gpu = torch.device("cuda", 1)
    assert wire.on_stream(gpu, 7) == (7, gpu)
    for current in (wire.on_stream(gpu, 0), wire.on_stream(torch.device("cpu"), 7)):
        with current:
            pass


def test_presence_knows_who_is_gone_without_a_store() -> None:
    class Silent:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("no store")

    me = identity()
    gone = {**me, "pid": os.getppid(), "born": "0"}  # another process has the number by now
    elsewhere = {**gone, "host": "another host"}
    presence = Presence(Silent(), 0, [me, gone, me, elsewhere])
    presence.say_waiting(1), presence.say_left()
    assert presence.others(1) == {1: ENDED, 2: "", 3: ""}
    assert presence.find_gone(0.0) == {1: ENDED}
