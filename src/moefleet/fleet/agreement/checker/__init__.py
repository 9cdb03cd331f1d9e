"""The checker of the agreement: the protocol's own function, run in every order, with every crash and time-out."""

from .mutants import MUTANTS, Mutant
from .properties import PROPERTIES
from .scopes import FULL, QUICK, Result, Scope, check
from .search import Counts, Violation

__all__ = [
    "FULL",
    "MUTANTS",
    "PROPERTIES",
    "QUICK",
    "Counts",
    "Mutant",
    "Result",
    "Scope",
    "Violation",
    "check",
]
