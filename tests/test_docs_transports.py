"""docs/transports.md: its table against what the transports say of themselves."""

from __future__ import annotations

import re

import pytest

from moefleet import FleetAlgoKnobFaultTolerance, probe
from moefleet.fleet.registry import BUILT_IN, PREFERENCE, fleet_class
from tests.running import ROOT

PAGE = (ROOT / "docs/transports.md").read_text()
TABLE = [[cell.strip() for cell in row.strip("| ").split("|")] for row in re.findall(r"^\| `\w+` \|.*\|$", PAGE, re.M)]
ROWS = {cells[0].strip("`"): cells[1:] for cells in TABLE if len(cells) == 7}


def test_every_transport_has_a_row() -> None:
    assert ROWS.keys() == BUILT_IN.keys()


@pytest.mark.parametrize("name", BUILT_IN)
def test_row_is_true(name: str) -> None:
    devices, ranks, layouts, fault_tolerance, *_ = ROWS[name]
    limits = probe(name).limits
    assert limits is not None
    assert set(devices.split(", ")) == limits.device_types
    assert set(layouts.split(", ")) == {layout.name for layout in limits.layouts}
    most = re.search(r"at most (\d+)", ranks)
    assert (int(most[1]) if most else None) == limits.max_world_size
    assert (fault_tolerance == "yes") == (FleetAlgoKnobFaultTolerance in fleet_class(name).knobs)


def test_order_of_auto() -> None:
    assert ", ".join(f"`{name}`" for name in PREFERENCE) in PAGE.replace("\n", " ")
