"""A rank of a round: it does what the supervisor grants, reports each step, and agrees with the others on its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any, BinaryIO, NoReturn

import torch
from torch.distributed import PrefixStore, TCPStore

from ..config import BootstrapConfig, EpLayout, SplitConfig
from ..errors import MoEEpError, MoEEpNoQuorumError, MoEEpPeerError, MoEEpRankEvictedError
from ..kernels import grouped_gemm  # noqa: F401 - before the fork, so that no rank has to import it
from ..knobs import FleetAlgoKnobFaultTolerance
from ..layer import MoEEpLayer
from ..tensors import MoEEpTensors
from ..transports import shm  # noqa: F401 - likewise
from . import work

BUILD_S = 30.0


class Rank:
    """One rank's engine.

    Args:
        link: to the supervisor; lines of JSON both ways.
        lines: those that come over it.
        rank, spec: who this is, and the round as JSON values (see ``crew.py``).
    """

    def __init__(self, link: socket.socket, lines: BinaryIO, rank: int, spec: dict[str, Any]) -> None:
        self.rank, self.spec, self.seed = rank, spec, spec["seed"]
        self._link, self._lines = link, lines
        self._generation = spec["generation"]
        client = TCPStore("127.0.0.1", spec["port"], is_master=False, wait_for_workers=False)
        client.set_timeout(timedelta(seconds=BUILD_S))
        self._store = PrefixStore(spec["prefix"], client)
        knob = FleetAlgoKnobFaultTolerance(
            timeout_ms=spec["timeout_ms"], reconcile_timeout_s=spec["readmit_s"], coordinator_takeover_s=2.0
        )
        layout = EpLayout(spec["layout"])
        backend = SplitConfig(work.comm(spec["transport"], self.seed), "grouped_gemm")
        weights = work.weights_of(rank, spec["world"])
        self.layer = MoEEpLayer(self._bootstrap(spec["world"]), work.params(layout), weights, [knob], backend)
        self.fleet = self.layer.fleet
        self.evicted = False

    def _bootstrap(self, world: int) -> BootstrapConfig:
        return BootstrapConfig(world, self.rank, device="cpu", tcp_store=self._store, timeout_s=BUILD_S)

    def tell(self, kind: str, **more: Any) -> None:
        event = {"kind": kind, "rank": self.rank, "t": time.monotonic(), "generation": self._generation, **more}
        self._link.sendall(json.dumps(event).encode() + b"\n")

    def serve(self) -> None:
        """Obey until told to quit."""
        self.idle("joined")
        for line in self._lines:
            order = json.loads(line)
            match order["order"]:
                case "run":
                    self.run(order["until"])
                case "reconcile":
                    self.reconcile()
                case "readmit":
                    self.readmit()
                case "topology":
                    self.change(order["world"], order["rank"])
                case "quit":
                    self.layer.destroy()
                    return
            self.idle()

    def idle(self, kind: str = "idle") -> None:
        epoch, step = self.fleet.active_mask_epoch, self.fleet.stats()["steps"]
        self.tell(kind, step=step, epoch=epoch, evicted=self.evicted, segments=segments())

    def run(self, until: int) -> None:
        while not self.evicted and self.fleet.stats()["steps"] < until:
            self.step()

    def step(self) -> None:
        step = self.fleet.stats()["steps"] + 1
        try:
            output = self.layer(MoEEpTensors(*work.inputs(self.seed, step, self.rank)))
        except MoEEpPeerError as error:  # a rank that is asked to end in the middle of a step gives the step up
            self.tell("given up", step=step, error=str(error))
            return
        if self.fleet.query_fault():
            self.tell("flagged", step=step, epoch=self.fleet.active_mask_epoch)
            self.reconcile()
            return
        mask = self.fleet.query_active_mask().tolist()
        wrong = work.wrong_rows(self.seed, step, self.rank, mask, output)
        self.tell("step", step=step, epoch=self.fleet.active_mask_epoch, mask=mask, wrong=wrong, rows=len(output))

    def reconcile(self) -> None:
        self.tell("entered", round=self.fleet.active_mask_epoch + 1)
        try:
            mask = self.fleet.reconcile_active_mask(timeout_s=self.spec["gather_s"]).tolist()
        except MoEEpRankEvictedError:
            self.evicted = True
            self.tell("evicted")
        except MoEEpNoQuorumError as error:
            self.tell("no quorum", error=str(error))
        else:
            self.tell("agreed", epoch=self.fleet.active_mask_epoch, mask=mask, step=self.fleet.stats()["steps"])

    def readmit(self) -> None:
        try:
            mask = self.fleet.clear_faults(readmit=True).tolist()
        except MoEEpRankEvictedError:
            self.evicted = True
            self.tell("evicted")
            return
        self.evicted = False
        self.tell("readmitted", epoch=self.fleet.active_mask_epoch, mask=mask, step=self.fleet.stats()["steps"])

    def change(self, world: int, rank: int) -> None:
        self.rank = rank
        self.layer.update_topology(self._bootstrap(world), work.weights_of(rank, world))
        self._generation += 1
        self.tell("moved", world=world)


def segments() -> int:
    """Shared segments that this process maps."""
    found = set()
    with open("/proc/self/maps") as lines:
        for line in lines:
            if "memfd:moefleet" in line:
                found.add(line.split()[4])
    return len(found)


def leave(*_: object) -> None:
    """SIGTERM: end as a program that is asked to."""
    raise SystemExit(0)


def serve(link: socket.socket, lines: BinaryIO) -> NoReturn:
    """The whole life of a rank's process, once it is forked. The first line says who it is."""
    signal.signal(signal.SIGTERM, leave)
    torch.set_num_threads(1)
    engine = None
    first = lines.readline()
    if not first:
        os._exit(0)
    rank, spec = (json.loads(first)[key] for key in ("rank", "spec"))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            with torch.inference_mode():
                engine = Rank(link, lines, rank, spec)
                engine.serve()
        except SystemExit:
            pass
        except MoEEpError as error:
            told = {"kind": "error", "rank": rank, "t": time.monotonic(), "generation": spec["generation"]}
            link.sendall(json.dumps(told | {"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            if engine is not None:
                engine.layer.destroy()
    os._exit(0)
