"""Where everything lies: one formula for all memory of the transport, equal on all ranks.

Three kinds of memory:

- *shared*: symmetric, two sets, written by peers. Every peer has regions of its own in it and writes nowhere else.
- *outputs*: what experts read, two sets.
- *slots*: one handle's routing, written by ``update``, and what its dispatch leaves for its combine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...config import EpLayout, FleetParams
from ...knobs import FleetAlgoKnob, RowFormat
from ...placement import Placement
from ...substrate.control import HEADER_BYTES, SETS

HEAD_WORDS = 8
"""int32 words of a dispatch header before the counts per expert: rows, K, row code, and the low half of the step; with
fault tolerance 0 instead, or 1 if the sender failed, then round, low half of the step, and the ranks that the sender
counts, as bits."""

NOTE_WORDS, NOTE_STEP = HEADER_BYTES // 8, 2
"""int64 words of a note that says why a rank gave a step up (``substrate.control.Header``), and which is the step."""

NOTES = 2
"""Notes of each rank in a set: peers may be through with the step before last and not have read why it was given up."""

LINE = 16
"""int64 words between two control words, so that each has cache lines of its own."""

SLOTS = 8
"""Handle slots allocated at construction; more come as more handles live at once."""


class Places(NamedTuple):
    """Byte offsets in one set of the shared memory, ``S`` being the source rank's region.

    ``head_flag``, ``comb_flag``, ``done_flag``, ``read_flag``, ``gone`` int64 ``[W]``; ``round_of``, ``waiting``,
    ``awaits`` and ``compiling`` int64 ``[W]``, of the first set only: the round that the source is in, whether it waits
    for somebody else than us, in which phase it waits for us, and whether it compiles a kernel; ``comb_status`` int32
    ``[W]``; ``head`` int32 ``[W, head_words]``;
    ``note`` int64 ``[NOTES, W, NOTE_WORDS]``, why the source gave up the last steps of this set that it did;
    ``row_flag``, ``back_flag`` int64 ``[W, M]``; ``local``, ``rank`` int32 and ``weight`` float32 ``[W, M, K]``;
    ``scales`` ``[W, M]`` of their bytes; ``rows``, ``back`` ``[W, M, H]``. In HIGH_THROUGHPUT the last two are the
    same memory. ``region`` is how many of dispatch's rows fit into a source's part of ``rows``: ``M``, or more where
    combine's wider rows come into the same memory.
    """

    set_bytes: int
    head_words: int
    entries: int
    region: int
    head_flag: int
    comb_flag: int
    done_flag: int
    read_flag: int
    gone: int
    round_of: int
    waiting: int
    awaits: int
    compiling: int
    comb_status: int
    head: int
    note: int
    row_flag: int
    back_flag: int
    local: int
    rank: int
    weight: int
    scales: int
    rows: int
    back: int


class SlotPlaces(NamedTuple):
    """int32 offsets in a handle's slot.

    ``step`` one int64; ``counts`` ``[W]`` rows for each rank; ``per_expert`` ``[P]`` rows for each physical slot;
    ``token_of`` ``[W, M]`` the token of each row; ``row_of`` ``[M, W]`` the row of each token, -1 for none; ``phys``,
    ``weight`` (float32), ``rank`` ``[M, K]``: physical slot or -1, its weight, and its place among the rows that this
    rank brings to the expert (EXPERT_MAJOR; -1 where the token named the expert before).
    """

    words: int
    step: int
    counts: int
    per_expert: int
    token_of: int
    row_of: int
    phys: int
    weight: int
    rank: int
    got: int
    start: int
    place: int
    share: int


FOREVER = 1 << 62
"""More than any number of a step: what a rank that ends leaves in its flags, so that nobody waits for it any more."""

MOST_JUDGED = 32
"""Ranks of a Fleet with fault tolerance, at most: sets of ranks are half a word there."""

ROUND_SHIFT = 40
"""Bits of a step's number. With fault tolerance the round of agreement, in which a step runs, stands above them."""


