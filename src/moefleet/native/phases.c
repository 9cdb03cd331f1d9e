/* The two calls of a healthy step, each from its first movement to its last. Where anything is unusual they stop after
   what they have done, and Python goes on from there: it does the same in single movements. */

#include "moefleet.h"

#include <sched.h>

/* How far a call came. */
enum { ROUTES_COMMITTED, COMMITTED, REFUSED, DONE };

/* Dispatch: bring tokens, and find those that are for this rank.

   placed: whether to place them, see push.c; taking: whom this rank trusts, as bits; everybody: whether that is all;
   expected: how many rows must arrive, or -1. */
int64_t moefleet_dispatch(Fleet *fleet, Inbox *inbox, int64_t step, int64_t round, int64_t count, const char *tokens,
                          int64_t pitch, const char *scales, int64_t scale_pitch, const int32_t *ids,
                          const float *weights, int64_t topk, int64_t dtype, int64_t placed, const uint8_t *taking,
                          int64_t everybody, int64_t expected)
{
    int64_t set = step % SETS;
    moefleet_store(fleet, set, count, placed ? NULL : tokens, pitch, scales, scale_pitch, ids, weights, topk);
    if (placed && fleet->early) {
        uint8_t before[MAX_RANKS / 8] = {0}; /* the ranks on whose routing it depends where ours goes */
        for (int64_t rank = 0; rank < fleet->rank; rank++)
            before[rank >> 3] |= (uint8_t)(taking[rank >> 3] & 1 << (rank & 7));
        moefleet_commit(fleet, ROUTES, step, round, count, placed, topk, dtype, taking, everybody);
        sched_yield(); /* who shares this core has routing that others wait for, before this rank moves its rows */
        if (!moefleet_collect(fleet, ROUTES, step, before))
            return ROUTES_COMMITTED;
    }
    if (placed)
        moefleet_push(fleet, set, fleet->said_tokens, taking, count, tokens, pitch, ids, weights, topk);
    moefleet_commit(fleet, DISPATCH, step, round, count, placed, topk, dtype, taking, everybody);
    if (!moefleet_collect(fleet, DISPATCH, step, taking))
        return COMMITTED;
    if (inbox->rows != segment(fleet, fleet->rank) + fleet->landing[set])
        for (int64_t rank = 0; rank < fleet->world; rank++)
            if (fleet->said_placed[rank])
                return COMMITTED; /* in memory that this rank does not receive into */
    int64_t rows = moefleet_arrive(fleet, inbox, set, fleet->said_tokens, fleet->said_placed, topk);
    if ((fleet->layout == FLAT && rows > fleet->home_rows) || (expected >= 0 && rows != expected))
        return REFUSED;
    moefleet_gather(fleet, inbox, set);
    return DONE;
}

/* Combine: give the experts' rows back, and sum what comes home to `to` [T, H]. *unserved: as moefleet_sum says. */
int64_t moefleet_combine(Fleet *fleet, const Inbox *inbox, int64_t step, int64_t round, int64_t type, const char *rows,
                         int64_t pitch, int64_t dtype, const int32_t *ids, int64_t count, int64_t topk,
                         const uint8_t *mask, int64_t everybody, const uint8_t *taking, char *to, int64_t *unserved)
{
    int64_t set = step % SETS;
    moefleet_combining(fleet, step);
    int64_t placed = moefleet_give(fleet, inbox, set, type, rows, pitch);
    moefleet_commit(fleet, COMBINE, step, round, inbox->total, placed, 0, dtype, mask, everybody);
    if (!moefleet_collect(fleet, COMBINE, step, taking))
        return COMMITTED;
    *unserved = moefleet_sum(fleet, set, type, ids, count, topk, taking, fleet->said_placed, to);
    return DONE;
}
