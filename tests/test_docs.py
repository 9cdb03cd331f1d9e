"""The documentation does what it says: its Python runs, its commands and make targets exist."""

from __future__ import annotations

import builtins
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.running import ROOT
from tests.scripts import Interpreter

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.is_file()]
FENCE = re.compile(r"^\s*(?P<marks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
NO_RUN = re.compile(r"<!--\s*no-run(?P<reason>.*?)-->")
SHELL = ("bash", "console", "sh", "shell")
SEPARATORS = frozenset({"&&", "||", "|", ";", "&", "(", ")", "|&"})
WRAPPERS = frozenset({"env", "nohup", "time", "timeout"})
ASSIGNMENT = re.compile(r"^\w+=")


@dataclass(frozen=True)
class Block:
    """One fenced code block; `no_run` is the reason that the comment before it gives, None without one."""

    page: str
    line: int
    language: str
    code: str
    no_run: str | None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    """The fenced blocks of a Markdown text in order."""
    found, lines, index, before = [], text.splitlines(), 0, ""
    while index < len(lines):
        opening = FENCE.match(lines[index])
        if not opening:
            before = lines[index] if lines[index].strip() else before
            index += 1
            continue
        start, marks = index, opening["marks"]
        closing = re.compile(rf"^\s*{marks[0]}{{{len(marks)},}}\s*$")
        index += 1
        while index < len(lines) and not closing.match(lines[index]):
            index += 1
        code = textwrap.dedent("\n".join(lines[start + 1 : index])) + "\n"
        comment = NO_RUN.search(before)
        reason = comment["reason"].lstrip(": ").strip() if comment else None
        found.append(Block(page, start + 1, opening["language"].lower(), code, reason))
        before, index = "", index + 1
    return found


def commands_in(block: Block) -> list[list[str]]:
    """The simple commands of a shell block as words; in a console block only lines after a prompt are commands."""
    code = block.code.replace("\\\n", " ")
    if block.language == "console" or re.search(r"^\$ ", code, re.M):
        code = "\n".join(line.lstrip()[2:] for line in code.splitlines() if line.lstrip().startswith("$ "))
    commands: list[list[str]] = []
    for line in code.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote that spans lines: no command of ours does that
            continue
        commands.append([])
        while words:
            word = words.pop(0)
            if word in SEPARATORS:
                commands.append([])
            elif set(word) <= set("<>&|"):  # a redirection: `> out`, `2> out`, `2>&1`
                del words[:1]
                del commands[-1][len(commands[-1]) - (commands[-1][-1:] in (["1"], ["2"])) :]
            elif commands[-1] or not ASSIGNMENT.match(word):
                commands[-1].append(word)
    return [command for command in commands if command]


def moefleet_arguments(command: list[str]) -> list[str] | None:
    """What follows `moefleet` in `.venv/bin/moefleet ...`, `python -m moefleet ...` or `timeout 5 moefleet ...`."""
    for position, word in enumerate(command):
        before = command[:position]
        starts = not before or before[-1] == "-m" or before[0] in WRAPPERS
        if starts and (word == "moefleet" or word.endswith("bin/moefleet")):
            return command[position + 1 :]
    return None


@cache
def cli() -> Any:
    import typer.main

    from moefleet.cli import app

    return typer.main.get_command(app)


def why_unknown(command: Any, arguments: list[str]) -> str | None:
    """Walk from command to subcommand as the parser would; what it would not know, or None."""
    path, positional, words = "moefleet", 0, list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            options = {
                spelling: option for option in command.params for spelling in (*option.opts, *option.secondary_opts)
            }
            option = options.get(name)
            if name == "--help":
                continue
            if option is None or option.param_type_name != "option":
                return (
                    f"{path} has no option {name}; it has {' '.join(sorted(o for o in options if o.startswith('-')))}"
                )
            if not equals and not option.is_flag and not option.count:
                del words[: option.nargs]
            continue
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            positional += 1
            continue
        if word not in subcommands:
            return f"{path} has no command {word}; it has {' '.join(sorted(subcommands))}"
        command, path = subcommands[word], f"{path} {word}"
    places = [argument.nargs for argument in command.params if argument.param_type_name == "argument"]
    if -1 not in places and positional > sum(places):
        return f"{path} takes {sum(places)} arguments, not {positional}"
    return None


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.M))


BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text(), page.relative_to(ROOT).as_posix())]
PYTHON_BLOCKS = [pytest.param(block, id=block.where) for block in BLOCKS if block.language in ("python", "py")]
SHELL_BLOCKS = [pytest.param(block, id=block.where) for block in BLOCKS if block.language in SHELL]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
@pytest.mark.timeout(180)
def test_python_runs(block: Block, interpreter: Interpreter, tmp_path: Path) -> None:
    """Each block is a complete script: ranks that it spawns import it again, so it lies in a file."""
    compile(block.code, block.where, "exec")
    if block.no_run is not None:
        assert block.no_run, f"{block.where}: say why: <!-- no-run: reason -->"
        return
    script = tmp_path / "block.py"
    script.write_text(block.code)
    ended = interpreter.run(script, tmp_path / "log")
    assert ended.code == 0, f"{block.where} ends with {ended.code}\n{ended.output}"


@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_commands_exist(block: Block) -> None:
    targets = make_targets((ROOT / "Makefile").read_text())
    for command in commands_in(block):
        if command[0] == "make":
            named = {word for word in command[1:] if not word.startswith("-") and not ASSIGNMENT.match(word)}
            assert named <= targets, f"{block.where}: the Makefile has no target {sorted(named - targets)}"
        arguments = moefleet_arguments(command)
        if arguments is not None:
            why = why_unknown(cli(), arguments)
            assert why is None, f"{block.where}: `{' '.join(command)}`: {why}"


def test_every_command_has_a_section() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    missing = [name for name in cli().commands if name != "bench" and f"\n## {name}\n" not in page]
    assert not missing, f"docs/commands.md has no section for {missing}"


def test_errors_are_what_their_page_says() -> None:
    import moefleet

    rows = re.findall(r"^\| `(MoEEp\w+)` \| (.*?) \|", (ROOT / "docs/errors.md").read_text(), re.M)
    kinds = {name for name in moefleet.__all__ if re.fullmatch("MoEEp.+Error", name)}
    assert {name for name, _ in rows} == kinds
    for name, bases in rows:
        for base in re.findall(r"`(\w+)`", bases):
            kind = getattr(moefleet, base, None) or getattr(builtins, base)
            assert issubclass(getattr(moefleet, name), kind), f"docs/errors.md: {name} is not a {base}"


LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """On a code forge, that is; the site's links are checked when it is built."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if target.startswith(("http:", "https:")):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors_of(linked.read_text()), f"{page.name}: {target or page.name} has no #{anchor}"


def anchors_of(text: str) -> set[str]:
    """What a forge and the site make of the headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_make_runs_commands_that_exist() -> None:
    recipes = re.findall(r"^\t@?\$\(BIN\)/moefleet (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipes
    for recipe in recipes:
        assert why_unknown(cli(), shlex.split(recipe)) is None, f"Makefile: moefleet {recipe}"


# The checks themselves, on a page and a command line made up for them.

PAGE = """
<!-- no-run: needs a GPU -->

```python
print(1)
```

- in a list

  ~~~console
  $ FOO=1 moefleet bench comm \\
      --world 4 | tee out && make demo
  world 4
  ~~~

````python title="x"
text = '''
```
'''
````
"""


def test_blocks_and_commands_are_found() -> None:
    first, second, third = blocks_of(PAGE, "page.md")
    assert (first.language, first.no_run, first.line) == ("python", "needs a GPU", 4)
    assert commands_in(second) == [["moefleet", "bench", "comm", "--world", "4"], ["tee", "out"], ["make", "demo"]]
    assert (third.no_run, third.code) == (None, "text = '''\n```\n'''\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moefleet bench comm --world 4 --json", None),
        ("moefleet bench comm --world=4 -w 4 out.json > log", None),
        (".venv/bin/moefleet --help", None),
        ("python -m moefleet demo", None),
        ("pip install moefleet demon", None),
        ("moefleet demo > log 2>&1", None),
        ("timeout 5 moefleet demon", "no command demon"),
        ("moefleet bench com", "no command com"),
        ("moefleet bench comm --wrold 4", "no option --wrold"),
        ("moefleet demo extra", "takes 0 arguments"),
    ],
)
def test_command_lines_are_judged(line: str, expected: str | None) -> None:
    import typer

    app, bench = typer.Typer(), typer.Typer()
    app.add_typer(bench, name="bench")

    @app.command()
    def demo() -> None: ...

    @bench.callback()
    def group() -> None: ...

    @bench.command()
    def comm(
        out: str = typer.Argument(""),
        world: int = typer.Option(2, "--world", "-w"),
        json: bool = False,
    ) -> None: ...

    (command,) = commands_in(Block("page.md", 1, "bash", line + "\n", None))
    arguments = moefleet_arguments(command)
    why = None if arguments is None else why_unknown(typer.main.get_command(app), arguments)
    if expected is None:
        assert why is None
    else:
        assert why is not None
        assert expected in why