class Control(NamedTuple):
    """int64 offsets in a rank's control words, on its own device. ``budget_ns`` is how long a wait lasts, ``sound``
    the last phase (``2 * step``, and one more for combine) in which this rank sends anything but "failed", FOREVER
    while no wait has failed, ``owed`` ``[2]`` a step of each set that this rank ended without having waited for its
    peers, or 0, and ``lost`` ``[2]`` the last step of each set whose dispatch did not get all it waited for. ``done``
    and ``read`` count programs that have read what came; ``came_back`` ``[2]`` is the last step of each set in which
    this rank wrote into the peers' ``back``. Those from ``base`` on are for fault tolerance:

    ``base`` the round, at its place in a step's number; ``board`` address of the :class:`Board`; ``verdict`` ``[2]``
    the last step that was judged and who counted, for each phase; ``stuck`` ``[2, 2]`` how many programs wait for a
    verdict, for each phase and buffer set; ``left`` ``[MOST_JUDGED]`` the last phase in which each rank counts.
    """

    launches: int = 0 * LINE
    budget_ns: int = 1 * LINE
    sound: int = 1 * LINE + 1
    owed: int = 1 * LINE + 2
    lost: int = 1 * LINE + 4
    error: int = 2 * LINE
    bad_ids: int = 3 * LINE
    done: int = 4 * LINE
    read: int = 5 * LINE
    came_back: int = 6 * LINE
    base: int = 7 * LINE
    board: int = 7 * LINE + 1
    verdict: int = 8 * LINE
    stuck: int = 9 * LINE
    left: int = 10 * LINE
    words: int = 10 * LINE + MOST_JUDGED


CONTROL = Control()


class Board(NamedTuple):
    """int64 offsets of what a rank's host and its kernels tell each other about peers, in pinned host memory.

    By the host: ``dead`` ``[MOST_JUDGED]`` 1 for a process that has ended, and what ``announce`` tells the peers:
    ``round`` and ``compiling``. By the kernels: ``accused`` ``[MOST_JUDGED]`` the phase in which they gave up on a
    rank, and ``behind`` 1 if others know more than this rank.
    """

    dead: int = 0
    round: int = MOST_JUDGED
    compiling: int = MOST_JUDGED + 1
    accused: int = MOST_JUDGED + 2
    behind: int = 2 * MOST_JUDGED + 2
    words: int = 2 * MOST_JUDGED + 3


BOARD = Board()


class Counts(NamedTuple):
    """int64 offsets of what is counted, behind the control words: ``got``, ``sent`` rows and ``waited`` nanoseconds of
    each rank ``[W]``, ``tokens`` (one word), and rows of each local expert."""

    got: int
    sent: int
    waited: int
    tokens: int
    experts: int
    end: int

    @classmethod
    def of(cls, world_size: int, num_local: int) -> Counts:
        got, sent, waited, tokens = (CONTROL.words + n * world_size for n in range(4))
        return cls(got, sent, waited, tokens, tokens + 1, tokens + 1 + num_local)


