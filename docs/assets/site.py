"""Pages that lie at the root of the repository, for mkdocs: README.md is the home page.

On a code forge their links are relative to the root, and links of other pages go up to them; on the site all are
neighbours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between the root and docs/ into links between pages."""
    from_root = page.file.src_uri in PAGES.values()

    def relink(match: re.Match[str]) -> str:
        target = match["target"]
        if from_root:
            target = PAGES.get(target, target.removeprefix("docs/"))
        elif target.startswith("../"):
            up, name = target.rsplit("/", 1)
            if name in PAGES and up.count("..") == page.file.src_uri.count("/") + 1:
                target = "../" * page.file.src_uri.count("/") + PAGES[name]
        return f"]({target}{match['anchor'] or ''})"

    return LINK.sub(relink, markdown)
