"""Numbers as people read them."""

from __future__ import annotations


def in_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def in_count(count: float) -> str:
    """``47.0e9`` as ``47.0 B``, as parameters are counted."""
    for unit in ("", " K", " M"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} B"


def in_rows(rows: float) -> str:
    """A mean number of rows: digits after the point only where they matter."""
    return f"{rows:.1f}" if rows < 100 else f"{rows:,.0f}"


def in_ranks(first: int, last: int) -> str:
    """``"rank 3"``, ``"ranks 3-7"``."""
    return f"rank {first}" if first == last else f"ranks {first}-{last}"
