"""How ranks agree on one mask: a pure protocol, a driver for a real store, and a checker of all its orders."""

from .driver import Agreement
from .values import Decision, Kind

__all__ = ["Agreement", "Decision", "Kind"]
