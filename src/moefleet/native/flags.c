/* Committing a phase of a step, and finding that all ranks have: what a healthy step needs of waiting, and no more. What
   to do about a rank that is late, gone or of another mind is decided in Python. */

#define _GNU_SOURCE
#include "moefleet.h"

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* substrate/control.py has the same, and says what it means. */
enum { STATE = 4, STEP = 5, OPERATION = 6, WAITING_ON = 7, WAITING_STEP = 8, WAITING_OPERATION = 9 };
enum { FAILED = 10, COMBINING = 12, BEGAN = 13, CORE = 14 };
enum { RUNNING = 1 };
typedef struct {
    int64_t generation, round, step, operation, topk, dtype, failed, origin, length;
    uint8_t mask[MAX_RANKS / 8];
    int64_t tokens; /* all before it is equal on ranks that are in the same call, and agree */
    int64_t placed;
} Header;

enum { FUTEX_WAKE_THEM = 1 }; /* of the kernel */
enum { LONGEST = 8 };         /* times spin_s that commits are looked for, by the clock */

static _Atomic uint64_t *word(const Fleet *fleet, int64_t rank, int64_t index)
{
    return (_Atomic uint64_t *)(void *)segment(fleet, rank) + index;
}

static Header *header(const Fleet *fleet, int64_t rank, int64_t operation, int64_t step)
{
    return (Header *)(void *)(segment(fleet, rank) + fleet->headers[operation][step % SETS]);
}

/* ROUTES is a part of dispatch. */
static int64_t phase_of(int64_t operation)
{
    return operation == ROUTES ? DISPATCH : operation;
}

static uint64_t said(const Fleet *fleet, int64_t rank, int64_t index)
{
    return atomic_load_explicit(word(fleet, rank, index), memory_order_relaxed);
}

static int is_everybody(const Fleet *fleet, const uint8_t *ranks)
{
    for (int64_t rank = 0; rank < fleet->world; rank++)
        if (!has(ranks, rank))
            return 0;
    return 1;
}

static int all_came(const Fleet *fleet, int64_t operation, int64_t step)
{
    for (int64_t rank = 0; rank < fleet->world; rank++)
        if (said(fleet, rank, fleet->flags[operation][step % SETS]) < (uint64_t)step)
            return 0;
    return 1;
}

/* Wake every rank that sleeps on any flag, so that it looks again at everything. */
static void wake_sleepers(const Fleet *fleet)
{
    for (int64_t rank = 0; rank < fleet->world; rank++) {
        uint64_t on = said(fleet, rank, WAITING_ON), operation = said(fleet, rank, WAITING_OPERATION);
        if (!on || on > (uint64_t)fleet->world || !operation || operation >= OPERATIONS)
            continue;
        int64_t flag = fleet->flags[operation][said(fleet, rank, WAITING_STEP) % SETS];
        syscall(SYS_futex, word(fleet, (int64_t)on - 1, flag), FUTEX_WAKE_THEM, INT_MAX, NULL, NULL, 0);
    }
}

