"""Control block and headers: what is written comes back, and nothing hostile does harm."""

from __future__ import annotations

import struct

import pytest

from moefleet.substrate.control import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_RANKS,
    REASON_BYTES,
    SETS,
    TOKENS_AT,
    WORDS_PER_LINE,
    Header,
    Operation,
    Word,
    flag_word,
)

FULL = Header(3, 2, 2**40 + 1, Operation.COMBINE, 17, 8, 50, False, 0, "", (1 << MAX_RANKS) - 1)


def written(header: Header, offset: int = 1024) -> memoryview:
    memory = memoryview(bytearray(b"\xaa" * 4096))
    header.write(memory, offset)
    return memory


@pytest.mark.parametrize(
    "header",
    [
        FULL,
        FULL._replace(mask=1 << (MAX_RANKS - 1)),
        FULL._replace(mask=0b1011, tokens=0),
        Header(0, 0, 1, Operation.DISPATCH),
        Header(0, 7, 9, Operation.DISPATCH, 0, 0, 0, True, 200, "grüße: id 99 is out of range", 5),
    ],
)
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    memory = written(header)
    assert Header.read(memory, 1024) == header
    untouched = bytes(memory[:1024]) + bytes(memory[1024 + HEADER_BYTES :])
    assert untouched == b"\xaa" * len(untouched)


@pytest.mark.parametrize("reason", ["x" * REASON_BYTES, "x" * 10_000, "ü" * REASON_BYTES, "x" + "€" * REASON_BYTES])
def test_a_long_reason_is_cut(reason: str) -> None:
    memory = written(FULL._replace(failed=True, reason=reason))
    got = Header.read(memory, 1024).reason
    assert reason.startswith(got.rstrip("\ufffd"))
    assert REASON_BYTES - 3 <= len(got.rstrip("\ufffd").encode()) <= REASON_BYTES
    assert bytes(memory[1024 + HEADER_BYTES :]) == b"\xaa" * (4096 - 1024 - HEADER_BYTES)


def test_ranks_in_the_same_call_differ_only_in_their_tokens() -> None:
    one, other = (bytes(written(FULL._replace(tokens=count))[1024 : 1024 + TOKENS_AT]) for count in (0, 17))
    assert one == other
    assert struct.unpack_from("<q", written(FULL), 1024 + TOKENS_AT) == (17,)
    for change in (
        {"generation": 9},
        {"round": 9},
        {"step": 9},
        {"operation": Operation.DISPATCH},
        {"topk": 9},
        {"dtype": 9},
        {"mask": 9},
        {"failed": True},
    ):
        assert bytes(written(FULL._replace(**change))[1024 : 1024 + TOKENS_AT]) != one, change


def test_a_hostile_header_is_read_as_numbers_and_text() -> None:
    for length in (-1, -(2**62), 2**62, REASON_BYTES + 1):
        memory = written(FULL._replace(failed=True, reason="no"))
        struct.pack_into("<q", memory, 1024 + 8 * 8, length)
        assert len(Header.read(memory, 1024).reason) <= REASON_BYTES
    memory = memoryview(bytearray(b"\xff" * 4096))
    header = Header.read(memory, 0)
    assert header.operation in Operation and header.failed and header.step == -1
    assert set(header.reason) <= {"\ufffd"} or header.reason == ""


def test_every_flag_has_a_cache_line_of_its_own_inside_the_block() -> None:
    phases = (Operation.DISPATCH, Operation.COMBINE, Operation.CLOSED)
    flags = [flag_word(phase, step) for phase in phases for step in range(1, SETS + 1)]
    assert len(set(flags)) == len(phases) * SETS
    assert all(flag % WORDS_PER_LINE == 0 for flag in flags)
    assert max(flags) * 8 + 64 <= BLOCK_BYTES
    assert Word.COMBINING == Word.FAILED + SETS, "FAILED has a word for each set"
    assert max(Word) < min(flags)
    for phase in phases:
        assert flag_word(phase, 5) == flag_word(phase, 5 + SETS) != flag_word(phase, 6)
