"""The process group that rounds go over: one of our own, beside the caller's or without one."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...config import BootstrapConfig, resolve_device
from ...errors import MoEEpTransportError, config_error
from ...fleet.rendezvous import Meeting

_SLACK_S = 600.0
"""How much longer than our own waits a collective of our own group lasts: a rank that comes late still meets it."""

_ending: set[int] = set()
_ended = threading.Condition()
"""NCCL groups of this process that are ending, in any thread. That waits for the GPU, as does a group that begins."""

_WARM_UP = ((64, 0), (4 << 20, 0), (64, 1))
"""Bytes for each rank, and rows to name: larger messages and those of named sizes may use more connections."""


def device_of(bootstrap: BootstrapConfig) -> torch.device:
    """Where tensors live: as the caller says, else a GPU for groups that speak NCCL, else the CPU."""
    if bootstrap.device is not None or bootstrap.process_group is None:
        device = resolve_device(bootstrap)
    else:
        device = resolve_device(bootstrap) if "nccl" in _backends(bootstrap.process_group) else torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _backends(group: Any) -> str:
    """Names of what a group runs on, such as ``"cpu:gloo,cuda:nccl"``."""
    try:
        return dist.get_backend_config(group)
    except (ValueError, RuntimeError, TypeError):
        return str(group.name())


def backend_of(bootstrap: BootstrapConfig, device: torch.device) -> Any:
    """What the caller's group runs on, for tensors of this device; ``None`` without one.

    Raises:
        MoEEpConfigError: this process has no or another place in the group, or the group does not fit the device.
    """
    group = bootstrap.process_group
    if group is None:
        return None
    if not hasattr(group, "alltoall_base"):
        raise config_error(
            "BootstrapConfig.process_group",
            repr(group),
            "a torch.distributed process group that this process belongs to",
            "call create_fleet on the group's members only",
        )
    for field, mine, theirs in (
        ("world_size", bootstrap.world_size, group.size()),
        ("rank", bootstrap.rank, group.rank()),
    ):
        if mine != theirs:
            raise config_error(
                f"BootstrapConfig.{field}", mine, f"{theirs}, as process_group has it", "use dist.get_rank(group)"
            )
    try:
        backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
    except RuntimeError:
        backend = None
    if backend is None or (backend.name(), device.type) in (("gloo", "cuda"), ("nccl", "cpu")):
        raise config_error(
            "BootstrapConfig.device",
            device,
            f"one that the process group ({_backends(group)}) carries all_to_all_single for",
            "gloo groups are for cpu, NCCL groups for cuda",
        )
    return backend


class Group:
    """Ranks that can run collectives together, which nothing else uses.

    A gloo or NCCL group of the caller's says who the ranks are and what they speak; the Fleet's own collectives go
    over a companion of the same kind, so that neither can come between the other's. A group of another kind is used
    itself: the caller then leaves it alone between the halves of a step.

    Attributes:
        handle: a ``torch.distributed`` process group, or one of its backends.
        limit_s: when a collective gives up by itself; ``None``: as the caller's group has it.
    """

    limit_s: float | None
    _kept: weakref.finalize[[Any], Any] | None

    def __init__(self, bootstrap: BootstrapConfig, device: torch.device, meeting: Meeting) -> None:
        self.limit_s, self._kept, self._aborted = None, None, False
        given, backend = bootstrap.process_group, backend_of(bootstrap, device)
        kind = ("nccl" if device.type == "cuda" else "gloo") if backend is None else backend.name()
        if kind in ("gloo", "nccl"):
            self.limit_s = bootstrap.timeout_s + _SLACK_S
            seconds = meeting.remaining_s()
            self.handle = meeting.attend(lambda store: _create(kind, backend, bootstrap, store, seconds))
            # Its destructor waits for collectives that are under way: unless closed, it stays until the process ends.
            self._kept = weakref.finalize(self, _keep, self.handle)
        else:
            self.handle = given
        if device.type == "cuda":
            try:
                meeting.attend(lambda _: _warm_up(self.handle, device, meeting.remaining_s()))
            except BaseException:
                self.close(clean=False)
                raise

    def abort(self) -> None:
        """End collectives of a NCCL group of ours that never would: what is freed afterwards may wait for the GPU."""
        if self._aborted or self._kept is None or not self._kept.alive or self.handle.name() != "nccl":
            return
        self._aborted = True
        with _ended:
            _ending.add(id(self))
        try:
            with contextlib.suppress(Exception):
                self.handle.abort()
        finally:
            with _ended:
                _ending.discard(id(self))
                _ended.notify_all()

    def close(self, clean: bool) -> None:
        """Let go of it: what is ours ends here, what was adopted is left alone. Waits for nobody.

        Args:
            clean: no collective is under way.
        """
        self.abort()
        self.handle = None
        if self._kept is None or not self._kept.alive:
            return
        if clean:
            self._kept.detach()
        else:
            self._kept()


def _keep(handle: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


def _await_ends(seconds: float) -> None:
    """Wait until no group of this process is ending."""
    with _ended:
        if not _ended.wait_for(lambda: not _ending, max(0.0, seconds)):
            raise MoEEpTransportError("all_to_all_single", -1, "an earlier NCCL group of this process does not end")


def _create(kind: str, model: Any, bootstrap: BootstrapConfig, store: Any, seconds: float) -> Any:
    """A backend of our own over a store. The default process group is not touched.

    Args:
        model: a backend whose network devices to use as well, if any.
        seconds: the most that connecting may take.

    Raises:
        MoEEpTransportError: ranks could not connect.
    """
    name = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}[kind]
    if not hasattr(dist, name):
        raise config_error(
            "BootstrapConfig.process_group", None, f"a group, as this torch has no {name}", "pass one that it has"
        )
    place = dist.PrefixStore("torch_dist", store), bootstrap.rank, bootstrap.world_size
    connecting = timedelta(seconds=seconds)
    try:
        if kind == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=bootstrap.timeout_s + _SLACK_S)
            return dist.ProcessGroupNCCL(*place, options)
        if model is not None and hasattr(model, "options"):
            options = type(model.options)()
            options._devices, options._threads = model.options._devices, model.options._threads
            options._timeout = connecting
            return dist.ProcessGroupGloo(*place, options)
        return dist.ProcessGroupGloo(*place, connecting)
    except Exception as error:
        raise MoEEpTransportError(name, -1, f"ranks could not connect: {error}") from error


def _warm_up(group: Any, device: torch.device, seconds: float) -> None:
    """Let a GPU group connect, which happens with its first collectives and waits for all ranks: later ones do not.

    On a stream of its own: what is under way on others, for peers that are not here yet, is not waited for. Groups that
    are still ending in other threads are, for at most ``seconds``.

    Raises:
        MoEEpTransportError: ranks could not connect.
    """
    _await_ends(seconds)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for size, rows in _WARM_UP:
                blocks = torch.zeros(group.size(), size, dtype=torch.uint8, device=device)
                sizes = [rows] * group.size() if rows else []
                group.alltoall_base(torch.empty_like(blocks), blocks, sizes, sizes, dist.AllToAllOptions()).wait()
            torch.cuda.current_stream(device).synchronize()
    except Exception as error:
        raise MoEEpTransportError("all_to_all_single", -1, f"ranks could not connect: {error}") from error
