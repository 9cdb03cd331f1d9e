"""Nothing imports upward: each import in src/moefleet against the table of rooms; heavy packages in their rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "moefleet"

VOCABULARY = frozenset({"errors", "config", "knobs", "tensors", "weights", "placement", "routing"})
EVERYTHING = frozenset({"*"})

# Room -> the rooms that it may import, itself and `_version` aside.
MAY_IMPORT: dict[str, frozenset[str]] = {
    **{room: VOCABULARY for room in VOCABULARY},
    "reference": VOCABULARY | {"quant"},
    "quant": VOCABULARY,
    "native": VOCABULARY,
    "substrate": VOCABULARY | {"native"},
    "fleet": VOCABULARY | {"substrate"},
    "transports": VOCABULARY | {"native", "fleet", "substrate", "quant"},
    "kernels": VOCABULARY | {"native", "quant"},
    "mega": VOCABULARY | {"fleet", "substrate", "quant"},
    "timing": VOCABULARY,
    "captured": VOCABULARY | {"fleet"},
    "layer": VOCABULARY
    | {"reference", "quant", "substrate", "fleet", "transports", "kernels", "mega", "timing", "captured"},
    "serving": VOCABULARY | {"layer", "fleet"},
    "integrations": VOCABULARY | {"layer", "serving"},
    "launch": EVERYTHING,
    "cli": EVERYTHING,
    "bench": EVERYTHING,
    "demo": EVERYTHING,
    "chaos": EVERYTHING,
    "doctor": EVERYTHING,
    "plan": EVERYTHING,
    "generate": EVERYTHING,
    "__init__": EVERYTHING,
    "__main__": EVERYTHING,
    "_version": frozenset(),
}

# layer.py reaches these by registry name: it may import the package or what it shares, never one of its members.
BY_NAME_ONLY = ("transports", "kernels", "mega")
SHARED_MODULES = frozenset({"base", "registry"})

# Package -> the folders whose modules may import it at module level; inside a function everyone may.
HEAVY: dict[str, tuple[str, ...]] = {
    "triton": ("substrate", "quant", "transports.nvlink", "kernels", "mega", "bench.gpu_link"),
    "nccl": ("transports.nccl_ep",),
    "nixl": ("transports.nixl_ep",),
    "deep_gemm": ("kernels", "mega"),
    "flashinfer": (),
    "transformers": ("integrations",),
    "vllm": ("integrations",),
    "safetensors": ("integrations",),
    "matplotlib": (),
    "prometheus_client": ("serving",),
}


@dataclass(frozen=True)
class Import:
    """One imported module: `importer` is the dotted module that says so, `top_level` whether importing runs it."""

    importer: str
    target: str
    path: Path
    line: int
    top_level: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.importer} imports {self.target}"


def module_name(path: Path, src: Path) -> str:
    """Dotted name of a file: src/moefleet/fleet/__init__.py is moefleet.fleet."""
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST, top_level: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement below `node`, with whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, top_level
            continue
        function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from import_nodes(child, top_level and not function and not is_type_checking(child))


def imports_of(path: Path, src: Path) -> list[Import]:
    """All imports of one file with absolute targets; a name that is a module of ours is the target itself."""
    importer = module_name(path, src)
    package = importer.split(".") if path.name == "__init__.py" else importer.split(".")[:-1]
    found = []

    def is_module(dotted: str) -> bool:
        base = src.joinpath(*dotted.split("."))
        return base.with_suffix(".py").is_file() or base.is_dir()

    for node, top_level in import_nodes(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *(node.module or "").split(".")]).rstrip(".")
            submodules = [f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}")]
            targets = submodules + [base] * (len(submodules) < len(node.names))
        shown = path.relative_to(src.parent)
        found += [Import(importer, target, shown, node.lineno, top_level) for target in targets]
    return found


def room_of(module: str) -> str:
    """The room of one of our modules; the package itself is `__init__`."""
    return (module.split(".") + ["__init__"])[1]


def why_forbidden(found: Import) -> str | None:
    """What the table says against an import of one of our own modules, or None."""
    room, target = room_of(found.importer), room_of(found.target)
    allowed = MAY_IMPORT.get(room)
    if allowed is None:
        return f"{room} is no room of the table in CONTRIBUTING.md; give it a row there and in {Path(__file__).name}"
    inner, other = found.importer.split(".")[2:3], found.target.split(".")[2:3]
    if room == target:
        if room == "transports" and inner and other and inner != other and other[0] not in SHARED_MODULES:
            return "a transport never imports another transport"
        return None
    if target == "_version" or allowed is EVERYTHING:
        return None
    if target not in allowed:
        return f"{room} may import: {', '.join(sorted(allowed))}"
    if room == "layer" and target in BY_NAME_ONLY and other and other[0] not in SHARED_MODULES:
        return f"layer reaches {target} by registry name, not by importing one of them"
    return None


def why_heavy(found: Import) -> str | None:
    """What is wrong with a module-level import of a heavy or optional package, or None."""
    rooms = HEAVY.get(found.target.split(".")[0])
    if rooms is None or not found.top_level:
        return None
    if any(f"{found.importer}.".startswith(f"{PACKAGE}.{room}.") for room in rooms):
        return None
    return f"at module level only in: {', '.join(rooms) or 'no room'}; import it inside the function that needs it"


def violations(src: Path) -> list[str]:
    found = [item for path in sorted((src / PACKAGE).rglob("*.py")) for item in imports_of(path, src)]
    ours = [(item, why_forbidden(item)) for item in found if item.target.split(".")[0] == PACKAGE]
    heavy = [(item, why_heavy(item)) for item in found]
    return [f"{item} ({why})" for item, why in ours + heavy if why]


def test_every_import_stays_within_its_rooms() -> None:
    bad = violations(SRC)
    assert not bad, "imports against the table of rooms:\n" + "\n".join(bad)


def test_every_room_is_in_the_table() -> None:
    rooms = {path.stem for path in (SRC / PACKAGE).iterdir() if path.suffix == ".py" or list(path.rglob("*.py"))}
    assert rooms <= MAY_IMPORT.keys(), f"rooms without a row: {sorted(rooms - MAY_IMPORT.keys())}"


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("config.py", "from .errors import config_error", None),
        ("config.py", "from .fleet.base import Fleet", "config may import"),
        ("quant/mx.py", "from ..substrate import flags", "quant may import"),
        ("fleet/base.py", "from .. import errors, knobs", None),
        ("fleet/base.py", "from ..transports.shm import ShmFleet", "fleet may import"),
        ("fleet/base.py", "def f():\n    import moefleet.layer", "fleet may import"),
        ("fleet/base.py", "from .. import create_fleet", "fleet may import"),
        ("transports/shm/handle.py", "from ...fleet.base import Handle\nfrom .ring import Ring", None),
        ("transports/shm/handle.py", "from ..nvlink.handle import NvlinkHandle", "never imports another transport"),
        ("transports/shm/handle.py", "from ...kernels import identity", "transports may import"),
        ("kernels/gemm.py", "from ..quant.mx import decode", None),
        ("kernels/gemm.py", "from ..fleet import create_fleet", "kernels may import"),
        ("layer.py", "from .kernels import create_kernel\nfrom .kernels.base import ExpertKernel", None),
        ("layer.py", "from .kernels.gemm import Gemm", "by registry name"),
        ("layer.py", "from .kernels import gemm", "by registry name"),
        ("serving/guard.py", "from ..layer import MoEEpLayer", None),
        ("integrations/vllm.py", "from ..transports.shm import ring", "integrations may import"),
        ("cli/demo.py", "from ..transports.shm import ring\nfrom .. import __version__", None),
        ("attic.py", "from .errors import MoEEpError", "attic is no room"),
        ("fleet/base.py", "import triton.language as tl", "at module level only in"),
        ("fleet/base.py", "try:\n    import triton\nexcept ImportError:\n    triton = None", "at module level only in"),
        ("fleet/base.py", "def f():\n    import triton", None),
        ("fleet/base.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import triton", None),
        ("transports/nvlink/kernels.py", "import triton", None),
        ("transports/nccl_ep/fleet.py", "import nixl", "at module level only in"),
        ("cli/plot.py", "import matplotlib.pyplot as plt", "no room"),
        ("integrations/transformers.py", "from transformers import AutoModelForCausalLM", None),
    ],
)
def test_the_rules_themselves(tmp_path: Path, file: str, code: str, expected: str | None) -> None:
    layout = ("errors.py", "knobs.py", "layer.py", "fleet/base.py", "substrate/flags.py", "transports/shm/ring.py")
    for name in (*layout, "transports/nvlink/handle.py", "kernels/gemm.py", "kernels/identity.py", file):
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / PACKAGE / file).write_text(code)
    bad = violations(tmp_path)
    if expected is None:
        assert bad == []
    else:
        assert len(bad) == 1, bad
        assert expected in bad[0], bad
        assert f"{file}:" in bad[0], "names the file and the line"
