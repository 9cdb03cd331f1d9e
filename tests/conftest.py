"""Without a GPU the kernels run under Triton's interpreter, which has to be chosen before they are imported."""

from __future__ import annotations

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Imported modules are never garbage: each full collection would look at a million of their objects."""
    gc.freeze()
