"""The history of decisions and the rounds' views in a ``torch.distributed`` store, one store operation per method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ...errors import MoEEpStoreError, config_error
from .values import Decision, View, decode_decision, decode_views, encode_decision, encode_view

ABSENT = "?"
"""Text that no value has: comparing a key with it reads the key without waiting, and never writes."""


class History:
    """Keys ``decision/1, decision/2, ...``, each written once, and ``views/1, views/2, ...``, logs that grow.

    Every method raises :class:`MoEEpStoreError` where the store does not answer or answers nonsense. A method may block
    for as long as the store's process is stopped: callers bound it from outside.

    Args:
        store: of this fleet and generation alone (a ``PrefixStore``), with a connection that nobody else uses.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def decision(self, number: int) -> Decision | None:
        """Decision ``number``, ``None`` if there is none yet."""
        text = self._ask(self._store.compare_set, f"decision/{number}", ABSENT, ABSENT)
        return None if text == ABSENT else self._decode(decode_decision, number, text)

    def offer(self, decision: Decision) -> Decision:
        """Write a decision unless one of its number exists; the one that then exists."""
        key = f"decision/{decision.number}"
        text = self._ask(self._store.compare_set, key, "", encode_decision(decision))
        return self._decode(decode_decision, decision.number, text)

    def post(self, number: int, view: View) -> None:
        """Add a view to round ``number``, in place of an earlier one of the same rank."""
        self._ask(self._store.append, f"views/{number}", encode_view(view))

    def views(self, number: int) -> tuple[View, ...]:
        """The views of round ``number``, lowest rank first."""
        text = self._ask(self._store.compare_set, f"views/{number}", ABSENT, ABSENT)
        return () if text == ABSENT else self._decode(decode_views, text)

    def _ask(self, call: Callable[..., Any], *arguments: str) -> str:
        try:
            answer = call(*arguments)
        except Exception as error:
            raise lost(self._store) from error
        return answer.decode() if isinstance(answer, bytes) else ""

    def _decode(self, decode: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return decode(*arguments)
        except ValueError as error:
            raise MoEEpStoreError(
                f"the store at {address(self._store)} holds {arguments[-1]!r:.80} where an agreement of ranks belongs; "
                "does something else write to it?"
            ) from error


def check_store(store: Any) -> None:
    """Raise for a store that views cannot be appended to."""
    if not store.has_extended_api():
        raise config_error(
            "BootstrapConfig.tcp_store", type(store).__name__, "a store that can append, with fault tolerance",
            "pass a torch.distributed.TCPStore",
        )  # fmt: skip


def address(store: Any) -> str:
    """Host and port of a store, or what kind it is."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (
        f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else f"this process ({type(store).__name__})"
    )


def lost(store: Any) -> MoEEpStoreError:
    """What to raise when a store does not answer."""
    return MoEEpStoreError(
        f"the store at {address(store)}, through which ranks agree, did not answer; the mask is unchanged. "
        "Does the process that hosts it live?"
    )