static int64_t now_ns(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static double now(clockid_t clock)
{
    return (double)now_ns(clock) * 1e-9;
}

/* Say that this rank runs this step. */
void moefleet_begin(const Fleet *fleet, int64_t step)
{
    atomic_store_explicit(word(fleet, fleet->rank, BEGAN), (uint64_t)now_ns(CLOCK_MONOTONIC), memory_order_relaxed);
    atomic_store_explicit(word(fleet, fleet->rank, STATE), RUNNING, memory_order_relaxed);
    atomic_store_explicit(word(fleet, fleet->rank, STEP), (uint64_t)step, memory_order_relaxed);
    atomic_store_explicit(word(fleet, fleet->rank, OPERATION), DISPATCH, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* a reader that sees data of this step sees its number too */
}

/* Say that this rank is done with the step: its buffers are no longer read. */
void moefleet_close(const Fleet *fleet, int64_t step)
{
    int64_t flag = fleet->flags[CLOSED][step % SETS];
    atomic_store_explicit(word(fleet, fleet->rank, flag), (uint64_t)step, memory_order_release);
}

/* Say that this rank is about to write over the rows that it combined two steps ago. */
void moefleet_combining(const Fleet *fleet, int64_t step)
{
    atomic_store_explicit(word(fleet, fleet->rank, COMBINING), (uint64_t)step, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* a reader that sees rows of this step sees its number too */
}

/* Write this rank's header of a phase, let the peers see all that it wrote for it, and wake whoever waited for that: who
   comes last wakes those that need not sleep any more.

   A rank that committed its routing before has peers that may be reading that header, which is the same: it stays.

   mask: whom it trusts, as bits. */
void moefleet_commit(const Fleet *fleet, int64_t operation, int64_t step, int64_t round, int64_t tokens, int64_t placed,
                     int64_t topk, int64_t dtype, const uint8_t *mask)
{
    int64_t rank = fleet->rank, set = step % SETS, phase = phase_of(operation);
    int parted = operation == DISPATCH && fleet->early && placed;
    int early = operation == DISPATCH && fleet->early && !placed; /* then some may wait for its routing alone */
    Header *mine = header(fleet, rank, phase, step);
    if (!parted)
        *mine = (Header){fleet->generation, round, step, phase, topk, dtype, 0, 0, 0, {0}, tokens, placed};
    if (!parted || memcmp(mine->mask, mask, sizeof mine->mask))
        memcpy(mine->mask, mask, sizeof mine->mask);
    atomic_store_explicit(word(fleet, rank, OPERATION), (uint64_t)phase, memory_order_relaxed);
    atomic_store_explicit(word(fleet, rank, CORE), (uint64_t)sched_getcpu(), memory_order_relaxed);
    atomic_store_explicit(word(fleet, rank, WAITING_ON), 0, memory_order_relaxed);
    if (early)
        atomic_store_explicit(word(fleet, rank, fleet->flags[ROUTES][set]), (uint64_t)step, memory_order_release);
    atomic_store_explicit(word(fleet, rank, fleet->flags[operation][set]), (uint64_t)step, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst); /* store, then look: of the last two at least one sees that all came */
    if (!is_everybody(fleet, mask) || all_came(fleet, operation, step) || (early && all_came(fleet, ROUTES, step)))
        wake_sleepers(fleet);
}

/* Look for the commits of all ranks in `taking` (bits) again and again, for a while, yielding the core. Fills in what
   each said, `tokens` and `placed`: 0 for who is not in `taking`.

   Only this thread's own time counts as waiting for nothing: while it yields to a rank that has work, that is likely
   what it waits for, and to sleep and be woken would cost more.

   Returns 1 if all came, none gave up, and all are in the same call and of the same mind; else 0. */
int64_t moefleet_collect(const Fleet *fleet, int64_t operation, int64_t step, const uint8_t *taking)
{
    int64_t missing[MAX_RANKS], count = 0, phase = phase_of(operation), flag = fleet->flags[operation][step % SETS];
    double start = 0, before = 0, used = 0;
    for (int64_t rank = 0; rank < fleet->world; rank++)
        if (rank != fleet->rank && has(taking, rank))
            missing[count++] = rank;
    for (;;) {
        int64_t still = 0;
        double spent = start ? now(CLOCK_THREAD_CPUTIME_ID) : 0, seen = start ? now(CLOCK_MONOTONIC) : 0;
        for (int64_t i = 0; i < count; i++) {
            fleet->waited[missing[i]] += seen - before;
            if (atomic_load_explicit(word(fleet, missing[i], flag), memory_order_acquire) < (uint64_t)step)
                missing[still++] = missing[i];
        }
        count = still;
        if (!count)
            break;
        if (!start) {
            start = seen = now(CLOCK_MONOTONIC);
            used = spent = now(CLOCK_THREAD_CPUTIME_ID);
        }
        if (spent - used >= fleet->spin_s || seen - start >= LONGEST * fleet->spin_s)
            return 0;
        before = seen;
        sched_yield();
    }
    const Header *mine = header(fleet, fleet->rank, phase, step);
    for (int64_t rank = 0; rank < fleet->world; rank++) {
        fleet->said_tokens[rank] = fleet->said_placed[rank] = 0;
        if (rank != fleet->rank && !has(taking, rank))
            continue;
        uint64_t given_up = said(fleet, rank, FAILED + step % SETS);
        if (rank != fleet->rank && (uint64_t)(4 * step) < given_up && given_up <= (uint64_t)(4 * step + phase))
            return 0;
        const Header *theirs = header(fleet, rank, phase, step);
        if (memcmp(theirs, mine, offsetof(Header, tokens)))
            return 0;
        fleet->said_tokens[rank] = theirs->tokens;
        fleet->said_placed[rank] = theirs->placed;
    }
    return 1;
}

/* Let those in `taking` (bits) go first that share this rank's core, began their last step before it and are not done with
   this one.

   Once all have committed, it is chance which rank of a core runs next, and the others wait until its rows have moved. In
   the order in which they began, the slowest rank of a step takes less long, and all together no longer.

   Returns how many there were. */
int64_t moefleet_give_way(const Fleet *fleet, int64_t step, const uint8_t *taking)
{
    int64_t flag = fleet->flags[CLOSED][step % SETS], before = 0;
    uint64_t core = said(fleet, fleet->rank, CORE), began = said(fleet, fleet->rank, BEGAN);
    for (int64_t rank = 0; fleet->crowded && rank < fleet->world; rank++) {
        if (!has(taking, rank) || said(fleet, rank, CORE) != core || said(fleet, rank, BEGAN) >= began ||
            said(fleet, rank, flag) >= (uint64_t)step)
            continue;
        before++;
        sched_yield();
    }
    return before;
}

/* Choose where experts put the rows of a step whose dispatch all ranks have committed: where they put those of the step
   that chose last, once nobody reads these any more, since caches may still hold that memory. Else in the other place,
   whose last step is at least two older than the newer of the two; all ranks have committed the dispatch of both, so all
   have closed that one.

   Where others may go on without this rank, it goes by steps alone: a rank that they left behind can still be reading. */
void moefleet_choose_made(Fleet *fleet, int64_t step)
{
    int64_t before = fleet->making_step, again = fleet->making[before % SETS];
    if (fleet->tolerant)
        fleet->making[step % SETS] = step % SETS;
    else
        fleet->making[step % SETS] = all_came(fleet, CLOSED, before) ? again : 1 - again;
    fleet->making_step = step;
    atomic_thread_fence(memory_order_acquire); /* what is written there now comes after what was read */
}
