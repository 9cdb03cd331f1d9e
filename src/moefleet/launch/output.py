"""What a rank prints, line by line on the parent's own streams."""

from __future__ import annotations

import os
import sys
from typing import IO

MOST_A_PIPE_HOLDS = 1 << 20  # bytes: one read of this size empties a pipe (Linux: 64 KiB unless raised, 1 MiB at most)


class PrefixedOutput:
    """Passes a rank's pipe on to ``sys.stdout`` or ``sys.stderr``, each line behind a prefix.

    Args:
        pipe: the reading end; becomes non-blocking.
        prefix: what each line starts with.
        stream: ``"stdout"`` or ``"stderr"``, looked up in ``sys`` at each write.
    """

    def __init__(self, pipe: IO[bytes], prefix: str, stream: str) -> None:
        self.pipe, self._prefix, self._stream = pipe, prefix, stream
        self._partial = b""
        os.set_blocking(pipe.fileno(), False)

    def drain(self) -> None:
        """Write out the whole lines among what the pipe holds now. Closes the pipe at its end."""
        if self.pipe.closed:
            return
        try:
            piece = os.read(self.pipe.fileno(), MOST_A_PIPE_HOLDS)
        except BlockingIOError:
            return
        if not piece:
            self.pipe.close()
        *lines, self._partial = (self._partial + piece).split(b"\n")
        self._write(lines)

    def flush(self) -> None:
        """Write out everything, also a last line without its newline."""
        self.drain()
        if self._partial:
            self._write([self._partial])
            self._partial = b""

    def close(self) -> None:
        """Flush, and stop listening even where the rank's own children hold the other end."""
        self.flush()
        self.pipe.close()

    def _write(self, lines: list[bytes]) -> None:
        stream = getattr(sys, self._stream)
        if not lines or stream is None:
            return
        text = "".join(f"{self._prefix}{line.decode('utf-8', 'replace')}\n" for line in lines)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
