"""Ranks as threads that agree over real stores."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from moefleet.errors import (
    MoEEpConfigError,
    MoEEpNoQuorumError,
    MoEEpRankEvictedError,
    MoEEpStoreError,
)
from moefleet.fleet.agreement import Agreement, Decision, Kind
from moefleet.fleet.agreement.history import History

from .stores import StoreHost, WatchedStore, dies_before, options, ranks_of, reconcile_all, together


@pytest.fixture(params=["HashStore", "TCPStore"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "HashStore":
        yield dist.HashStore()
    else:
        yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_get_one_decision(store: Any, world: int) -> None:
    ranks = ranks_of(store, world, options())
    results = reconcile_all(ranks, steps={0: 3, world - 1: 7})
    assert results == dict.fromkeys(range(world), Decision(1, Kind.RECONCILE, (1 << world) - 1, 8))
    assert [(rank.epoch, rank.mask, rank.evicted) for rank in ranks] == [(1, (1,) * world, False)] * world


def test_64_ranks_over_one_store() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [WatchedStore(dist.PrefixStore("fleet", host.clone())) for _ in range(4)]
    ranks = [Agreement(clients[rank % 4], rank, 64, options(), dead=lambda: (17, 40)) for rank in range(64)]
    results = reconcile_all([rank for rank in ranks if rank.rank not in (17, 40)])
    assert set(results.values()) == {Decision(1, Kind.RECONCILE, (1 << 64) - 1 & ~(1 << 17 | 1 << 40), 1)}
    assert len(results) == 62


def test_whom_all_accuse_is_evicted_and_told(store: Any) -> None:
    ranks = ranks_of(store, 4, options())
    results = reconcile_all(ranks, accused={0: {2}, 1: {2}, 3: {2}})
    assert {results[0], results[1], results[3]} == {Decision(1, Kind.RECONCILE, 0b1011, 1)}
    assert isinstance(results[2], MoEEpRankEvictedError)
    assert (ranks[2].epoch, ranks[2].mask, ranks[2].evicted) == (0, (1, 1, 1, 1), True)
    with pytest.raises(MoEEpRankEvictedError, match=r"rank 2 was masked by decision 1; ranks \[0, 1, 3\]"):
        ranks[2].reconcile((), 1)


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_a_dead_rank_is_not_waited_for(store: Any, dead: int) -> None:
    ranks = ranks_of(store, 4, options(), dead=lambda: (dead,))
    results = reconcile_all([rank for rank in ranks if rank.rank != dead])
    assert set(results.values()) == {Decision(1, Kind.RECONCILE, 0b1111 & ~(1 << dead), 1)}


def test_a_death_during_the_round_is_noticed(store: Any) -> None:
    dead: list[int] = []
    ranks = ranks_of(store, 3, options(), dead=lambda: tuple(dead))
    timer = threading.Timer(0.2, dead.append, (1,))
    timer.start()
    results = reconcile_all([ranks[0], ranks[2]])
    assert set(results.values()) == {Decision(1, Kind.RECONCILE, 0b101, 1)}


def test_a_silent_rank_is_masked_when_time_is_over_and_told_when_it_comes(store: Any) -> None:
    ranks, history = ranks_of(store, 3, options()), History(store.clone())

    def after_rank_1() -> Decision:
        while not history.views(1):
            time.sleep(0.01)
        return ranks[0].reconcile((), 0, timeout_s=0.1)

    results = together({0: after_rank_1, 1: lambda: ranks[1].reconcile((), 0)})
    assert set(results.values()) == {Decision(1, Kind.RECONCILE, 0b011, 1)}
    with pytest.raises(MoEEpRankEvictedError):
        ranks[2].reconcile((), 0)


def test_the_next_rank_takes_over_from_an_offerer_that_died_and_keeps_it(store: Any) -> None:
    watched = WatchedStore(store, dies_before("offer"))
    knob = options(takeover_s=1.0)
    ranks = [Agreement(watched if rank == 0 else store, rank, 3, knob) for rank in range(3)]
    results = reconcile_all(ranks)
    assert isinstance(results[0], MoEEpStoreError)
    assert {results[1], results[2]} == {Decision(1, Kind.RECONCILE, 0b111, 1)}
    assert ranks[0].epoch == 0


def test_nobody_waits_for_the_turn_of_a_rank_that_is_proven_dead(store: Any) -> None:
    dead: list[int] = []

    def dies(kind: str, key: str) -> None:
        if kind == "offer":
            dead.append(0)
            raise ConnectionError("this rank died")

    watched = WatchedStore(store, dies)
    ranks = [
        Agreement(watched if rank == 0 else store, rank, 3, options(), dead=lambda: tuple(dead)) for rank in range(3)
    ]
    results = reconcile_all(ranks)
    assert {results[1], results[2]} == {Decision(1, Kind.RECONCILE, 0b111, 1)}, "it had posted"


def test_too_few_ranks_raise_and_change_nothing(store: Any) -> None:
    ranks = ranks_of(store, 3, options())
    with pytest.raises(MoEEpNoQuorumError, match=r"\[0, 1, 2\], \[0, 1\] did not answer within 0.1 s"):
        ranks[2].reconcile({0}, 0, timeout_s=0.1)
    assert (ranks[2].epoch, ranks[2].mask) == (0, (1, 1, 1))
    results = reconcile_all(ranks, accused={2: {0}})
    assert results[2] == Decision(1, Kind.RECONCILE, 0b110, 1), "the round is still to be had"


def test_half_decide_with_the_lowest_rank_only(store: Any) -> None:
    ranks = ranks_of(store, 2, options(reconcile_s=0.1))
    with pytest.raises(MoEEpNoQuorumError):
        ranks[1].reconcile((), 0)
    fresh = Agreement(dist.PrefixStore("other", store), 0, 2, options(reconcile_s=0.1))
    assert fresh.reconcile((), 0).mask == 0b01


def test_one_rank_may_go_on_alone_if_the_knob_or_death_allows_it(store: Any) -> None:
    anyone = Agreement(dist.PrefixStore("a", store), 2, 3, options(reconcile_s=0.1, quorum="any"))
    assert anyone.reconcile((), 0).mask == 0b100
    last = Agreement(dist.PrefixStore("b", store), 2, 3, options(), dead=lambda: (0, 1))
    assert last.reconcile((), 0).mask == 0b100


def test_a_rank_that_gave_up_adopts_what_others_decided_with_its_view(store: Any) -> None:
    ranks = ranks_of(store, 3, options(reconcile_s=0.1))
    with pytest.raises(MoEEpNoQuorumError):
        ranks[2].reconcile((), 4)
    assert ranks[0].reconcile((), 3) == Decision(1, Kind.RECONCILE, 0b101, 5)
    assert ranks[2].reconcile((), 4) == Decision(1, Kind.RECONCILE, 0b101, 5)


def test_a_rank_that_stepped_on_after_it_gave_up_asks_for_another_round(store: Any) -> None:
    ranks = ranks_of(store, 3, options(reconcile_s=0.1))
    with pytest.raises(MoEEpNoQuorumError):
        ranks[2].reconcile((), 4)
    assert ranks[0].reconcile((), 3).resume_step == 5
    results = together(
        {0: lambda: ranks[0].reconcile((), 5, timeout_s=60), 2: lambda: ranks[2].reconcile((), 6, timeout_s=60)}
    )
    assert results == dict.fromkeys((0, 2), Decision(2, Kind.RECONCILE, 0b101, 7))


def test_a_rank_that_is_a_call_ahead_decides_nothing_alone(store: Any) -> None:
    ranks = ranks_of(store, 4, options())

    def twice() -> Decision:
        ranks[1].reconcile({0}, 0)
        return ranks[1].reconcile((), 1)

    def late(rank: int) -> Decision:
        first = ranks[rank].reconcile({0} if rank else set(), 0)
        return ranks[rank].reconcile((), 1) if first.number == 1 else first

    results = together({rank: twice if rank == 1 else lambda rank=rank: late(rank) for rank in range(4)})
    assert isinstance(results.pop(0), MoEEpRankEvictedError)
    assert set(results.values()) == {Decision(2, Kind.RECONCILE, 0b1110, 2)}


def test_two_fleets_on_one_store_never_meet(store: Any) -> None:
    fleets = [ranks_of(dist.PrefixStore(name, store), 3, options()) for name in ("1/0", "2/0")]
    first = reconcile_all(fleets[0], accused={0: {1}, 2: {1}})
    second = reconcile_all(fleets[1])
    assert {first[0], first[2]} == {Decision(1, Kind.RECONCILE, 0b101, 1)}
    assert set(second.values()) == {Decision(1, Kind.RECONCILE, 0b111, 1)}


def test_an_evicted_rank_comes_back_and_an_absent_one_does_not(store: Any) -> None:
    dead: list[int] = []
    ranks = ranks_of(store, 4, options(), dead=lambda: tuple(dead))
    reconcile_all(ranks, accused={0: {2, 3}, 1: {2, 3}}, steps={3: 5})
    assert [rank.evicted for rank in ranks] == [False, False, True, True]
    dead.append(3)
    steps = {0: 6, 1: 7, 2: 2}
    results = together({rank: lambda rank=rank: ranks[rank].readmit(steps[rank]) for rank in (0, 1, 2)})
    assert set(results.values()) == {Decision(2, Kind.READMIT, 0b0111, 8)}
    assert [(rank.epoch, rank.evicted) for rank in ranks] == [(2, False)] * 3 + [(0, True)]


def test_an_evicted_rank_alone_is_not_readmitted(store: Any) -> None:
    ranks = ranks_of(store, 3, options())
    reconcile_all(ranks, accused={0: {2}, 1: {2}})
    with pytest.raises(MoEEpNoQuorumError):
        ranks[2].readmit(0, timeout_s=0.1)
    assert ranks[2].evicted


def test_readmission_forgives(store: Any) -> None:
    ranks = ranks_of(store, 3, options())
    reconcile_all(ranks, accused={0: {2}, 1: {2}})
    together({rank: lambda rank=rank: ranks[rank].readmit(1) for rank in range(3)})
    results = reconcile_all(ranks, steps=dict.fromkeys(range(3), 2))
    assert set(results.values()) == {Decision(3, Kind.RECONCILE, 0b111, 3)}


def test_being_in_a_round_is_published_before_anything_else_and_for_each_round() -> None:
    said: list[object] = []
    store = WatchedStore(dist.HashStore(), lambda kind, key: said.append(key))
    rank = Agreement(store, 0, 1, options(), in_round=said.append)
    rank.reconcile((), 0)
    assert said[:2] == [1, "decision/1"]
    said.clear()
    rank.reconcile((), 1)
    assert said[:2] == [2, "decision/2"]


def test_who_is_proven_dead_is_accused() -> None:
    store = dist.HashStore()
    knob = options(reconcile_s=0.1, quorum="any")
    Agreement(store, 0, 3, knob, dead=lambda: (2, 0), incarnation=7).reconcile({1}, 3)
    (view,) = History(store).views(1)
    assert (view.accused, view.step, view.incarnation) == (0b110, 3, 7)


def test_a_round_takes_a_handful_of_store_operations() -> None:
    real = dist.HashStore()
    stores = [WatchedStore(real) for _ in range(8)]
    ranks = [Agreement(store, rank, 8, options()) for rank, store in enumerate(stores)]
    others = threading.Thread(target=reconcile_all, args=(ranks[1:],))
    others.start()
    while not all(store.counts["post"] for store in stores[1:]):
        time.sleep(0.01)
    ranks[0].reconcile((), 0)
    others.join()
    assert stores[0].counts == {"read": 3, "post": 1, "offer": 1}, "the history twice, the views once"
    assert all(store.counts["post"] == 1 and not store.counts["offer"] for store in stores[1:])


def test_adopting_what_others_decided_takes_two_reads() -> None:
    real = dist.HashStore()
    Agreement(real, 0, 2, options(reconcile_s=0.1, quorum="any")).reconcile((), 0)
    late = WatchedStore(real)
    with pytest.raises(MoEEpRankEvictedError):
        Agreement(late, 1, 2, options()).reconcile((), 0)
    assert late.counts == {"read": 1}


def test_a_store_that_is_gone_is_named_and_changes_nothing() -> None:
    with StoreHost() as host:
        rank = Agreement(dist.PrefixStore("fleet", host.connect()), 1, 2, options())
        host.process.kill()
        host.process.wait()
        with pytest.raises(MoEEpStoreError, match=rf"127\.0\.0\.1:{host.port}.*the mask is unchanged"):
            rank.reconcile((), 0)
        assert (rank.epoch, rank.mask) == (0, (1, 1))


def test_a_store_that_hangs_does_not_hang_the_rank() -> None:
    with StoreHost() as host:
        rank = Agreement(host.connect(), 0, 1, options(reconcile_s=0.2, takeover_s=0.2))
        host.process.send_signal(signal.SIGSTOP)
        with pytest.raises(MoEEpStoreError, match=f":{host.port}"):
            rank.reconcile((), 0)
        host.process.send_signal(signal.SIGCONT)
        assert rank.reconcile((), 0, timeout_s=60).mask == 1, "and the next call connects anew"


def test_a_store_with_other_things_in_it_is_named() -> None:
    store = dist.HashStore()
    store.set("decision/1", "hello")
    with pytest.raises(MoEEpStoreError, match="'hello'"):
        Agreement(store, 0, 1, options()).reconcile((), 0)


def test_a_store_that_cannot_append_is_refused(tmp_path: Any) -> None:
    with pytest.raises(MoEEpConfigError, match="FileStore"):
        Agreement(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, options())
