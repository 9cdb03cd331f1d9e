"""Every error that moefleet raises, and who has to act on it.

A message names the field, what came, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class MoEEpError(RuntimeError):
    """Root of all moefleet errors: catch it to catch them all."""


class MoEEpConfigError(MoEEpError, ValueError):
    """An argument is wrong. The caller of this rank has to change it; nothing was sent and nothing was lost."""


class MoEEpArchError(MoEEpError):
    """This machine (device, operating system, architecture) cannot run the backend. Choose another backend."""


class MoEEpNotBuiltError(MoEEpError, NotImplementedError):
    """An optional capability or library is missing. Install it, or choose a backend that has the capability."""


class MoEEpUnknownBackendError(MoEEpConfigError, KeyError):
    """No transport or kernel of that name is registered. The message lists the names that are."""

    __str__ = RuntimeError.__str__  # KeyError would show the repr of the message


class MoEEpTransportError(MoEEpError):
    """A call into an operating system or a transport library failed.

    Attributes: ``fn`` the call, ``code`` its status, ``detail`` what was being done, ``code_name`` the
    status in words. Whoever runs the machine has to act.
    """

    def __init__(self, fn: str, code: int, detail: str, code_name: str = "") -> None:
        self.fn, self.code, self.detail, self.code_name = fn, code, detail, code_name
        super().__init__(f"{fn} failed with {code_name or 'status'} ({code}): {detail}")

    def __reduce__(self) -> tuple[type, tuple[str, int, str, str]]:
        return type(self), (self.fn, self.code, self.detail, self.code_name)


class MoEEpPeerError(MoEEpError):
    """Another rank failed in this step and said so. Look at that rank's own error; the next step works.

    Attributes: ``rank`` the rank that failed, ``reason`` what it said.
    """

    def __init__(self, message: str, *, rank: int = -1, reason: str = "") -> None:
        self.rank, self.reason = rank, reason
        super().__init__(message)


class MoEEpTimeoutError(MoEEpError, TimeoutError):
    """A wait ended without its event. The message says who was waited for and what that rank last said.

    Attributes: ``ranks``, those waited for. Look at their processes; raise ``timeout_s`` if they are merely slow.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class MoEEpFaultError(MoEEpError):
    """A step ran while a rank was missing, and its output must not leave.

    Attributes: ``step_mask``, the mask this step ran under, and ``current_mask``, both int lists ``[W]`` with
    1 = active. The engine drops the step and reconciles.
    """

    def __init__(self, message: str, *, step_mask: Sequence[int] = (), current_mask: Sequence[int] = ()) -> None:
        self.step_mask, self.current_mask = list(step_mask), list(current_mask)
        super().__init__(message)


class MoEEpFaultToleranceUnsupportedError(MoEEpError, NotImplementedError):
    """This Fleet has no fault tolerance: the knob was not given, or the transport cannot. The message says which."""


class MoEEpRankEvictedError(MoEEpError):
    """The other ranks went on without this one. Drop its handles, then readmit it or let the process end."""


class MoEEpNoQuorumError(MoEEpError):
    """Too few ranks answered for a decision; the mask is unchanged. Bring ranks back, or use ``quorum="any"``."""


class MoEEpStoreError(MoEEpError):
    """The store that ranks agree through did not answer. The message names its address; the mask is unchanged."""


def config_error(
    field: str, got: object, allowed: str, todo: str = "", *, cls: type[MoEEpConfigError] = MoEEpConfigError
) -> MoEEpConfigError:
    """The one form of a bad-argument message: field, what came, what is allowed, what to do."""
    return cls(f"{field}: got {got}, allowed {allowed}" + (f"; {todo}" if todo else ""))
