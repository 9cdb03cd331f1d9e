"""Which transports a run exercises, and what each of them promises."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from moefleet import BootstrapConfig, Capability, FleetParams, Limits, available_backends, probe
from tests.conformance.pool import MOST_RANKS

PROMISES = {
    "canonical_order": "rows lie in the order (source rank, token, slot), not in one of the library's own",
    "peer_errors": "a rank that fails alone tells its peers at once; they raise MoEEpPeerError and the next step works",
    "peer_reasons": "and with the text of that rank's own error",
    "crossed_calls": "ranks that make their calls in different orders are told so at once, and can go on",
    "late_ranks": "without the knob too, a Fleet goes on after a rank that came too late",
    "strided_inputs": "tensors that are not contiguous are read correctly",
    "shared_devices": "ranks may outnumber GPUs: several of them have their tensors on one",
    "halves": "dispatch and combine have a sending and a receiving half",
    "combine_buffer": "combine_buffer() may give memory that combine reads in place",
    "fault_tolerance": "with the knob, a Fleet serves on without some of its ranks",
}
"""Words in ``Capability.features`` that tests ask for."""

BY_ALL_OWN = frozenset(
    {"canonical_order", "peer_errors", "peer_reasons", "crossed_calls", "late_ranks", "strided_inputs"}
)
PROMISED_BY_OWN = {"shm": BY_ALL_OWN, "torch_dist": BY_ALL_OWN, "nvlink": BY_ALL_OWN | {"shared_devices"}}
"""What transports of this package promise without saying so."""

NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""With 1, NCCL from 2.30 on lets ranks share a GPU; without it, it refuses them."""


@dataclass(frozen=True)
class Transport:
    """A transport under test."""

    name: str
    capability: Capability

    @property
    def limits(self) -> Limits | None:
        return self.capability.limits

    def has(self, promise: str) -> bool:
        assert promise in PROMISES, f"{promise!r} is not one of {sorted(PROMISES)}"
        if (self.name, promise) == ("torch_dist", "shared_devices"):
            return os.environ.get(NCCL_SHARES) == "1"
        return promise in self.capability.features or promise in PROMISED_BY_OWN.get(self.name, ())

    def most_ranks(self, device: str) -> int:
        """How many ranks a test can have on this machine."""
        if torch.device(device).type == "cpu" or self.has("shared_devices"):
            return MOST_RANKS
        return min(MOST_RANKS, torch.cuda.device_count())

    def why_not(self, params: FleetParams, world_size: int, device: str) -> str:
        """What of its limits these parameters break; empty if nothing."""
        return probe(self.name, BootstrapConfig(world_size, 0, device=device), params).reason


def chosen(option: str | None, device: str) -> tuple[list[Transport], dict[str, str]]:
    """The transports of ``--transports``, else of ``MOEFLEET_TRANSPORTS``, else all that are available here.

    Returns:
        Those transports, and why each other one is left out.

    Raises:
        LookupError: one that was asked for by name is not available; the message says why.
    """
    named = option or os.environ.get("MOEFLEET_TRANSPORTS") or ""
    names = [name.strip() for name in named.split(",") if name.strip()]
    found, left_out = [], {}
    for name in names or available_backends():
        capability = probe(name)
        reason = capability.reason
        kind = torch.device(device).type
        if capability.available and capability.limits and kind not in capability.limits.device_types:
            reason = f"its tensors live on {' or '.join(sorted(capability.limits.device_types))}, not on {kind}"
        if not reason:
            found.append(Transport(name, capability))
        elif names:
            raise LookupError(f"transport {name!r} is not available: {reason}")
        else:
            left_out[name] = reason
    return found, left_out
