"""Segments that no file system ever sees, mapped side by side; and what is said when memory runs out."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moefleet import MoEEpConfigError
from moefleet.substrate import memory
from moefleet.substrate.memory import AddressRange, available_bytes, create_segment

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def fds() -> Iterator[list[int]]:
    fds = [create_segment(SIZE, on_this_host=3) for _ in range(3)]
    yield fds
    for fd in fds:
        os.close(fd)


def mappings() -> list[str]:
    """Permissions of all segments of ours in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split()[1] for line in lines if "memfd:moefleet" in line)


def test_a_segment_lives_in_no_file_system(fds: list[int]) -> None:
    for fd in fds:
        assert os.readlink(f"/proc/self/fd/{fd}") == "/memfd:moefleet (deleted)"
        assert os.get_inheritable(fd) is False
        assert os.fstat(fd).st_size == SIZE


def test_all_pages_are_taken_at_once(fds: list[int]) -> None:
    assert all(os.fstat(fd).st_blocks * 512 >= SIZE for fd in fds)


def test_too_little_memory_is_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * SIZE - 1)
    with pytest.raises(MoEEpConfigError) as caught:
        create_segment(SIZE, on_this_host=3)
    assert f"shared memory: got {3 * SIZE} bytes needed (3 ranks x {SIZE})" in str(caught.value)
    assert f"allowed {3 * SIZE - 1} bytes available" in str(caught.value)
    assert "lower max_tokens_per_rank" in str(caught.value)
    os.close(create_segment(SIZE, on_this_host=2))


def test_memory_that_runs_out_while_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MoEEpConfigError, match=f"got {SIZE} bytes needed, allowed .* bytes available; .*No space left"):
        create_segment(SIZE, on_this_host=1)
    assert len(os.listdir("/proc/self/fd")) <= before


def control_group(folder: Path, most: str, used: int, **stat: int) -> tuple[str, str, str, tuple[str, ...]]:
    (folder / "max").write_text(f"{most}\n")
    (folder / "current").write_text(f"{used}\n")
    (folder / "stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    return *(str(folder / name) for name in ("max", "current", "stat")), ("active_file", "inactive_file")  # type: ignore[return-value]


def test_a_control_group_may_have_less_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", [control_group(tmp_path, "5000", 3000)])
    assert available_bytes() == 2000


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = control_group(tmp_path, "5000", 4900, anon=1000, shmem=500, active_file=1400, inactive_file=2000)
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", [group])
    assert available_bytes() == 3500


@pytest.mark.parametrize("most", ["max", None])
def test_a_control_group_without_limit_or_file_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str | None
) -> None:
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", [])
    before = available_bytes()
    assert before > 1 << 20
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", [control_group(tmp_path, most or "5000", 3000)])
    if most is None:
        (tmp_path / "stat").unlink()
    assert available_bytes() > 1 << 20


def test_a_rank_can_write_only_its_own_segment(fds: list[int]) -> None:
    before = mappings()
    ranges = AddressRange.map(fds, 1, SIZE, 1)
    assert mappings() == sorted([*before, "r--s", "rw-s", "r--s"])
    del ranges


def test_what_one_writes_all_see_at_the_same_place(fds: list[int]) -> None:
    views = [AddressRange.map(fds, own, SIZE, 1) for own in range(3)]
    for own, view in enumerate(views):
        view.words()[own * view.stride // 8 + 3] = 100 + own
    for view in views:
        assert [view.words()[rank * view.stride // 8 + 3] for rank in range(3)] == [100, 101, 102]


@pytest.mark.parametrize("width", [1, 5, 100, 1021])
def test_rows_of_all_ranks_form_one_table(fds: list[int], width: int) -> None:
    row = 4 * width
    view = AddressRange.map(fds, 0, SIZE, row)
    assert view.stride % row == 0 and view.stride % mmap.PAGESIZE == 0
    table = view.rows(torch.float32, width)
    assert table.shape == (3 * view.stride // row, width)
    table[2] = 7.0
    other = AddressRange.map(fds, 1, SIZE, row).rows(torch.float32, width)
    assert torch.equal(other[2], table[2])


def test_awkward_alignments_do_not_use_up_the_addresses(fds: list[int]) -> None:
    """Two large primes: the strides of huge pages would reach past what a process can address."""
    align = 4 * 65_537 * 97
    view = AddressRange.map(fds * 40, 0, SIZE, align)
    assert view.stride % align == 0
    assert view.rows(torch.float32, 65_537).shape[1] == 65_537


def test_memory_stays_as_long_as_a_tensor_shows_it(fds: list[int]) -> None:
    before = len(mappings())
    view = AddressRange.map(fds, 0, SIZE, 4)
    table = view.rows(torch.float32, 1)
    table[0] = 3.0
    part = table[:2]
    del view, table
    gc.collect()
    assert len(mappings()) == before + 3
    assert part[0].item() == 3.0
    del part
    gc.collect()
    assert len(mappings()) == before
