"""The site that `make docs` builds: all pages, nothing from elsewhere, the public interface as it is."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import moefleet
from tests.running import ROOT, run

MAKEFILE = (ROOT / "Makefile").read_text()
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that make a reader's browser fetch something, and the attribute that says what."""


class Elements(HTMLParser):
    """What a page loads, its ids, and the text of its code blocks."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.code = ""
        self._in_code = 0
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._in_code += tag == "pre"
        if values.get("id"):
            self.ids.add(str(values["id"]))
        load = values.get(LOADED.get(tag, ""))
        if load and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(load)

    def handle_endtag(self, tag: str) -> None:
        self._in_code -= tag == "pre"

    def handle_data(self, data: str) -> None:
        if self._in_code:
            self.code += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site, built by the command of the Makefile with no network."""
    folder = tmp_path_factory.mktemp("docs")
    (recipe,) = re.findall(r"^docs:.*\n\t@NO_MKDOCS_2_WARNING=1 \$\(BIN\)/(mkdocs build .*)$", MAKEFILE, re.M)
    program, *arguments = shlex.split(recipe)
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    command = [Path(sys.executable).parent / program, *arguments, "--site-dir", folder / "site"]
    ended = run(command, folder / "log", env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"})
    assert ended.code == 0 and not ended.output, ended.output
    yield folder / "site"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loads = Elements(page).loads
        assert loads
        for load in loads:
            assert not re.match(r"(https?:)?//", load), f"{page.relative_to(site)} loads {load}"
        assert 'class="mermaid"' not in page.read_text(), f"{page.relative_to(site)}: the theme would fetch mermaid"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//", style.read_text()), style


def test_readme_is_the_home_page_and_its_links_are_the_sites(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert "In fifteen lines" in home
    linked = set(re.findall(r"\]\(docs/([\w-]+)\.md\)", (ROOT / "README.md").read_text()))
    assert linked
    for page in linked:
        assert f'href="{page}/"' in home and (site / page / "index.html").is_file()


def test_pictures_are_there(site: Path) -> None:
    code = Elements(site / "concepts/index.html").code
    for line in (
        " expert A │ a0 │ b0 │ undefined   │",
        " rank 1   │ b0 │ undefined    │",
        " │ a0 │ a1 │ b0 │ undefined    │",
    ):
        assert line in code


def test_recipes_can_be_downloaded(site: Path) -> None:
    for recipe in (ROOT / "docs/recipes").iterdir():
        if recipe.is_file():
            assert (site / "recipes" / recipe.name).read_bytes() == recipe.read_bytes()


def test_public_interface_is_on_its_page(site: Path) -> None:
    """A new public name needs a line in docs/api.md."""
    names = {f"moefleet.{name}" for name in moefleet.__all__ if not name.startswith("__")}
    missing = names - Elements(site / "api/index.html").ids
    assert not missing, f"not in docs/api.md: {sorted(missing)}"


def test_docstrings_are_readable(site: Path) -> None:
    page = (site / "api/index.html").read_text()
    assert not re.search(r":(?:class|func|meth|attr|mod):", page)
    assert "``expert_tensors``         ``[L, M*W, H]``" in Elements(site / "api/index.html").code
