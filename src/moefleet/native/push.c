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

/* Note each expert of a token once, with the sum of its weights, in the order of ranks and there of slots, and where its
   row goes: what combine needs to fetch it again. Bits sort them: which of two comes first is as good as random, so that
   branches on it take five times as long. Returns where the next token's entries begin. */
static int64_t note(const Fleet *fleet, const Sent *sent, const uint8_t *to, const int32_t *ids, const float *weights,
                    int64_t topk, int64_t entry)
{
    int64_t words = (fleet->experts + 63) / 64;
    uint64_t named[words];
    memset(named, 0, (size_t)words * 8);
    for (int64_t k = 0; k < topk; k++) {
        int64_t at = looked_up(fleet->order, ids[k], fleet->experts);
        if (at < 0)
            continue;
        named[at >> 6] |= 1ull << (at & 63);
        fleet->sums[at] += (double)weights[k];
    }
    for (int64_t word = 0; word < words; word++)
        for (uint64_t left = named[word]; left; left &= left - 1) {
            int64_t at = word * 64 + __builtin_ctzll(left), expert = fleet->ordered[at];
            float sum = (float)fleet->sums[at];
            fleet->sums[at] = 0.0;
            if (!has(to, fleet->owner[expert]))
                continue;
            sent->rank[entry] = fleet->owner[expert];
            sent->place[entry] = fleet->slot[expert] * fleet->block + fleet->next[expert]++;
            sent->weight[entry++] = sum;
        }
    return entry;
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
    int64_t copies = fleet->layout == EXPERT_MAJOR || topk < fleet->world ? topk : fleet->world;
    int stream = streams(fleet, count * copies * bytes, segment(fleet, 0) + fleet->landing[set]);
    stream_fence(stream);
    for (int64_t t = 0; t < count; t++) {
        const char *row = tokens + t * pitch, *next = tokens + (t + (t + 1 < count)) * pitch;
        if (fleet->layout == EXPERT_MAJOR) {
            sent->bag[t] = entries;
            int64_t end = note(fleet, sent, to, ids + t * topk, weights + t * topk, topk, entries);
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
