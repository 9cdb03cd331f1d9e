"""What a user installs: what importing it costs, and what the wheel and the sdist hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
OPTIONAL = (
    "triton", "nccl", "nixl", "deep_gemm", "flashinfer", "transformers", "safetensors", "vllm", "matplotlib",
    "prometheus_client",
)  # fmt: skip


def run(code: str, *args: str) -> str:
    """What a fresh interpreter at the root prints, with only src on its path beside what is installed."""
    command = [sys.executable, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@cache
def loaded() -> dict[str, set[str]]:
    """The modules that importing each of these loads, one after the other, beyond those that torch itself loads."""
    code = (
        "import importlib, json, sys, torch; before, loaded = set(sys.modules), {}\n"
        "for name in ('moefleet', 'moefleet.cli'):\n"
        "    importlib.import_module(name); loaded[name] = sorted(set(sys.modules) - before)\n"
        "print(json.dumps(loaded))"
    )
    return {name: set(modules) for name, modules in json.loads(run(code).splitlines()[-1]).items()}


def top(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_import_loads_nothing_but_torch_and_numpy() -> None:
    extra = top(loaded()["moefleet"]) - set(sys.stdlib_module_names) - {"moefleet", "torch", "numpy"}
    assert not extra, f"import moefleet loads {sorted(extra)}: import them inside the function that needs them"


def test_import_stays_small() -> None:
    """Importing costs what it loads: a count repeats where a clock does not."""
    others = {name for name in loaded()["moefleet"] if name.split(".")[0] not in ("moefleet", "torch")}
    assert len(others) <= 100, f"import moefleet loads {len(others)} modules beside torch's: {sorted(others)}"


def test_import_of_the_command_line_loads_no_optional_package() -> None:
    extra = top(loaded()["moefleet.cli"]) & set(OPTIONAL)
    assert not extra, f"import moefleet.cli loads {sorted(extra)}: import them inside the command that needs them"


def test_import_works_without_optional_packages_and_without_metadata() -> None:
    from moefleet._version import __version__

    code = (
        "import json, sys, torch, importlib.metadata as m; sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))\n"
        "version, m.version = m.version, None\n"
        "import moefleet; print(moefleet.__version__)\n"
        "m.version = version\n"
        "import moefleet.cli"
    )
    assert run(code, json.dumps(OPTIONAL)).strip() == __version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names in the wheel and in the sdist (there without the leading folder), made by the real build backend."""
    out = tmp_path_factory.mktemp("dist")
    code = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"
    wheel, sdist = run(code, str(out)).split()[-2:]
    with zipfile.ZipFile(out / wheel) as archive:
        names = {"wheel": set(archive.namelist())}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        names["requires"] = {
            line.removeprefix("Requires-Dist: ")
            for line in archive.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist: ") and "extra ==" not in line
        }
    with tarfile.open(out / sdist) as archive:
        names["sdist"] = {name.split("/", 1)[1] for name in archive.getnames()}
    return names


def test_wheel_holds_the_package_with_its_types_and_assets(built: dict[str, set[str]]) -> None:
    expected = {
        path.relative_to(SRC).as_posix()
        for path in (SRC / "moefleet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"moefleet/py.typed", "moefleet/native/rows.c", "moefleet/native/moefleet.h"} <= expected
    assert any(name.startswith("moefleet/assets/") for name in expected), "the demo's model lies in src/moefleet/assets"
    assert expected <= built["wheel"], f"not in the wheel: {sorted(expected - built['wheel'])}"


def test_wheel_holds_nothing_else(built: dict[str, set[str]]) -> None:
    tops = {name.split("/")[0] for name in built["wheel"]}
    assert {name for name in tops if not name.endswith(".dist-info")} == {"moefleet"}


def test_core_dependencies_are_few(built: dict[str, set[str]]) -> None:
    assert built["requires"] == {"torch>=2.11", "numpy", "typer", "rich"}


def test_sdist_builds_again_and_leaves_the_large_data_out(built: dict[str, set[str]]) -> None:
    assert {"pyproject.toml", "README.md", "LICENSE", "src/moefleet/py.typed"} <= built["sdist"]
    large = {name for name in built["sdist"] if name.startswith(("examples/data/", ".venv/", ".git/"))}
    assert not large, f"in the sdist: {sorted(large)[:10]}"
