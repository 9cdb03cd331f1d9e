"""How ranks find each other before they share memory: numbered meetings over a ``torch.distributed`` store."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import BootstrapConfig
from ..errors import MoEEpError, MoEEpPeerError, MoEEpStoreError, MoEEpTimeoutError, config_error


def resolve_store(bootstrap: BootstrapConfig) -> Any:
    """The store of this group: the one given, the process group's, or (``auto_bootstrap``) one from the environment."""
    if bootstrap.tcp_store is not None:
        return bootstrap.tcp_store
    if bootstrap.process_group is not None:
        from torch.distributed.distributed_c10d import _get_process_group_store

        return _get_process_group_store(bootstrap.process_group)
    if bootstrap.world_size == 1:
        return dist.HashStore()
    if bootstrap.auto_bootstrap and "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            # Under torchrun the agent already hosts a store on this port.
            hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return dist.TCPStore(
                host,
                port,
                is_master=bootstrap.rank == 0 and not hosted,
                timeout=timedelta(seconds=bootstrap.timeout_s),
                wait_for_workers=False,
            )
        except Exception as error:
            raise MoEEpStoreError(f"no store at {host}:{port}: {error}") from error
    raise config_error(
        "BootstrapConfig",
        "neither tcp_store nor process_group, and no MASTER_ADDR and MASTER_PORT in the environment",
        "one of the three for world_size > 1",
        "start ranks with moefleet.launch or torchrun, or pass a store",
    )


class Meeting:
    """One gathering of all ranks, under a fleet id of its own, at which values are exchanged in steps.

    The store numbers the meetings: a rank's n-th meeting is everybody's n-th. One that failed is closed for good, and
    a rank that comes to it late moves on to the next.
    """

    def __init__(self, bootstrap: BootstrapConfig) -> None:
        self.bootstrap = bootstrap
        self.rank, self.world_size = bootstrap.rank, bootstrap.world_size
        self.incarnation = secrets.randbits(62) if bootstrap.incarnation is None else bootstrap.incarnation
        root = resolve_store(bootstrap)
        self._deadline = time.monotonic() + bootstrap.timeout_s
        while True:
            ticket = self._guard(root.add, f"moefleet/ticket/{self.rank}", 1)
            key = f"moefleet/fleet_of_ticket/{ticket}"
            if self.rank == 0:
                number = self._guard(root.add, "moefleet/fleets", 1)
                self._guard(root.set, key, str(number))
            elif not self._wait(root, key):
                raise self._late("the start of a Fleet", [0])
            self.fleet_id = int(self._guard(root.get, key))
            self.store = dist.PrefixStore(f"moefleet/{self.fleet_id}", root)
            if not self._guard(self.store.check, ["closed"]):
                return

    def exchange(self, step: str, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run ``make`` here, publish what it returns (JSON values), and return every rank's, in rank order.

        Where ``make`` raises, all ranks learn it at once: this one re-raises, the others raise MoEEpPeerError.

        Raises:
            MoEEpPeerError: another rank's ``make`` raised.
            MoEEpTimeoutError: a rank did not come; the meeting is closed.
            MoEEpStoreError: the store did not answer.
        """
        failure: Exception | None = None
        try:
            mine = make()
        except Exception as error:
            failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
        self._guard(self.store.set, f"{step}/{self.rank}", json.dumps(mine))
        if failure is not None:
            self.close()
            raise failure
        got = []
        for peer in range(self.world_size):
            key = f"{step}/{peer}"
            if not self._wait(self.store, key):
                self.close()
                raise self._late(step, [r for r in range(self.world_size) if not self.store.check([f"{step}/{r}"])])
            got.append(json.loads(self._guard(self.store.get, key)))
        for peer, value in enumerate(got):
            if "error" in value:
                self.close()
                raise MoEEpPeerError(
                    f"rank {peer} could not build the Fleet: {value['error']}", rank=peer, reason=value["error"]
                )
        return got

    def close(self) -> None:
        """Mark this meeting as over, so that a rank that comes late does not join it."""
        self._guard(self.store.set, "closed", "1")

    def remaining_s(self) -> float:
        """What is left of the bootstrap's ``timeout_s``, in seconds."""
        return max(0.01, self._deadline - time.monotonic())

    def _wait(self, store: Any, key: str) -> bool:
        try:
            store.wait([key], timedelta(seconds=self.remaining_s()))
        except Exception:
            if time.monotonic() >= self._deadline - 0.05:
                return False
            raise self._lost() from None
        return True

    def _guard(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except MoEEpError:
            raise
        except Exception as error:
            raise self._lost() from error

    def _lost(self) -> MoEEpStoreError:
        store = self.bootstrap.tcp_store
        where = f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else "the process group's store"
        return MoEEpStoreError(
            f"the store at {where} did not answer rank {self.rank}; is the process that hosts it alive?"
        )

    def _late(self, what: str, ranks: list[int]) -> MoEEpTimeoutError:
        return MoEEpTimeoutError(
            f"building a Fleet: rank {self.rank} waited {self.bootstrap.timeout_s:g} s (BootstrapConfig.timeout_s) "
            f"for ranks {ranks} at {what!r}",
            ranks=ranks,
        )
