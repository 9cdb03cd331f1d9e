/* Committing a phase of a step, and finding that all ranks have: what a healthy step needs of waiting, and no more. What
   to do about a rank that is late, gone or of another mind is decided in Python. */

#define _GNU_SOURCE
#include "moefleet.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

/* substrate/control.py has the same, and says what it means. */
enum { WAITING_ON = 7 };
typedef struct {
    int64_t generation, round, step, operation, topk, dtype, failed, origin, length;
    uint8_t mask[MAX_RANKS / 8];
    int64_t tokens; /* all before it is equal on ranks that are in the same call, and agree */
} Header;

static _Atomic uint64_t *word(const Fleet *fleet, int64_t rank, int64_t index)
{
    return (_Atomic uint64_t *)(void *)(fleet->base + rank * fleet->stride) + index;
}

static Header *header(const Fleet *fleet, int64_t rank, int64_t at)
{
    return (Header *)(void *)(fleet->base + rank * fleet->stride + at);
}

/* Write this rank's header at byte `at` of its segment, and let the peers see all that it wrote for the phase.

   mask: whom it trusts, as bits; everybody: whether that is all. Returns whether there are sleepers to be woken: who
   comes last wakes those that need not sleep any more. */
int64_t moefleet_commit(const Fleet *fleet, int64_t flag, int64_t at, int64_t generation, int64_t round, int64_t step,
                        int64_t operation, int64_t tokens, int64_t topk, int64_t dtype, const uint8_t *mask,
                        int64_t everybody)
{
    Header *mine = header(fleet, fleet->rank, at);
    *mine = (Header){generation, round, step, operation, topk, dtype, 0, 0, 0, {0}, tokens};
    memcpy(mine->mask, mask, sizeof mine->mask);
    atomic_store_explicit(word(fleet, fleet->rank, flag), (uint64_t)step, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst); /* store, then look: of the last two at least one sees that all came */
    if (everybody)
        for (int64_t rank = 0; rank < fleet->world; rank++)
            if (atomic_load_explicit(word(fleet, rank, flag), memory_order_relaxed) < (uint64_t)step)
                return 0;
    for (int64_t rank = 0; rank < fleet->world; rank++)
        if (atomic_load_explicit(word(fleet, rank, WAITING_ON), memory_order_relaxed))
            return 1;
    return 0;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Look for the commits of all ranks in `taking` (bits) again and again, for `spin_s` at most, yielding the core.

   failed: the word that says whether a rank gave the step up; at: where its header is; waited: [W] seconds waited for
   each are added; tokens: [W] receives each one's, 0 for who is not in `taking`.

   Returns 1 if all came, none gave up, and all are in the same call and of the same mind; else 0. */
int64_t moefleet_collect(const Fleet *fleet, int64_t flag, int64_t failed, int64_t at, int64_t step, int64_t operation,
                         const uint8_t *taking, double spin_s, double *waited, int64_t *tokens)
{
    int64_t missing[MAX_RANKS], count = 0;
    double start = 0, before = 0;
    for (int64_t rank = 0; rank < fleet->world; rank++)
        if (rank != fleet->rank && taking[rank >> 3] >> (rank & 7) & 1)
            missing[count++] = rank;
    for (;;) {
        int64_t still = 0;
        double seen = start ? now() : 0;
        for (int64_t i = 0; i < count; i++) {
            waited[missing[i]] += seen - before;
            if (atomic_load_explicit(word(fleet, missing[i], flag), memory_order_acquire) < (uint64_t)step)
                missing[still++] = missing[i];
        }
        count = still;
        if (!count)
            break;
        if (!start)
            start = seen = now();
        if (seen - start >= spin_s)
            return 0;
        before = seen;
        sched_yield();
    }
    const Header *mine = header(fleet, fleet->rank, at);
    for (int64_t rank = 0; rank < fleet->world; rank++) {
        tokens[rank] = 0;
        if (rank != fleet->rank && !(taking[rank >> 3] >> (rank & 7) & 1))
            continue;
        uint64_t given_up = atomic_load_explicit(word(fleet, rank, failed), memory_order_relaxed);
        if (rank != fleet->rank && (uint64_t)(4 * step) < given_up && given_up <= (uint64_t)(4 * step + operation))
            return 0;
        const Header *theirs = header(fleet, rank, at);
        if (memcmp(theirs, mine, offsetof(Header, tokens)))
            return 0;
        tokens[rank] = theirs->tokens;
    }
    return 1;
}
