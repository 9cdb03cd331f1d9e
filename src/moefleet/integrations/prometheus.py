"""Prometheus: what Fleets count, as metrics that are read when somebody scrapes. No threads, and no cost to a step.

prometheus_client.start_http_server(9400)
export(layer, labels={"model": "qwen"})
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import MoEEpError, MoEEpNotBuiltError, config_error
from ..layer import Fleet, MoEEpLayer

LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Shown:
    """One metric.

    Attributes:
        key: what it shows: an entry of ``fleet.stats()``, or one that :meth:`Export.read` adds about the mask.
        name: without the suffix ``_total`` that counters get.
        text: its meaning.
        per: the label that tells the entries of a list apart, ``"peer"`` or ``"expert"``.
    """

    key: str
    name: str
    text: str
    per: str = ""


COUNTERS = (
    Shown("steps", "moefleet_steps", "Steps begun, failed ones included."),
    Shown("failed_steps", "moefleet_failed_steps", "Steps that this rank gave up."),
    Shown("tokens", "moefleet_tokens", "Tokens that this rank brought."),
    Shown("tokens_per_expert", "moefleet_expert_rows", "Rows that an expert of this rank was given.", "expert"),
    Shown("rows_received", "moefleet_rows_received", "Tokens of the peer that this rank took.", "peer"),
    Shown("rows_sent", "moefleet_rows_sent", "Tokens of this rank that the peer took and sent back.", "peer"),
    Shown("bytes_received", "moefleet_received_bytes", "Bytes of rows that came from the peer.", "peer"),
    Shown("bytes_sent", "moefleet_sent_bytes", "Bytes of rows that went to the peer.", "peer"),
    Shown("waited_s", "moefleet_wait_seconds", "Time spent waiting for the peer.", "peer"),
    Shown("bad_ids", "moefleet_bad_ids", "Ids out of range that counted as -1."),
)
GAUGES = (  # with fault tolerance only
    Shown("mask", "moefleet_rank_active", "1 where the mask in force has the peer, 0 where not.", "peer"),
    Shown("active", "moefleet_active_ranks", "Ranks that the mask in force has."),
    Shown("epoch", "moefleet_mask_epoch", "Number of the last mask decision that this rank adopted."),
)


def export(fleet_or_layer: Fleet | MoEEpLayer, registry: Any = None, labels: Mapping[str, str] | None = None) -> Export:
    """Show a Fleet's counts among a registry's metrics, from now until the result is closed.

    Args:
        fleet_or_layer: a Fleet, or what runs over one: layers that share a Fleet are one source.
        registry: a ``prometheus_client.CollectorRegistry``; ``None`` for the default one.
        labels: added to every sample, beside ``rank``. Where one registry shows several Fleets, they tell them apart.

    Raises:
        MoEEpConfigError: a bad label, or a Fleet with these labels is shown there already.
        MoEEpNotBuiltError: prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise MoEEpNotBuiltError(
            f'moefleet.integrations.prometheus needs prometheus_client: {error}; pip install "moefleet[prometheus]"'
        ) from error
    fleet = fleet_or_layer if isinstance(fleet_or_layer, Fleet) else getattr(fleet_or_layer, "fleet", None)
    if not isinstance(fleet, Fleet):
        raise config_error("export: fleet_or_layer", f"a {type(fleet_or_layer).__name__}", "a Fleet or a MoEEpLayer")
    given = dict(labels or {})
    for name in given:
        if name in ("peer", "expert") or not LABEL.fullmatch(name):
            allowed = "letters, digits and _, not peer, not expert, nothing that begins with __ or a digit"
            raise config_error("export: labels", repr(name), allowed)
    shown_in = prometheus_client.REGISTRY if registry is None else registry
    with _changing:
        if shown_in not in _collectors:
            collector = FleetCollector()
            shown_in.register(collector)
            _collectors[shown_in] = collector
        return _collectors[shown_in].add(fleet, given)


class Export:
    """A Fleet among the metrics of a registry. Close it when the Fleet is no longer used."""

    def __init__(self, collector: FleetCollector, fleet: Fleet, labels: dict[str, str]) -> None:
        self._collector, self.fleet, self._given = collector, fleet, labels

    @property
    def labels(self) -> dict[str, str]:
        """What every sample carries."""
        return {"rank": str(self.fleet.bootstrap.rank), **self._given}

    def close(self) -> None:
        """Show this Fleet no longer. Idempotent; the Fleet itself is left alone."""
        self._collector.remove(self)

    def read(self) -> dict[str, Any]:
        """The values to show, by key, without what a destroyed Fleet no longer tells."""
        values: dict[str, Any] = {}
        with suppress(MoEEpError):
            stats = self.fleet.stats()
            values |= {shown.key: stats[shown.key] for shown in COUNTERS if stats.get(shown.key) is not None}
            if self.fleet.supports_fault_tolerance:
                mask = self.fleet.query_active_mask().tolist()
                values |= {"mask": mask, "active": sum(mask), "epoch": self.fleet.active_mask_epoch}
        return values

    def entries(self, shown: Shown, value: Any) -> Iterator[tuple[dict[str, str], float]]:
        """A value of :meth:`read` as labels and numbers."""
        if not shown.per:
            yield self.labels, float(value)
            return
        names: Sequence[int] = range(len(value))
        if shown.per == "expert":
            names = self.fleet.placement.experts_of(self.fleet.bootstrap.rank)
        for name, number in zip(names, value):
            if name >= 0:  # not a slot without an expert
                yield {**self.labels, shown.per: str(name)}, float(number)

    def __enter__(self) -> Export:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class FleetCollector:
    """What a registry asks at a scrape: one for each registry, as a metric's samples must come in one piece."""

    def __init__(self) -> None:
        self._exports: list[Export] = []

    def add(self, fleet: Fleet, labels: dict[str, str]) -> Export:
        export = Export(self, fleet, labels)
        if any(export.labels == other.labels for other in self._exports):
            raise config_error(
                "export: labels",
                export.labels,
                "labels that no other Fleet of this registry has",
                'add one that tells them apart, such as labels={"fleet": "decode"}; layers that share a Fleet need one',
            )
        self._exports.append(export)
        return export

    def remove(self, export: Export) -> None:
        if export in self._exports:
            self._exports.remove(export)

    def describe(self) -> list[Any]:
        """The metrics without samples: what a registry looks at for names that are taken."""
        return [family for _, family in self._families(())]

    def collect(self) -> Iterator[Any]:
        exports = list(self._exports)
        read = [(export, export.read()) for export in exports]
        common = sorted({name for export in exports for name in export.labels})
        for shown, family in self._families(common):
            names = [*common, *([shown.per] if shown.per else [])]
            for export, values in read:
                if shown.key in values:
                    for labels, number in export.entries(shown, values[shown.key]):
                        family.add_metric([labels.get(name, "") for name in names], number)
            if family.samples:
                yield family

    def _families(self, common: Sequence[str]) -> list[tuple[Shown, Any]]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        return [
            (shown, family(shown.name, shown.text, labels=[*common, *([shown.per] if shown.per else [])]))
            for family, group in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES))
            for shown in group
        ]


_changing = threading.Lock()
_collectors: WeakKeyDictionary[Any, FleetCollector] = WeakKeyDictionary()
