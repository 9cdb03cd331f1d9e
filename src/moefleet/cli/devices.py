"""The option that says where ranks compute, for all commands that have it."""

from __future__ import annotations

from enum import Enum


class Device(str, Enum):
    """Where ranks keep their tensors, by torch's names."""

    CPU = "cpu"
    CUDA = "cuda"
