"""Ranks over gloo for this folder's tests, and what they do there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moefleet import probe
from tests.conformance.pool import shared_pool
from tests.conformance.ranks import Ranks
from tests.conformance.transports import Transport


def gloo_ranks() -> Ranks:
    """Processes of this machine, shared with the conformance suite."""
    return Ranks(shared_pool(), Transport("torch_dist", probe("torch_dist")), "cpu", set())


def caught(call: Callable[[], Any]) -> Exception | None:
    """What the call raised."""
    try:
        call()
    except Exception as error:
        return error
    return None
