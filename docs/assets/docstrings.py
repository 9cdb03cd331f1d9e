"""Docstrings as Markdown, for mkdocstrings: references to names become links, ruled tables keep their form."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod):`(?P<tilde>~?)(?P<name>[\w.]+)`")
TABLE = re.compile(r"^(?P<rule>=+(?: +=+)+)\n(?:.*\n)+?(?P=rule)\n(?:.*\n)+?(?P=rule)$", re.M)


class Markdown(griffe.Extension):
    """What our docstrings borrow from reStructuredText, in Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return

        def link(match: re.Match[str]) -> str:
            name = match["name"]
            shown = name.rsplit(".", 1)[-1] if match["tilde"] or name.startswith("moefleet.") else name
            return f"`{shown}`"

        text = ROLE.sub(link, obj.docstring.value)
        obj.docstring.value = TABLE.sub(lambda table: f"```text\n{table[0]}\n```", text)