@dataclass(frozen=True)
class Geometry:
    """All sizes of one rank's part of a Fleet.

    Attributes:
        params, placement, rank, rows: what it follows from.
        shared, slot: offsets.
        output_rows: rows of one output set.
    """

    params: FleetParams
    placement: Placement
    rank: int
    rows: RowFormat
    shared: Places
    slot: SlotPlaces
    output_rows: int

    @classmethod
    def of(
        cls, params: FleetParams, placement: Placement, rank: int, algo_knobs: Sequence[FleetAlgoKnob] = ()
    ) -> Geometry:
        """The formula. Shared memory depends on ``rank`` in nothing."""
        form = RowFormat.of(params, algo_knobs)
        world, most, topk = placement.world_size, params.max_tokens_per_rank, params.max_topk
        expert_major = params.layout is EpLayout.EXPERT_MAJOR
        most_local = max(placement.slots_per_rank)
        head_words = HEAD_WORDS + (-(-most_local // 8) * 8 if expert_major else 0)
        take = _packer(128)
        flags = [take(8 * world) for _ in range(9)]
        status, head = take(4 * world), take(4 * world * head_words)
        note = take(8 * NOTES * world * NOTE_WORDS)
        row_flag, back_flag = take(8 * world * most), take(8 * world * most)
        slots_bytes = 4 * world * most * topk
        local, rank_at, weight = take(slots_bytes), take(slots_bytes if expert_major else 0), take(slots_bytes)
        scales = take(world * most * form.scale_bytes)
        flat, elements = params.layout is EpLayout.FLAT, world * most * form.hidden
        region = most * (max(form.there_bytes, form.back_bytes) if flat else form.there_bytes) // form.there_bytes
        rows = take(region * world * form.hidden * form.there_bytes)
        back = rows if flat else take(elements * form.back_bytes)
        shared = Places(
            set_bytes=take(0),
            head_words=head_words,
            entries=most * topk,
            region=region,
            head_flag=flags[0],
            comb_flag=flags[1],
            done_flag=flags[2],
            read_flag=flags[3],
            gone=flags[4],
            round_of=flags[5],
            waiting=flags[6],
            awaits=flags[7],
            compiling=flags[8],
            comb_status=status,
            head=head,
            note=note,
            row_flag=row_flag,
            back_flag=back_flag,
            local=local,
            rank=rank_at,
            weight=weight,
            scales=scales,
            rows=rows,
            back=back,
        )

        take = _packer(32)
        slots = sum(placement.slots_per_rank)
        kept = world * most * topk if expert_major else 0
        slot_at = [
            take(n) for n in (2, world, slots, world * most, most * world, *[most * topk] * 3, world, world, kept, kept)
        ]
        slot = SlotPlaces(take(0), *slot_at)
        shape = params.received_shape(world, placement.num_local(rank))
        output_rows = 1
        for size in shape:
            output_rows *= size
        return cls(params, placement, rank, form, shared, slot, output_rows)

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def counts(self) -> Counts:
        """Where the kernels count, behind the control words."""
        return Counts.of(self.world_size, self.placement.num_local(self.rank))

    @property
    def shared_bytes(self) -> int:
        """Symmetric memory of this rank."""
        return SETS * self.shared.set_bytes

    @property
    def output_bytes(self) -> int:
        """Rows, their scales and routing that experts read, both sets."""
        routing = 0 if self.params.layout is EpLayout.EXPERT_MAJOR else 12 * self.params.max_topk
        return SETS * self.output_rows * (self.rows.sent_bytes + routing)

    @property
    def private_bytes(self) -> int:
        """The slots of handles, one of them the Fleet's own, and the control words."""
        return 4 * (SLOTS + 1) * self.slot.words + 8 * self.counts.end

    @property
    def total_bytes(self) -> int:
        """GPU memory of this rank, all of it taken at construction."""
        return self.shared_bytes + self.output_bytes + self.private_bytes


def memory_bytes(
    params: FleetParams, world_size: int, rank: int = 0, algo_knobs: Sequence[FleetAlgoKnob] = ()
) -> dict[str, int]:
    """GPU bytes that a Fleet of these parameters and knobs takes on ``rank``: ``shared``, ``output``, ``private``,
    ``total``. Scales are part of the first two."""
    geometry = Geometry.of(params, Placement.contiguous(params.num_experts, world_size), rank, algo_knobs)
    return {
        "shared": geometry.shared_bytes,
        "output": geometry.output_bytes,
        "private": geometry.private_bytes,
        "total": geometry.total_bytes,
    }


def _packer(unit: int) -> Callable[[int], int]:
    """A function that takes the next ``size`` units of a block and returns where they begin, aligned to ``unit``."""
    at = 0

    def take(size: int) -> int:
        nonlocal at
        start = at
        at += -(-size // unit) * unit
        return start

    return take
