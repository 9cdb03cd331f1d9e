"""Ranks of this suite: forked from one warm process, so that killing them costs nothing; one store for each call."""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import selectors
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, BinaryIO, NoReturn

import pytest  # noqa: F401 - here, so that no rank has to import it
import torch
from torch.distributed import TCPStore

import tests.strategies  # noqa: F401 - likewise
from moefleet.chaos.crew import fork_rank, warm_nursery
from moefleet.config import BootstrapConfig
from moefleet.errors import MoEEpNotBuiltError
from moefleet.fleet.registry import BUILT_IN, fleet_class
from moefleet.kernels import grouped_gemm  # noqa: F401 - likewise
from moefleet.launch.nursery import Nursery
from moefleet.launch.pool import host_store

for name in BUILT_IN:  # likewise
    with suppress(MoEEpNotBuiltError):
        fleet_class(name)
if os.environ.get("TRITON_INTERPRET") == "1":  # likewise
    with suppress(ImportError):
        from tests.transports.nvlink import interpreter

        interpreter.prepare()

LENGTH = struct.Struct("!Q")
KILLED = object()
"""What a rank returned that SIGKILL ended."""


@cache
def nursery() -> Nursery:
    warm = warm_nursery("tests.faults.forked")
    atexit.register(warm.close)
    return warm


def run_forked(fn: Callable[..., Any], args: tuple[Any, ...], world: int, timeout_s: float) -> list[Any]:
    """Run ``fn(bootstrap, *args)`` on new ranks. Each one's value, RuntimeError with its traceback, or KILLED."""
    warm, store = nursery(), host_store()
    call = pickle.dumps((fn, args))
    ranks = [fork_rank(warm) for _ in range(world)]
    replies: dict[int, bytearray] = {rank: bytearray() for rank in range(world)}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for rank, (_, link) in enumerate(ranks):
            payload = pickle.dumps((rank, world, store.port, call))
            link.sendall(LENGTH.pack(len(payload)) + payload)
            selector.register(link, selectors.EVENT_READ, rank)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(0.1):
                piece = ranks[key.data][1].recv(1 << 20)
                replies[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
        late = [key.data for key in selector.get_map().values()]
    for rank in late:
        ranks[rank][0].send_signal(signal.SIGCONT)
        ranks[rank][0].send_signal(signal.SIGUSR1)  # it shows where it hangs
    if late:
        time.sleep(0.5)
    for process, link in ranks:
        link.close()
        while process.poll() is None:
            if late:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.002)
    assert not late, f"ranks {late} did not return within {timeout_s:g} s; their stack traces are on stderr"
    return [_outcome(replies[rank], process.returncode) for rank, (process, _) in enumerate(ranks)]


def _outcome(reply: bytearray, status: int | None) -> Any:
    if reply:
        return pickle.loads(reply)
    return KILLED if status == -signal.SIGKILL else RuntimeError(f"ended with {status}")


def serve(link: socket.socket, stream: BinaryIO) -> NoReturn:
    """In the rank's process: run what is asked for, and send what came of it."""
    faulthandler.register(signal.SIGUSR1)
    rank, world, port, call = pickle.loads(stream.read(LENGTH.unpack(stream.read(LENGTH.size))[0]))
    fn, args = pickle.loads(call)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    torch.set_num_threads(1)
    value: Any
    try:
        value = pickle.dumps(fn(BootstrapConfig(world, rank, tcp_store=store), *args))
    except BaseException as error:
        value = pickle.dumps(RuntimeError("".join(traceback.format_exception(error))))
    link.sendall(value)
    os._exit(0)
