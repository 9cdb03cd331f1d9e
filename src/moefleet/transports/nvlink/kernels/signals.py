"""How programs of different GPUs signal: release, bounded wait, the clock, and the error word.

A program stores everything, then releases one flag; a waiter acquires the flag, then loads. Both sides include the
block barrier that makes one thread's release speak for its whole program. Under Triton's interpreter, where programs
run one after the other, a flag that is not there yet never comes, and a wait says so at once.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ..geometry import CONTROL, ROUND_SHIFT
from ..geometry import FOREVER as _FOREVER

INTERPRETED: bool = triton.knobs.runtime.interpret

_ERROR = tl.constexpr(CONTROL.error)
_BUDGET = tl.constexpr(CONTROL.budget_ns)
_SOUND = tl.constexpr(CONTROL.sound)
_OWED = tl.constexpr(CONTROL.owed)
_LOST = tl.constexpr(CONTROL.lost)
_STEP_BITS = tl.constexpr((1 << ROUND_SHIFT) - 1)

TIMEOUT_DISPATCH = tl.constexpr(1)  # one more for combine
PEER_FAILED = tl.constexpr(3)
MISMATCH = tl.constexpr(4)
OVERFLOW = tl.constexpr(5)
PEER_GONE = tl.constexpr(6)
CROSSED = tl.constexpr(7)
PEER_ENDED = tl.constexpr(8)
UNEXPECTED = tl.constexpr(16)

FOREVER = tl.constexpr(_FOREVER)

if INTERPRETED:

    @triton.jit
    def enter(early: tl.constexpr):
        """What every kernel begins with: wait for the work before it; ``early``: let the next one start to wait."""

    @triton.jit
    def release(flag, value):
        """Store ``value`` (int64) to ``flag`` after everything that this program stored before."""
        tl.store(flag, value)

    @triton.jit
    def poll(flag, value, budget_ns):
        """Wait until ``flag`` holds at least ``value``. Returns 1 if the budget ran out, on all threads alike."""
        return (tl.load(flag) < value).to(tl.int32)

    @triton.jit
    def now_ns():
        """A clock in nanoseconds."""
        return tl.cast(0, tl.int64)

else:

    @triton.jit
    def enter(early: tl.constexpr):
        """What every kernel begins with: wait for the work before it; ``early``: let the next one start to wait."""
        if early:
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def release(flag, value):
        """Store ``value`` (int64) to ``flag`` after everything that this program stored before."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l",
            [flag, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def poll(flag, value, budget_ns):
        """Wait until ``flag`` holds at least ``value``. Returns 1 if the budget ran out, on all threads alike."""
        return tl.inline_asm_elementwise(
            """{
            .reg .pred there, more, late;
            .reg .b64 seen, start, now;
            mov.u64 start, %globaltimer;
            again:
            ld.acquire.sys.global.b64 seen, [$1];
            setp.ge.s64 there, seen, $2;
            @there bra ready;
            mov.u64 now, %globaltimer;
            sub.u64 now, now, start;
            setp.lt.s64 more, now, $3;
            @more bra again;
            ready:
            not.pred more, there;
            barrier.cta.red.or.pred late, 0, more;
            selp.b32 $0, 1, 0, late;
            }""",
            "=r,l,l,l",
            [flag, value, budget_ns],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def now_ns():
        """A clock in nanoseconds."""
        return globaltimer()


@triton.jit
def report(ctl, alarm, code, rank, number):
    """Keep the first error of a Fleet: on the device, and in ``alarm``, which the host reads without a wait."""
    word = code + (rank << 8) + ((tl.cast(number, tl.int64) & _STEP_BITS) << 24)
    if tl.atomic_cas(ctl + _ERROR, tl.cast(0, tl.int64), tl.cast(word, tl.int64)) == 0:
        tl.store(alarm, word)


@triton.jit
def unlike(step, topk, code):
    """What a MISMATCH says beside the rank: its K (0: not its fault), its row type, and the step."""
    return (tl.cast(step, tl.int64) << 16) + (code.to(tl.int64) << 8) + topk


@triton.jit
def spoil(ctl, step, phase: tl.constexpr):
    """A wait of this phase has failed: in later ones this rank sends nothing, and waits for nobody."""
    tl.atomic_min(ctl + _SOUND, 2 * tl.cast(step, tl.int64) + phase)
    tl.atomic_xchg(ctl + _BUDGET, tl.cast(0, tl.int64))
    if phase == 0:
        tl.atomic_max(ctl + _LOST + step % 2, tl.cast(step, tl.int64))


@triton.jit
def spoilt(sound, step, phase):
    """Whether this rank sends nothing in this phase; ``sound`` is the last one in which it does."""
    return 2 * step + phase > sound


@triton.jit
def standing(ctl):
    """The last phase in which this rank sends, for ``spoilt``, and for each buffer set the step that peers have to be
    through with before it sends into it again, 0 for none."""
    return tl.load(ctl + _SOUND), tl.load(ctl + _OWED), tl.load(ctl + _OWED + 1)


@triton.jit
def owe(ctl, step, owed):
    """Whether (``owed``) this rank has ended a step without having waited for its peers."""
    tl.store(ctl + _OWED + step % 2, tl.where(owed, tl.cast(step, tl.int64), 0))


@triton.jit
def has_gone(gone, step):
    """Whether a rank ended before this step; ``gone`` is the first step that it does not take part in, 0 for none."""
    first = tl.load(gone)
    return (first != 0) & (step >= first)


@triton.jit
def words(base, offset):
    """int32 pointer to byte ``offset`` of a shared block at address ``base``."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def flags(base, offset):
    """int64 pointer to byte ``offset`` of a shared block at address ``base``."""
    return (base + offset).to(tl.pointer_type(tl.int64))


@triton.jit
def reals(base, offset):
    """float32 pointer to byte ``offset`` of a shared block at address ``base``."""
    return tl.multiple_of((base + offset).to(tl.pointer_type(tl.float32)), 16)
