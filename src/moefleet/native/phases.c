/* The two calls of a healthy step, each from its first movement to its last. Where anything is unusual they stop after
   what they have done, and Python goes on from there: it does the same in single movements. */

#include "moefleet.h"

#include <sched.h>
#include <string.h>

/* How far a call came. */
enum { ROUTES_COMMITTED, COMMITTED, REFUSED, DONE };

/* Dispatch: bring tokens, and find those that are for this rank. packed: a Call.

   Returns how far it came; where that is to the end, plus how many rows arrived. */
int64_t moefleet_dispatch(const char *packed)
{
    Call call;
    memcpy(&call, packed, sizeof call); /* nothing says that it is aligned */
    Fleet *fleet = call.fleet;
    const Part *part = call.part;
    const char *tokens = call.rows;
    const uint8_t *taking = call.mask;
    int64_t step = call.step, round = call.round, set = step % SETS;
    int64_t count = part->count, topk = part->topk, dtype = part->dtype, placed = part->placed;
    Inbox *inbox = part->inbox;
    moefleet_begin(fleet, step);
    moefleet_store(fleet, set, count, placed ? NULL : tokens, part->pitch, part->scales, part->scale_pitch, part->ids,
                   part->weights, topk);
    if (placed && fleet->early) {
        uint8_t before[MAX_RANKS / 8] = {0}; /* the ranks on whose routing it depends where ours goes */
        for (int64_t rank = 0; rank < fleet->rank; rank++)
            before[rank >> 3] |= (uint8_t)(taking[rank >> 3] & 1 << (rank & 7));
        moefleet_commit(fleet, ROUTES, step, round, count, placed, topk, dtype, taking);
        sched_yield(); /* who shares this core has routing that others wait for, before this rank moves its rows */
        if (!moefleet_collect(fleet, ROUTES, step, before))
            return ROUTES_COMMITTED;
    }
    if (placed)
        moefleet_push(fleet, set, fleet->said_tokens, taking, count, tokens, part->pitch, part->ids, part->weights, topk);
    moefleet_commit(fleet, DISPATCH, step, round, count, placed, topk, dtype, taking);
    if (!moefleet_collect(fleet, DISPATCH, step, taking))
        return COMMITTED;
    if (inbox->rows != segment(fleet, fleet->rank) + fleet->landing[set])
        for (int64_t rank = 0; rank < fleet->world; rank++)
            if (fleet->said_placed[rank])
                return COMMITTED; /* in memory that this rank does not receive into */
    int64_t rows = moefleet_arrive(fleet, inbox, set, fleet->said_tokens, fleet->said_placed, topk);
    if ((fleet->layout == FLAT && rows > fleet->home_rows) || (part->expected >= 0 && rows != part->expected))
        return REFUSED;
    moefleet_gather(fleet, inbox, step);
    return DONE + rows;
}

/* Combine: give the experts' rows back, and sum what comes home. packed: a Call.

   Returns how far it came; where that is to the end, plus what moefleet_sum says. */
int64_t moefleet_combine(const char *packed)
{
    Call call;
    memcpy(&call, packed, sizeof call);
    Fleet *fleet = call.fleet;
    const Part *part = call.part;
    int64_t step = call.step, set = step % SETS, type = part->made_type;
    moefleet_combining(fleet, step);
    int64_t placed = moefleet_give(fleet, part->inbox, set, type, call.rows, part->made_pitch);
    moefleet_commit(fleet, COMBINE, step, call.round, part->inbox->total, placed, 0, part->made_dtype, call.mask);
    if (!moefleet_collect(fleet, COMBINE, step, call.taking))
        return COMMITTED;
    moefleet_give_way(fleet, step, call.taking);
    int64_t unserved = moefleet_sum(fleet, set, type, part->ids, part->count, part->topk, call.taking,
                                    fleet->said_placed, call.to);
    if (!unserved)
        moefleet_close(fleet, step);
    return DONE + unserved;
}
