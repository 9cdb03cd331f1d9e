"""Collectives that never end, as on GPUs, where nothing breaks when a rank is gone: who waits for them, how long."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from moefleet import BootstrapConfig, FleetParams, MoEEpPeerError, MoEEpTransportError, create_fleet
from moefleet.fleet.witness import ENDED, STOPPED
from moefleet.substrate.control import Operation
from moefleet.transports.torch_dist import group, janitor, steps
from moefleet.transports.torch_dist.fleet import TorchDistFleet
from moefleet.transports.torch_dist.presence import LEFT, WAITS
from tests.transports.torch_dist.test_bus import buses

HOURS_S = 10_000.0


class Gone:
    """A presence that finds rank 1 gone in this way, and knows this of rank 2 whenever it is asked."""

    def __init__(self, what: str, of_2: Iterable[str] = (WAITS,) * 2) -> None:
        self._what, self._of_2 = what, iter(of_2)

    def find_gone(self, seconds: float) -> dict[int, str]:
        return {1: self._what}

    def others(self, round_: int) -> dict[int, str]:
        return {1: self._what, 2: next(self._of_2)}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("what", [ENDED, LEFT])
def test_a_rank_that_is_gone_is_not_waited_for_until_the_time_out(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_LOOK_S", 0.01)
    bus = buses(2)[0]
    waiting = steps.Steps(bus, Gone(what), janitor.Janitor(bus, HOURS_S), HOURS_S)  # type: ignore[arg-type]
    with pytest.raises(MoEEpPeerError, match="rank 0 waits in dispatch of step 1: rank 1") as caught:
        waiting.collect(waiting.begin(), Operation.DISPATCH)
    assert (caught.value.rank, caught.value.reason) == (1, what)


@pytest.mark.parametrize("of_2", ["", STOPPED])
def test_a_rank_that_has_left_is_not_named_before_the_others_have_come(
    of_2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then can the round end with which it may have said why it left."""
    monkeypatch.setattr(steps, "_LOOK_S", 0.01)
    bus, looks = buses(3)[0], iter([of_2] * 4 + [WAITS] * 2)
    waiting = steps.Steps(bus, Gone(LEFT, looks), janitor.Janitor(bus, HOURS_S), HOURS_S)  # type: ignore[arg-type]
    with pytest.raises(MoEEpPeerError, match="rank 1 has left"):
        waiting.collect(waiting.begin(), Operation.DISPATCH)
    assert list(looks) == []


@pytest.mark.parametrize("why", ["gone", "broken"])
def test_a_group_is_let_go_of_soon_where_its_collectives_never_end(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "_LAST_S", 0.01)
    bus, closed, told = buses(2)[0], threading.Event(), []
    bus.take(1, Operation.DISPATCH)  # a round to which rank 1 does not come
    if why == "broken":
        bus.error = RuntimeError("broken")

    def close(clean: bool) -> None:
        told.append(clean)
        closed.set()

    janitor.Janitor(bus, HOURS_S).finish(close, lambda: why == "gone")
    assert closed.wait(30) and told == [False]


def test_a_group_is_let_go_of_by_a_thread_that_waits_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking and freeing memory waits for the GPU, and so for a collective that nobody but close ends."""
    monkeypatch.setattr(janitor, "_LAST_S", 0.01)
    bus, serving, closed = buses(2)[0], threading.Event(), threading.Event()
    bus.take(1, Operation.DISPATCH)  # a round to which rank 1 does not come

    def advance(serve: bool = False) -> None:
        if serve:
            serving.set()
            assert closed.wait(30)

    monkeypatch.setattr(bus, "advance", advance)
    janitor.Janitor(bus, HOURS_S).finish(lambda clean: closed.set(), serving.is_set)
    assert closed.wait(30)


def test_a_group_is_let_go_of_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "_LAST_S", 0.01)
    bus, closed, start = buses(2)[0], threading.Event(), threading.Thread.start
    bus.take(1, Operation.DISPATCH)  # a round to which rank 1 does not come

    def start_the_first(thread: threading.Thread) -> None:
        if "serve" in thread._target.__qualname__:  # type: ignore[attr-defined]
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_the_first)
    janitor.Janitor(bus, HOURS_S).finish(lambda clean: closed.set(), lambda: True)
    assert closed.wait(30)


class Communicator:
    """A NCCL group of ours that notes when it is aborted."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self._told.append("abort")
        raise RuntimeError("as some versions do")


def test_a_group_is_aborted_once_and_before_anything_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing memory waits for the GPU, and the GPU for collectives that only end when the group does."""
    params = FleetParams(2, 4, 8, dtype_bytes=4)
    fleet = create_fleet(BootstrapConfig(1, 0, device="cpu"), params, backend="torch_dist")
    assert isinstance(fleet, TorchDistFleet)
    told: list[str] = []
    drop = fleet.bus.drop
    monkeypatch.setattr(fleet.bus, "drop", lambda: (told.append("drop"), drop()))
    fleet._group.handle = Communicator(told)
    fleet.destroy()
    assert told == ["abort", "drop"]


def test_a_group_begins_once_those_before_have_ended() -> None:
    """Both wait for the GPU, in whatever thread."""
    aborting, may_end = threading.Event(), threading.Event()

    class Slow(Communicator):
        def abort(self) -> None:
            aborting.set()
            assert may_end.wait(30)

    params = FleetParams(2, 4, 8, dtype_bytes=4)
    with create_fleet(BootstrapConfig(1, 0, device="cpu"), params, backend="torch_dist") as fleet:
        assert isinstance(fleet, TorchDistFleet)
        fleet._group.handle = Slow([])
        thread = threading.Thread(target=fleet._group.abort)
        thread.start()
        assert aborting.wait(30)
        with pytest.raises(MoEEpTransportError, match="an earlier NCCL group of this process does not end"):
            group._await_ends(0.01)
        may_end.set()
        group._await_ends(30)
        thread.join(30)
