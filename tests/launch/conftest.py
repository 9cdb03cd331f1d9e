"""Ranks of these tests are forked also on machines with GPUs, where others start as new interpreters."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from moefleet.launch import pool


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "FORKS", sys.platform == "linux")
        yield
