"""The JSON file of a run: written anew after each case, so that an interrupted run can go on from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import config_error
from .records import Record, record_of, to_json


class Notebook:
    """The records of a run.

    Args:
        path: where they are written; ``None`` keeps them in memory only.
        resume: begin with those that are there.

    Raises:
        MoEEpConfigError: the folder does not exist, or the file holds something else.
    """

    def __init__(self, path: Path | None = None, *, resume: bool = False) -> None:
        if path is not None and not path.absolute().parent.is_dir():
            raise config_error("--json", path, "a file in a folder that exists")
        self._path = path
        self.records: list[Record] = _read(path) if resume and path is not None and path.exists() else []

    def find(self, facts: Mapping[str, Any], names: Sequence[str]) -> list[Record]:
        """The records of a case that was measured with these candidates; empty where it has to be measured."""
        found = [r for r in self.records if all(getattr(r, name, None) == value for name, value in facts.items())]
        return found if {r.transport for r in found} == set(names) else []

    def add(self, records: Iterable[Record]) -> None:
        """Append, and write the file, which is complete at any moment."""
        self.replace([*self.records, *records])

    def replace(self, records: Sequence[Record]) -> None:
        """Hold these alone."""
        self.records = list(records)
        if self._path is not None:
            beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            beside.write_text(to_json(self.records))
            beside.replace(self._path)


def _read(path: Path) -> list[Record]:
    try:
        return [record_of(fields) for fields in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise config_error(
            "--resume", f"{path} ({error!r})", "a file that this version wrote with --json", "leave --resume away"
        ) from error
