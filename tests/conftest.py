"""What holds for all tests: Triton's interpreter, garbage, random numbers, and the time that a test has left."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from tests import time_limit

# Without a GPU the kernels run under Triton's interpreter, which has to be chosen before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Imported modules are never garbage: each full collection would look at a million of their objects."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same numbers, whatever ran before it in this process."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """pytest-timeout calls this when a test's time begins; it sets its timer after us."""
    time_limit.begin(settings.timeout)
