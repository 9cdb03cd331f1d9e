"""The stream that a Fleet's bootstrap names, and work on a stream in order with the caller's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ..config import BootstrapConfig, resolve_device

_HERE = nullcontext()


def stream_of(bootstrap: BootstrapConfig) -> torch.cuda.Stream | None:
    """``BootstrapConfig.stream``; ``None`` where it names none, on a CPU, and in a capture, which takes all work."""
    if not bootstrap.stream:
        return None
    device = resolve_device(bootstrap)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return stream_at(bootstrap.stream, device)


def stream_at(raw: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of this raw handle. 0 is the default one, in whose place ``ExternalStream`` makes another."""
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)


def beside(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """Work inside goes to ``stream``: after what the current stream was given before, and before what it is given
    afterwards. ``None`` changes nothing."""
    return _HERE if stream is None else _beside(stream)


@contextmanager
def _beside(stream: torch.cuda.Stream) -> Iterator[None]:
    here = torch.cuda.current_stream(stream.device)
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)
