/* Rows that a rank brings straight to where their receivers hand them out, and what experts made of them fetched from
   there. Each writes only the places that are its own, which follow from the routing of the ranks before it. */

#include "moefleet.h"

#include <string.h>

/* How many rows the ranks before this one bring to each rank (FLAT) or expert (EXPERT_MAJOR): there ours begin. */
static void count_before(const Fleet *fleet, int64_t set, const int64_t *tokens)
{
    int64_t first = fleet->layout == FLAT ? fleet->experts : 0;
    int64_t whom = fleet->layout == EXPERT_MAJOR ? fleet->experts : fleet->world, *next = fleet->next;
    memset(next, 0, (size_t)whom * 8);
    if (fleet->layout == RANK_MAJOR)
        return;
    for (int64_t source = 0; source < fleet->rank; source++) {
        int64_t most = tokens[source] < fleet->most ? tokens[source] : fleet->most;
        for (int64_t i = 0; most > 0 && i < whom; i++)
            next[i] += bound_for(fleet, source, set, first + i, most);
    }
}

/* Note each expert of a token once, with the sum of its weights, in the order of ranks and there of experts, and where
   its row goes: what combine needs to fetch it again. Returns how many there are. */
static int64_t note(const Fleet *fleet, const Sent *sent, const uint8_t *to, const int32_t *ids, const float *weights,
                    int64_t topk, int64_t serial, int64_t first)
{
    int64_t experts[topk], found = 0;
    double sums[topk];
    for (int64_t k = 0; k < topk; k++) {
        int64_t rank = looked_up(fleet->owner, ids[k], fleet->experts), at = found;
        if (rank < 0 || !has(to, rank))
            continue;
        if (fleet->stamp[ids[k]] == serial) {
            for (at = 0; experts[at] != ids[k]; at++)
                ;
            sums[at] += weights[k];
            continue;
        }
        fleet->stamp[ids[k]] = serial;
        for (; at > 0; at--) {
            int64_t before = experts[at - 1], owner = fleet->owner[before];
            if (owner < rank || (owner == rank && fleet->slot[before] < fleet->slot[ids[k]]))
                break;
            experts[at] = before;
            sums[at] = sums[at - 1];
        }
        experts[at] = ids[k];
        sums[at] = (double)weights[k];
        found++;
    }
    for (int64_t i = 0; i < found; i++) {
        int64_t expert = experts[i];
        sent->rank[first + i] = fleet->owner[expert];
        sent->place[first + i] = fleet->slot[expert] * fleet->block + fleet->next[expert]++;
        sent->weight[first + i] = (float)sums[i];
    }
    return found;
}

/* Bring this rank's tokens to where they are used.

   before: [W] tokens of each rank below this one, 0 for who is absent; to: the ranks that are brought any, as bits. Room
   that a receiver does not have is left alone: it finds out by itself. */
void moefleet_push(Fleet *fleet, int64_t set, const int64_t *before, const uint8_t *to, int64_t count, const char *tokens,
                   int64_t pitch, const int32_t *ids, const float *weights, int64_t topk)
{
    const Sent *sent = &fleet->sent[set];
    int64_t bytes = fleet->row_bytes, entries = 0;
    uint64_t bits[MAX_RANKS / 64];
    count_before(fleet, set, before);
    memset(fleet->stamp, 0, (size_t)fleet->experts * 8);
    int64_t copies = fleet->layout == EXPERT_MAJOR || topk < fleet->world ? topk : fleet->world;
    int stream = streams(fleet, count * copies * bytes, segment(fleet, 0) + fleet->landing[set]);
    stream_fence(stream);
    for (int64_t t = 0; t < count; t++) {
        const char *row = tokens + t * pitch, *next = tokens + (t + (t + 1 < count)) * pitch;
        if (fleet->layout == EXPERT_MAJOR) {
            sent->bag[t] = entries;
            int64_t end = entries + note(fleet, sent, to, ids + t * topk, weights + t * topk, topk, t + 1, entries);
            for (; entries < end; entries++)
                copy_row(segment(fleet, sent->rank[entries]) + fleet->landing[set] + sent->place[entries] * bytes, row,
                         entries + 1 < end ? row : next, bytes, stream);
            continue;
        }
        servers(fleet, ids + t * topk, topk, bits);
        FOR_EACH_RANK (rank, bits, fleet->world) {
            int64_t place = fleet->next[rank]++;
            if (fleet->layout == RANK_MAJOR)
                place += fleet->rank * fleet->block;
            else if (place >= fleet->home_rows)
                continue;
            if (has(to, rank))
                copy_row(segment(fleet, rank) + fleet->landing[set] + place * bytes, row, next, bytes, stream);
        }
    }
    if (fleet->layout == EXPERT_MAJOR)
        sent->bag[count] = entries;
    stream_fence(stream);
    fleet->pushed[set] = 1;
}
