"""Which ``torch.distributed`` store the ranks of a Fleet find each other in."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..config import BootstrapConfig
from ..errors import MoEEpStoreError, config_error

_stores: dict[tuple[str, int], dist.TCPStore] = {}
"""Those made from the environment: a process has one for an address, for all its Fleets and for as long as it lives."""


def _store_at(host: str, port: int, is_master: bool, timeout_s: float) -> dist.TCPStore:
    if (host, port) not in _stores:
        timeout = timedelta(seconds=timeout_s)
        _stores[host, port] = dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
    return _stores[host, port]


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
            return _store_at(host, port, bootstrap.rank == 0 and not hosted, bootstrap.timeout_s)
        except Exception as error:
            raise MoEEpStoreError(f"no store at {host}:{port}: {error}") from error
    raise config_error(
        "BootstrapConfig",
        "neither tcp_store nor process_group, and no MASTER_ADDR and MASTER_PORT in the environment",
        "one of the three for world_size > 1",
        "start ranks with moefleet.launch or torchrun, or pass a store",
    )
