"""docs/recipes: each script runs here, with a SLURM that is made up and a user who may write nothing."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, Ended, run

RECIPES = ROOT / "docs/recipes"
PAGE = (ROOT / "docs/recipes.md").read_text()
MODEL = ROOT / "src/moefleet/assets/tiny-moe"
SCRIPTS = sorted(RECIPES.glob("*.sbatch"))
UID = "12345"

# What a job sees of SLURM: srun starts TASKS processes of the command behind its options. Since 22.05 it must be told
# how many cores a task has.
SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
options = []
while command[0].startswith("--"):
    options.append(command.pop(0))
if "--cpus-per-task=" + os.environ["SLURM_CPUS_PER_TASK"] not in options:
    sys.exit(f"srun: the cores of a task are not among {{options}}")
tasks = int(os.environ["TASKS"])
started = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_NTASKS": str(tasks), "SLURM_PROCID": n, "SLURM_LOCALID": n}})
    for n in map(str, range(tasks))
]
sys.exit(max(process.wait() for process in started))
"""
SCONTROL = '#!/bin/sh\ntest "$*" = "show hostnames here,there" && echo localhost && echo there\n'


def free_port(first: int, count: int) -> int:
    """A port between these that nobody listens on."""
    for port in range(first, first + count):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")


def nobody() -> list[str]:
    """A command that runs another as a user without a name who can read everything here and write nothing of it.

    Empty where this process may not change its user: then only the home is none.
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        return []
    readable = "+dac_read_search"
    ids = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    command = [setpriv, *ids, f"--inh-caps={readable}", f"--ambient-caps={readable}"]
    may = subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0
    return command if may else []  # root of a container may lack the capability to give


def sbatch(script: str, arguments: list[str], tmp_path: Path, **variables: str) -> Ended:
    """Run a job script as SLURM would, as nobody, who has no home unless ``variables`` name one."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}",  # nothing of a SLURM that this machine may have
        "SLURM_JOB_ID": str(free_port(20000 + os.getpid() % 8000, 2000) - 20000),
        "SLURM_JOB_NODELIST": "here,there",
        "SLURM_CPUS_PER_TASK": "1",
        **variables,
    }
    return run([*nobody(), "/bin/bash", str(RECIPES / script), *arguments], tmp_path / "log", env=job)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_job_script_parses(script: Path) -> None:
    """bash reads it, and sbatch finds its options where it looks: before the first command."""
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    head, _, body = script.read_text().partition("set -euo pipefail")
    options = [line for line in head.splitlines() if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in options) and len(options) >= 4
    assert body and "\n#SBATCH" not in body


def test_srun_alone_starts_ranks(tmp_path: Path) -> None:
    program = str(RECIPES / "step.py")
    ended = sbatch("slurm.sbatch", [program, "--transport", "torch_dist"], tmp_path, TASKS="2")
    assert ended.code == 0, ended.output
    assert set(re.findall(r"right: torch_dist EXPERT_MAJOR (rank \d of \d)", ended.output)) == {
        "rank 0 of 2",
        "rank 1 of 2",
    }


def test_srun_with_torchrun_writes_text(tmp_path: Path) -> None:
    texts = ["And the priest shall", "And Pharaoh", "In the beginning"]
    arguments = [str(RECIPES / "generate.py"), str(MODEL), *texts, "--max-new-tokens", "4"]
    job = {"TASKS": "1", "SLURM_JOB_NUM_NODES": "1", "RANKS_PER_NODE": "2", "HOME": "/nonexistent"}
    ended = sbatch("slurm-torchrun.sbatch", arguments, tmp_path, **job)
    assert ended.code == 0, ended.output
    written = re.findall(r"text (\d) by rank (\d): '(.*)", ended.output)
    assert sorted((int(number), int(rank)) for number, rank, _ in written) == [(0, 0), (1, 1), (2, 0)]
    assert all(text.startswith(texts[int(number)]) for number, _, text in written)


def test_torchrun_command_of_the_page(tmp_path: Path) -> None:
    (line,) = re.findall(r"^torchrun --standalone --nproc-per-node 2 \S+/step.py$", PAGE, re.M)
    program, *arguments = shlex.split(line)
    ended = run([Path(sys.executable).parent / program, *arguments], tmp_path / "log", env=dict(os.environ))
    assert ended.code == 0, ended.output
    assert set(re.findall(r"right: shm EXPERT_MAJOR rank (\d) of 2", ended.output)) == {"0", "1"}


def test_page_names_every_file() -> None:
    assert {path.name for path in RECIPES.iterdir() if path.is_file()} == set(re.findall(r"\]\(recipes/(.+?)\)", PAGE))


def test_image_has_what_it_copies_and_no_privilege() -> None:
    lines = (RECIPES / "Dockerfile").read_text().splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    for _, *sources, _ in (each for each in words if each[0] == "COPY"):
        assert all(list(ROOT.glob(source)) for source in sources), f"COPY {sources}: nothing of that name"
    assert int([each[1] for each in words if each[0] == "USER"][-1].split(":")[0]) > 0
    assert [each for each in words if each[0] == "ENTRYPOINT"] == [["ENTRYPOINT", '["moefleet"]']]
    assert words[-1] == ["CMD", '["doctor"]']


def test_image_starts_without_triton_and_compiler(tmp_path: Path) -> None:
    """What the image does unless it is told otherwise: neither comes with a CPU build of torch on a slim base."""
    code = "import sys; sys.modules['triton'] = None; from moefleet.cli import app; app(['doctor'])"
    job = {"PATH": str(tmp_path), "HOME": "/nonexistent", "COLUMNS": "200"}
    ended = run([*nobody(), sys.executable, "-c", code], tmp_path / "log", env=job)
    assert ended.code == 0, ended.output
    assert "no C compiler" in ended.output and re.search(r"shm +yes", ended.output), ended.output
