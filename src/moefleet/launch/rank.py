"""What runs in a rank's process: import the script, answer calls, die with the parent."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing import process, spawn
from typing import Any, BinaryIO

import torch
from torch.distributed import PrefixStore, TCPStore

from ..config import BootstrapConfig
from ..errors import config_error
from .wire import Call, Hello, Reply, Said, dumps, frame, read_frame

PR_SET_PDEATHSIG = 1


def serve(control: socket.socket, stream: BinaryIO) -> int:
    """Live as a rank until the last call is answered or the parent says goodbye. Returns the exit code.

    Args:
        control: this end of the socket to the parent.
        stream: the buffered file over it that has been read from already.
    """
    hello = read_frame(stream)
    if hello is None:
        return 1
    try:
        client = settle(control, *hello)
    except BaseException as error:
        return answer(stream, *failure(Said.UNUSABLE, error)).exitcode
    answer(stream, Reply(Said.READY), b"")
    while (message := read_frame(stream)) is not None:
        call, body = message
        if not isinstance(call, Call):
            break
        reply = answer(stream, *run(client, call, body))
        if call.last:
            return reply.exitcode
    return 0


def settle(control: socket.socket, hello: Hello, _: bytes) -> TCPStore:
    """Make this process a rank: its end, its output, its threads, and the parent's script as ``__main__``.

    Returns:
        The client of the parent's store. It is made once and before any call, since torch looks up the name of the
        address that it connects to, which takes seconds where no name server answers.
    """
    control.set_inheritable(False)
    die_with_socket(control)
    if os.environ != hello.environment:  # of a later time than what this process was forked from
        os.environ.clear()
        os.environ.update(hello.environment)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)  # who ends it from outside sees on stderr where it hung
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(hello.threads)
    current = process.current_process()
    current._inheriting = True  # type: ignore[attr-defined]  # "a child is importing its parent's script", see pool.py
    try:
        spawn.prepare(hello.preparation)
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    gc.freeze()  # torch's own objects are never garbage: looking at them at exit would cost a third of a second
    return TCPStore("127.0.0.1", hello.store_port, is_master=False, wait_for_workers=False)


def die_with(parent_pid: int) -> None:
    """Let Linux kill this process at the end of the thread that started it, however that went. 0: do not."""
    if parent_pid:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os.kill(os.getpid(), signal.SIGKILL)


def die_with_socket(control: socket.socket) -> None:
    """Arrange SIGKILL for this process when the other end of its socket is gone."""

    def watch() -> None:
        poll = select.poll()
        poll.register(control, 0)  # 0: only the hang-up
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="moefleet-parent-watch", daemon=True).start()


def run(client: TCPStore, call: Call, body: bytes) -> tuple[Reply, bytes]:
    """Answer one call: the reply and its body."""
    sys.path[:] = call.sys_path
    try:
        fn, args = pickle.loads(body)
    except BaseException as error:
        return failure(Said.UNUSABLE, error)
    try:
        client.set_timeout(timedelta(seconds=call.timeout_s))
        store = PrefixStore(call.prefix, client) if call.prefix else client
        value = fn(BootstrapConfig(call.world_size, call.rank, tcp_store=store), *args)
    except BaseException as error:
        return failure(Said.RAISED, error)
    return returned(call.rank, value)


def returned(rank: int, value: Any) -> tuple[Reply, bytes]:
    """Pack a return value; one that cannot be pickled becomes an error that says so."""
    try:
        return Reply(Said.RETURNED), dumps(value)
    except Exception as error:
        what = f"a {type(value).__name__} that cannot be pickled ({error})"
        refusal = config_error(
            f"return value of fn on rank {rank}", what, "values that pickle can carry", "return tensors, numbers, texts"
        )
        refusal.__cause__ = error
        return failure(Said.RAISED, refusal)


def failure(said: Said, error: BaseException) -> tuple[Reply, bytes]:
    """Pack an exception, with an empty body unless it comes out of pickle as it went in."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # the frame of this file
    text = "".join(traceback.format_exception(error))
    body = b""
    if isinstance(error, Exception):
        try:
            body = dumps(error)
            if type(pickle.loads(body)) is not type(error):
                body = b""
        except Exception:
            body = b""
    return Reply(said, "".join(traceback.format_exception_only(error)).strip(), text), body


def answer(stream: BinaryIO, reply: Reply, body: bytes) -> Reply:
    """Send a reply, after everything that was printed before it."""
    for text in (sys.stdout, sys.stderr):
        text.flush()
    ctypes.CDLL(None).fflush(None)
    for piece in frame(reply, body):
        stream.write(piece)
    stream.flush()
    return reply
