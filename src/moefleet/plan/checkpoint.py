"""How large a checkpoint's tensors are, from the headers of its safetensors files alone."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import config_error

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LARGEST_HEADER = 100_000_000
"""Bytes: the limit of the format."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_FUSED = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True)
class Checkpoint:
    """Bytes as stored.

    Attributes:
        expert_bytes: ``[E]``, each expert over all layers.
        dense_bytes: all the rest, which every rank holds.
        unused_bytes: of layers beyond the config's, such as those for multi-token prediction.
    """

    expert_bytes: tuple[int, ...]
    dense_bytes: int
    unused_bytes: int = 0


def read_checkpoint(folder: Path, experts: int, layers: int) -> Checkpoint | None:
    """Sum up the tensors of the model in this folder.

    Args:
        folder: has ``model.safetensors``, or an index beside all the files that it names.
        experts, layers: the config's ``E`` and number of decoder layers.

    Returns:
        ``None`` where there are no weights, or not all of them.

    Raises:
        MoEEpConfigError: a file is no safetensors file, or its experts are not the config's.
    """
    files = weight_files(folder)
    if not files or not all(path.is_file() for path in files):
        return None
    each, dense, unused = [0.0] * experts, 0, 0
    for path in files:
        for name, shape, size in tensors(path):
            layer = _LAYER.search(name)
            if layer and int(layer[1]) >= layers:
                unused += size
            elif own := _EXPERT.search(name):
                if int(own[1]) >= experts:
                    raise config_error(f"{path.name} {name}", f"expert {own[1]}", f"0 to {experts - 1}, as config.json")
                each[int(own[1])] += size
            elif _FUSED.search(name) and shape[:1] == [experts]:
                each = [had + size / experts for had in each]
            else:
                dense += size
    return Checkpoint(tuple(round(had) for had in each), dense, unused)


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights are in, whether they are there or not.

    Raises:
        MoEEpConfigError: the index is not readable.
    """
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE] if (folder / SINGLE).is_file() else []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(folder / name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise config_error(str(index), f"no readable weight_map ({error!r})", "a safetensors index") from error


def tensors(path: Path) -> Iterator[tuple[str, list[int], int]]:
    """Name, shape and bytes of each tensor in a safetensors file, whose data is not read.

    The file begins with the length of the header, 8 bytes, little-endian; the header is JSON.

    Raises:
        MoEEpConfigError: it does not.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        found = [
            (name, list(entry["shape"]), int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError) as error:
        raise config_error(
            str(path), f"no safetensors header ({error})", "a safetensors file", "download it again, or move it away"
        ) from error
    yield from found
