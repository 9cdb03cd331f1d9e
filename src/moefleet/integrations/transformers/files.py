"""The tensors of a checkpoint's safetensors files, of which a rank reads those that it needs.

Dense ones are views of the mapped file, which ranks of one host share. Experts are read out of it, into memory that
goes back to the system as soon as it is no longer used, as does what transformers' conversions leave behind.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import config_error

ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.")
ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(_bias|\.bias|\.weight)?$")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Tensors:
    """The tensors of a directory's safetensors files.

    Attributes:
        read: names of those that were read, in that order.

    Raises:
        MoEEpConfigError: the directory has no such files.
    """

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._file_of = {name: path / file for name, file in files.items()}
        else:
            self._file_of = {
                name: file for file in sorted(path.glob("*.safetensors")) for name in list(_open(file).keys())
            }
        if not self._file_of:
            raise config_error(f"model: {path}", "no *.safetensors files", "a checkpoint in safetensors files")
        self._path = path
        self._opened: dict[Path, Any] = {}
        self._begins: dict[Path, dict[str, int]] = {}
        self._block = ""
        self.read: list[str] = []

    def wanted(self, experts: Sequence[int]) -> dict[str, Tensor]:
        """All but other ranks' experts, not yet read. ``experts`` are contiguous."""
        wanted: dict[str, Tensor] = {}
        for name in self._file_of:
            one = ONE_EXPERT.search(name)
            if one is not None:
                if int(one[1]) in experts:
                    wanted[name] = ExpertTensor(self, name)
            elif ALL_EXPERTS.search(name) is None:
                wanted[name] = Tensor(self, name)
            elif experts:
                wanted[name] = ExpertTensor(self, name, slice(experts[0], experts[-1] + 1))
        return wanted

    def dtype(self) -> torch.dtype:
        """The first floating type in the files."""
        return next(FLOATS[kind] for kind in (self.lazy(name).get_dtype() for name in self._file_of) if kind in FLOATS)

    def lazy(self, name: str) -> Any:
        """A tensor that is read where it is indexed."""
        file = self._file_of[name]
        if file not in self._opened:
            if not file.is_file():
                raise config_error(f"model: {self._path}", f"no {file.name}", "all files that the index names")
            self._opened[file] = _open(file)
        return self._opened[file].get_slice(name)

    def load(self, name: str, begin: int, size: int) -> mmap.mmap:
        """Bytes of a tensor, from its byte ``begin`` on, in new memory."""
        block = name.partition(".experts.")[0]
        if block != self._block:
            self._block = block
            give_back()  # what the conversion of the last one has freed
        file = self._file_of[name]
        if file not in self._begins:
            self._begins[file] = _begins(file)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with file.open("rb") as opened:
            opened.seek(self._begins[file][name] + begin)
            opened.readinto(memory)
        return memory


class Tensor:
    """What transformers takes for a tensor of a safetensors file: ``[...]`` reads it, as a view of the mapped file."""

    def __init__(self, stored: Tensors, name: str) -> None:
        self._stored, self._name = stored, name
        self._lazy = stored.lazy(name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        self._stored.read.append(self._name)
        return self._whole()[at]

    def get_shape(self) -> list[int]:
        return list(self._lazy.get_shape())

    def get_dtype(self) -> str:
        return str(self._lazy.get_dtype())

    def _whole(self) -> torch.Tensor:
        tensor: torch.Tensor = self._lazy[...]
        return tensor


class ExpertTensor(Tensor):
    """One that leaves the file.

    Args:
        rows: which of its rows, along the experts; ``None`` for all.
    """

    def __init__(self, stored: Tensors, name: str, rows: slice | None = None) -> None:
        super().__init__(stored, name)
        self._rows = rows or slice(0, super().get_shape()[0])

    def get_shape(self) -> list[int]:
        return [self._rows.stop - self._rows.start, *super().get_shape()[1:]]

    def _whole(self) -> torch.Tensor:
        empty: torch.Tensor = self._lazy[:0]  # knows the dtype
        shape = self.get_shape()
        row_bytes = empty.itemsize * torch.Size(shape[1:]).numel()
        memory = self._stored.load(self._name, self._rows.start * row_bytes, shape[0] * row_bytes)
        return torch.frombuffer(memory, dtype=empty.dtype).view(shape)


def give_back() -> None:
    """Let glibc return the pages that are free inside its heap; other allocators do as they like."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _open(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def _begins(file: Path) -> dict[str, int]:
    """Where each tensor of a file begins."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        return {
            name: 8 + header + entry["data_offsets"][0]
            for name, entry in json.loads(opened.read(header)).items()
            if name != "__metadata__"
        }
