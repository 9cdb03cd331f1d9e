"""Fleets as Prometheus metrics: a made-up one for every number, a real one for the whole way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moefleet import (
    BootstrapConfig,
    Fleet,
    FleetAlgoKnobFaultTolerance,
    FleetParams,
    MoEEpConfigError,
    MoEEpError,
    MoEEpLayer,
    MoEEpNotBuiltError,
    MoEEpTensors,
    Placement,
    SplitConfig,
)

prometheus_client = pytest.importorskip("prometheus_client")

from moefleet.integrations.prometheus import COUNTERS, export  # noqa: E402

STATS = {
    "steps": 7, "failed_steps": 1, "tokens": 20, "tokens_per_expert": [4, 0, 6], "rows_received": [3, 5],
    "rows_sent": [3, 9], "bytes_received": [300, 500], "bytes_sent": [300, 900], "waited_s": [0.0, 1.25], "bad_ids": 2,
}  # fmt: skip


class FakeFleet(Fleet):
    """Rank 1 of 2 with experts 2, 3 and 4."""

    def __init__(self, stats: dict[str, Any], mask: list[int] | None = None) -> None:
        self.bootstrap, self.params = BootstrapConfig(2, 1), FleetParams(5, 8, 8)
        self.placement = Placement(5, (2, 3))
        self.given, self.mask, self.asked = stats, mask, 0

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        if not self.given:
            raise MoEEpError("this Fleet was destroyed")
        return self.given

    @property
    def supports_fault_tolerance(self) -> bool:
        return self.mask is not None

    @property
    def active_mask_epoch(self) -> int:
        return 3

    def query_active_mask(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tensor(self.mask, dtype=torch.int32)

    def create_handle(self, *args: Any, **kwargs: Any) -> Any: ...

    def destroy(self) -> None: ...


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry(auto_describe=True)


def text(registry: Any) -> list[str]:
    lines = prometheus_client.generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_count_is_shown(registry: Any) -> None:
    export(FakeFleet(STATS), registry)
    assert sorted(text(registry)) == sorted(
        [
            'moefleet_steps_total{rank="1"} 7.0',
            'moefleet_failed_steps_total{rank="1"} 1.0',
            'moefleet_tokens_total{rank="1"} 20.0',
            'moefleet_expert_rows_total{expert="2",rank="1"} 4.0',
            'moefleet_expert_rows_total{expert="3",rank="1"} 0.0',
            'moefleet_expert_rows_total{expert="4",rank="1"} 6.0',
            'moefleet_rows_received_total{peer="0",rank="1"} 3.0',
            'moefleet_rows_received_total{peer="1",rank="1"} 5.0',
            'moefleet_rows_sent_total{peer="0",rank="1"} 3.0',
            'moefleet_rows_sent_total{peer="1",rank="1"} 9.0',
            'moefleet_received_bytes_total{peer="0",rank="1"} 300.0',
            'moefleet_received_bytes_total{peer="1",rank="1"} 500.0',
            'moefleet_sent_bytes_total{peer="0",rank="1"} 300.0',
            'moefleet_sent_bytes_total{peer="1",rank="1"} 900.0',
            'moefleet_wait_seconds_total{peer="0",rank="1"} 0.0',
            'moefleet_wait_seconds_total{peer="1",rank="1"} 1.25',
            'moefleet_bad_ids_total{rank="1"} 2.0',
        ]
    )
    assert {shown.key for shown in COUNTERS} == set(STATS)


def test_masks_are_shown_with_fault_tolerance(registry: Any) -> None:
    export(FakeFleet({"steps": 1}, mask=[0, 1]), registry)
    assert text(registry) == [
        'moefleet_steps_total{rank="1"} 1.0',
        'moefleet_rank_active{peer="0",rank="1"} 0.0',
        'moefleet_rank_active{peer="1",rank="1"} 1.0',
        'moefleet_active_ranks{rank="1"} 1.0',
        'moefleet_mask_epoch{rank="1"} 3.0',
    ]


def test_a_fleet_may_lack_counts(registry: Any) -> None:
    fleet = FakeFleet({"steps": 1, "waited_s": None, "something_else": "words", "mask": [1]})
    export(fleet, registry)
    assert text(registry) == ['moefleet_steps_total{rank="1"} 1.0']
    fleet.given = {}
    assert text(registry) == [], "a destroyed Fleet spoils no scrape"


def test_fleets_are_asked_at_a_scrape_only(registry: Any) -> None:
    fleet = FakeFleet(STATS)
    export(fleet, registry)
    assert fleet.asked == 0
    text(registry)
    text(registry)
    assert fleet.asked == 2


def test_a_slot_without_an_expert_is_left_out(registry: Any) -> None:
    fleet = FakeFleet({"tokens_per_expert": [1, 0, 2]})
    fleet.placement = Placement(4, (2, 3), (0, 1, 4, 2))
    export(fleet, registry)
    assert text(registry) == [
        'moefleet_expert_rows_total{expert="3",rank="1"} 1.0',
        'moefleet_expert_rows_total{expert="2",rank="1"} 2.0',
    ]


def test_labels_tell_fleets_apart(registry: Any) -> None:
    first = export(FakeFleet({"steps": 1}), registry)
    second = export(FakeFleet({"steps": 2}), registry, {"fleet": "decode"})
    third = export(FakeFleet({"steps": 3}), registry, {"fleet": "prefill", "rank": "17"})
    with pytest.raises(MoEEpConfigError, match="labels that no other Fleet of this registry has"):
        export(FakeFleet({"steps": 3}), registry, {"fleet": "decode"})
    assert text(registry) == [
        'moefleet_steps_total{fleet="",rank="1"} 1.0',
        'moefleet_steps_total{fleet="decode",rank="1"} 2.0',
        'moefleet_steps_total{fleet="prefill",rank="17"} 3.0',
    ]
    assert [line for line in prometheus_client.generate_latest(registry).decode().splitlines() if "TYPE" in line] == [
        "# TYPE moefleet_steps_total counter"
    ]
    for closed in (second, third, third):
        closed.close()
    with first:
        assert text(registry) == ['moefleet_steps_total{rank="1"} 1.0']
    assert text(registry) == []
    export(first.fleet, registry)
    assert len(text(registry)) == 1, "a place that was closed is free"


def test_registries_are_independent(registry: Any) -> None:
    other, fleet = prometheus_client.CollectorRegistry(), FakeFleet({"steps": 1})
    export(fleet, registry)
    export(fleet, other)
    assert text(registry) == text(other)


def test_the_default_registry(registry: Any) -> None:
    with export(FakeFleet({"steps": 41})):
        assert prometheus_client.REGISTRY.get_sample_value("moefleet_steps_total", {"rank": "1"}) == 41
    assert prometheus_client.REGISTRY.get_sample_value("moefleet_steps_total", {"rank": "1"}) is None


@pytest.mark.parametrize("label", ["peer", "expert", "__rank", "1st", "a-b", ""])
def test_bad_labels_are_named(registry: Any, label: str) -> None:
    with pytest.raises(MoEEpConfigError, match=f"export: labels: got '{label}'"):
        export(FakeFleet(STATS), registry, {label: "x"})


def test_something_else_is_no_fleet(registry: Any) -> None:
    with pytest.raises(MoEEpConfigError, match="fleet_or_layer: got a Linear, allowed a Fleet or a MoEEpLayer"):
        export(torch.nn.Linear(1, 1), registry)  # type: ignore[arg-type]


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MoEEpNotBuiltError, match=r'pip install "moefleet\[prometheus\]"'):
        export(FakeFleet(STATS))


@pytest.fixture
def layer() -> Iterator[MoEEpLayer]:
    knobs, backend = [FleetAlgoKnobFaultTolerance()], SplitConfig("shm", "identity")
    params = FleetParams(2, 8, 16, dtype_bytes=4)
    with MoEEpLayer(BootstrapConfig(1, 0, device="cpu"), params, None, knobs, backend) as layer:
        yield layer


def test_a_real_layer(layer: MoEEpLayer, registry: Any) -> None:
    export(layer, registry, {"model": "tiny"})
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]])
    for _ in range(2):
        layer(MoEEpTensors(torch.ones(3, 16), ids, torch.ones(3, 2)))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "tiny", "rank": "0", **labels})

    assert value("moefleet_steps_total") == 2
    assert value("moefleet_tokens_total") == 6
    assert [value("moefleet_expert_rows_total", expert=str(expert)) for expert in (0, 1)] == [2, 4]
    assert value("moefleet_rows_received_total", peer="0") == value("moefleet_rows_sent_total", peer="0") == 4
    assert value("moefleet_received_bytes_total", peer="0") == 2 * 4 * 16 * 4
    assert value("moefleet_wait_seconds_total", peer="0") == 0
    assert (value("moefleet_active_ranks"), value("moefleet_rank_active", peer="0")) == (1, 1)
    assert value("moefleet_mask_epoch") == 0
    layer.destroy()
    assert value("moefleet_steps_total") == 2
