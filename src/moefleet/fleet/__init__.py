"""Fleets and Handles: the contracts, the registry of transports, and how ranks meet."""

from .base import Fleet, FleetSpec, Handle
from .create import create_fleet
from .limits import Limits, check_limits
from .registry import Capability, available_backends, fleet_class, probe, register_fleet, supports_fault_tolerance
from .rendezvous import Meeting

__all__ = [
    "Capability",
    "Fleet",
    "FleetSpec",
    "Handle",
    "Limits",
    "Meeting",
    "available_backends",
    "check_limits",
    "create_fleet",
    "fleet_class",
    "probe",
    "register_fleet",
    "supports_fault_tolerance",
]
