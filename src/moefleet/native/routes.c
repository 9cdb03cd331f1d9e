/* What a step does with routing and rows: movements between a rank's own memory and the segments of all, for rows that
   push.c does not place. Peers' numbers are taken within bounds: memory of a peer that a step went on without may change
   while it is read. */

#include "slots.h"

#include <string.h>

/* Copy routing. packed: a Read. Returns 0, and copies nothing, where an id is none of -1 to experts - 1. */
int64_t moefleet_read(const char *packed)
{
    Read read;
    memcpy(&read, packed, sizeof read);
    const int64_t *wide_ids = read.ids;
    const int32_t *short_ids = read.ids;
    int bad = 0;
    for (int64_t slot = 0; slot < read.slots; slot++) {
        int64_t id = read.wide ? wide_ids[slot] : short_ids[slot];
        bad |= id < -1 || id >= read.experts;
    }
    if (bad)
        return 0;
    for (int64_t slot = 0; slot < read.slots; slot++)
        read.ids_to[slot] = read.wide ? (int32_t)wide_ids[slot] : short_ids[slot];
    if (read.slots)
        memcpy(read.weights_to, read.weights, (size_t)read.slots * 4);
    return 1;
}

/* Tell how many tokens of this rank go to each rank, and in EXPERT_MAJOR how many rows to each expert. */
static void tell_bound(const Fleet *fleet, int64_t set, int64_t count, const int32_t *ids, int64_t topk)
{
    int32_t *bound = (int32_t *)(void *)(segment(fleet, fleet->rank) + fleet->bound[set]);
    int64_t *stamp = fleet->stamp;
    uint64_t bits[MAX_RANKS / 64];
    memset(bound, 0, (size_t)(fleet->experts + fleet->world) * 4);
    memset(stamp, 0, (size_t)fleet->experts * 8);
    for (int64_t t = 0; t < count; t++, ids += topk) {
        servers(fleet, ids, topk, bits);
        for (int64_t rank = 0; rank < fleet->world; rank++) /* all of them: no branch to mispredict */
            bound[fleet->experts + rank] += (int32_t)(bits[rank >> 6] >> (rank & 63) & 1);
        for (int64_t k = 0; k < topk && fleet->layout == EXPERT_MAJOR; k++) {
            if (looked_up(fleet->owner, ids[k], fleet->experts) < 0 || stamp[ids[k]] == t + 1)
                continue;
            stamp[ids[k]] = t + 1;
            bound[ids[k]]++;
        }
    }
}

/* Put this rank's tokens, scales and routing where all can read them. Tokens may be missing: then they are placed. */
void moefleet_store(Fleet *fleet, int64_t set, int64_t count, const char *tokens, int64_t pitch, const char *scales,
                    int64_t scale_pitch, const int32_t *ids, const float *weights, int64_t topk)
{
    char *mine = segment(fleet, fleet->rank);
    char *to = mine + fleet->tokens[set];
    int64_t bytes = fleet->row_bytes, slots = count * topk;
    int stream = tokens && streams(fleet, count * bytes, to);
    stream_fence(stream);
    fleet->pushed[set] = 0;
    if (!tokens)
        ;
    else if (pitch == bytes && !stream)
        memcpy(to, tokens, (size_t)(count * bytes)); /* faster than row after row */
    else
        for (int64_t t = 0; t < count; t++)
            copy_row(to + t * bytes, tokens + t * pitch, tokens + (t + (t + 1 < count)) * pitch, bytes, stream);
    if (scales)
        for (int64_t t = 0; t < count; t++)
            memcpy(mine + fleet->scales[set] + t * fleet->scale_bytes, scales + t * scale_pitch,
                   (size_t)fleet->scale_bytes);
    int32_t *their_ids = (int32_t *)(void *)(mine + fleet->ids[set]);
    if (slots) {
        memcpy(their_ids, ids, (size_t)slots * 4);
        memcpy(mine + fleet->weights[set], weights, (size_t)slots * 4);
    }
    for (int64_t slot = slots; slot < fleet->used[set]; slot++)
        their_ids[slot] = -1;
    if (fleet->landing[set] && fleet->layout != RANK_MAJOR)
        tell_bound(fleet, set, count, ids, topk);
    fleet->used[set] = slots;
    stream_fence(stream);
}

/* A row's local experts, -1 where one is elsewhere. Returns whether any is here. */
static int look_up(const Fleet *fleet, const int32_t *ids, int64_t topk, int64_t *local)
{
    int64_t all = -1; /* negative while all are */
    for (int64_t k = 0; k < topk; k++)
        all &= local[k] = looked_up(fleet->local, ids[k], fleet->experts);
    return all >= 0;
}

/* Sort the experts that a row has here, each once with the sum of its weights, and note where the row goes. */
static int64_t enter(const Fleet *fleet, Inbox *inbox, const float *weights, int64_t topk, int64_t entries)
{
    int64_t found = 0;
    for (int64_t k = 0; k < topk; k++) {
        int64_t expert = inbox->local[k], at = found;
        if (expert < 0)
            continue;
        while (at > 0 && inbox->expert[at - 1] >= expert)
            at--;
        if (at == found || inbox->expert[at] != expert) {
            for (int64_t i = found; i > at; i--) {
                inbox->expert[i] = inbox->expert[i - 1];
                inbox->sum[i] = inbox->sum[i - 1];
            }
            inbox->expert[at] = expert;
            inbox->sum[at] = 0.0;
            found++;
        }
        inbox->sum[at] += weights[k];
    }
    for (int64_t i = 0; i < found; i++) {
        int64_t expert = inbox->expert[i];
        inbox->position[entries + i] = expert * fleet->block + inbox->counts[expert]++;
        inbox->weight[entries + i] = (float)inbox->sum[i];
        inbox->expert_rows[expert]++;
    }
    return found;
}

/* Show a row's routing at its place: local experts, and weights where there is one. */
static void show(Inbox *inbox, const float *weights, int64_t topk, int64_t place)
{
    for (int64_t k = 0; k < topk; k++) {
        int64_t expert = inbox->local[k];
        inbox->ids[place * topk + k] = expert;
        inbox->weights[place * topk + k] = expert < 0 ? 0.0f : weights[k];
        if (expert >= 0)
            inbox->expert_rows[expert]++;
    }
}

/* Take away what a block shows from an earlier step past its present rows. */
static void hide(Inbox *inbox, int64_t topk, int64_t block, int64_t first, int64_t count)
{
    for (int64_t slot = (first + count) * topk; slot < (first + inbox->shown[block]) * topk; slot++) {
        inbox->ids[slot] = -1;
        inbox->weights[slot] = 0.0f;
    }
    inbox->shown[block] = count;
}

/* Find the rows that are for this rank in the routing of all, and all about them but the rows themselves. */
static int64_t take(const Fleet *fleet, Inbox *inbox, int64_t set)
{
    int64_t taken = 0, entries = 0, topk = inbox->topk;
    int64_t places = fleet->layout == FLAT ? fleet->block : fleet->block * fleet->world;
    int expert_major = fleet->layout == EXPERT_MAJOR, in_slots = !expert_major && topk % SLOTS == 0;
    memset(inbox->expert_rows, 0, (size_t)fleet->locals * 8);
    if (expert_major)
        memset(inbox->counts, 0, (size_t)fleet->locals * 4);
    for (int64_t source = 0; source < fleet->world; source++) {
        const char *theirs = segment(fleet, source);
        const int32_t *ids = (const int32_t *)(const void *)(theirs + fleet->ids[set]);
        const float *weights = (const float *)(const void *)(theirs + fleet->weights[set]);
        int64_t first = taken;
        inbox->bounds[source] = first;
        for (int64_t t = 0; t < inbox->brought[source]; t++, ids += topk, weights += topk) {
            int64_t place = fleet->layout == RANK_MAJOR ? source * fleet->block + taken - first : taken;
            if (in_slots && place < places) {
                if (show_slots(fleet, inbox, ids, weights, topk, place))
                    inbox->token[taken++] = (int32_t)t;
                continue;
            }
            if (!look_up(fleet, ids, topk, inbox->local))
                continue;
            inbox->token[taken] = (int32_t)t;
            if (expert_major) {
                inbox->bag[taken] = entries;
                entries += enter(fleet, inbox, weights, topk, entries);
            } else if (place < places) {
                show(inbox, weights, topk, place);
            }
            taken++;
        }
        if (fleet->layout == RANK_MAJOR) {
            inbox->counts[source] = (int32_t)(taken - first);
            hide(inbox, topk, source, source * fleet->block, taken - first);
        }
    }
    inbox->bounds[fleet->world] = inbox->total = taken;
    if (expert_major)
        inbox->bag[taken] = entries;
    if (fleet->layout == FLAT) {
        int64_t fits = taken < fleet->block ? taken : fleet->block;
        inbox->counts[0] = (int32_t)fits;
        hide(inbox, topk, 0, 0, fits);
    }
    inbox->entered = 1;
    return taken;
}

/* The same of rows in EXPERT_MAJOR that were all placed by who brings them: how many there are is all that it takes. */
static int64_t count(const Fleet *fleet, Inbox *inbox, int64_t set)
{
    int64_t taken = 0;
    memset(inbox->expert_rows, 0, (size_t)fleet->locals * 8);
    for (int64_t source = 0; source < fleet->world; source++) {
        int64_t most = inbox->brought[source];
        inbox->bounds[source] = taken;
        if (!most)
            continue;
        for (int64_t expert = 0; expert < fleet->experts; expert++)
            if (fleet->local[expert] >= 0)
                inbox->expert_rows[fleet->local[expert]] += bound_for(fleet, source, set, expert, most);
        taken += bound_for(fleet, source, set, fleet->experts + fleet->rank, most);
    }
    for (int64_t local = 0; local < fleet->locals; local++)
        inbox->counts[local] = (int32_t)inbox->expert_rows[local];
    inbox->bounds[fleet->world] = inbox->total = taken;
    inbox->entered = 0;
    return taken;
}

/* Find the rows that are for this rank.

   tokens: [W] tokens of each rank, 0 for who is absent; placed: [W] whether it brings its rows itself. Returns how many
   rows arrive; in FLAT that may be more than there is room for, and then no more is shown than fits. */
int64_t moefleet_arrive(const Fleet *fleet, Inbox *inbox, int64_t set, const int64_t *tokens, const int64_t *placed,
                        int64_t topk)
{
    /* Scales are fetched, row by row; and where others may go on without this rank, their routing may be another by the
       time that combine enters the rows. */
    int counted = fleet->layout == EXPERT_MAJOR && !fleet->scale_bytes && !fleet->tolerant;
    memcpy(inbox->placed, placed, (size_t)fleet->world * 8);
    for (int64_t source = 0; source < fleet->world; source++) {
        inbox->brought[source] = tokens[source] < 0 ? 0 : tokens[source] < fleet->most ? tokens[source] : fleet->most;
        counted &= !inbox->brought[source] || placed[source];
    }
    inbox->topk = topk;
    return counted ? count(fleet, inbox, set) : take(fleet, inbox, set);
}

/* Copy rows (or scales) of all sources to their places: each is read once. Those that are placed are there already. */
static void gather(const Fleet *fleet, const Inbox *inbox, int64_t from, char *to, int64_t bytes, int stream,
                   const int64_t *placed)
{
    for (int64_t source = 0; source < fleet->world; source++) {
        if (placed && placed[source])
            continue;
        const char *rows = segment(fleet, source) + from;
        int64_t first = inbox->bounds[source], end = inbox->bounds[source + 1];
        int64_t block = fleet->layout == RANK_MAJOR ? source * fleet->block - first : 0;
        for (int64_t i = first; i < end; i++) {
            const char *row = rows + inbox->token[i] * bytes;
            const char *next = rows + inbox->token[i + (i + 1 < end)] * bytes;
            if (fleet->layout != EXPERT_MAJOR) {
                copy_row(to + (block + i) * bytes, row, next, bytes, stream);
                continue;
            }
            for (int64_t e = inbox->bag[i]; e < inbox->bag[i + 1]; e++)
                copy_row(to + inbox->position[e] * bytes, row, e + 1 < inbox->bag[i + 1] ? row : next, bytes, stream);
        }
    }
}

/* Bring the rows that arrived, which must fit, and count them; choose where what experts make of them goes. */
void moefleet_gather(Fleet *fleet, const Inbox *inbox, int64_t step)
{
    int64_t rows = 0, set = step % SETS;
    moefleet_choose_made(fleet, step);
    for (int64_t source = 0; source < fleet->world; source++) {
        int64_t first = inbox->bounds[source], end = inbox->bounds[source + 1];
        if (!inbox->placed[source])
            rows += fleet->layout == EXPERT_MAJOR ? inbox->bag[end] - inbox->bag[first] : end - first;
    }
    int stream = streams(fleet, rows * fleet->row_bytes, inbox->rows);
    gather(fleet, inbox, fleet->tokens[set], inbox->rows, fleet->row_bytes, stream, inbox->placed);
    if (fleet->scale_bytes)
        gather(fleet, inbox, fleet->scales[set], inbox->scales, fleet->scale_bytes, 0, NULL);
    stream_fence(stream);
    for (int64_t source = 0; source < fleet->world; source++)
        fleet->rows_received[source] += inbox->bounds[source + 1] - inbox->bounds[source];
    for (int64_t expert = 0; expert < fleet->locals; expert++)
        fleet->expert_rows[expert] += inbox->expert_rows[expert];
    if (fleet->layout == EXPERT_MAJOR && inbox->rows == segment(fleet, fleet->rank) + fleet->landing[set])
        moefleet_gather_pages(fleet, set, inbox->counts);
}

/* Put the experts' rows where their tokens' ranks find them: in EXPERT_MAJOR the weighted sum of each token's.

   There, rows that were written to where all can read them stay, for those ranks that know which are theirs. Returns 0
   where they did not, else 1 and which of `made` they are in. */
int64_t moefleet_give(const Fleet *fleet, Inbox *inbox, int64_t set, int64_t type, const char *rows, int64_t pitch)
{
    char *mine = segment(fleet, fleet->rank), *to = mine + fleet->combined[set];
    int64_t *starts = (int64_t *)(void *)(mine + fleet->offsets[set]), *counts = starts + fleet->world;
    int64_t bytes = fleet->row_bytes;
    int64_t made = fleet->made[fleet->making[set]];
    int stay = fleet->layout == EXPERT_MAJOR && made && rows == mine + made && pitch == bytes;
    int stream = streams(fleet, inbox->total * bytes, to);
    stream_fence(stream);
    for (int64_t source = 0; source < fleet->world; source++) {
        int64_t first = inbox->bounds[source];
        counts[source] = inbox->bounds[source + 1] - first;
        starts[source] = fleet->layout == RANK_MAJOR ? source * fleet->block : first;
    }
    if (fleet->layout == EXPERT_MAJOR) {
        const char *terms[fleet->topk];
        if (!stay && !inbox->entered)
            take(fleet, inbox, set);
        for (int64_t source = 0; source < fleet->world; source++) {
            if (stay && inbox->placed[source])
                continue;
            for (int64_t i = inbox->bounds[source]; i < inbox->bounds[source + 1]; i++) {
                int64_t first = inbox->bag[i], count = inbox->bag[i + 1] - first;
                for (int64_t e = 0; e < count; e++)
                    terms[e] = rows + inbox->position[first + e] * pitch;
                sum_rows((int)type, to + i * bytes, terms, inbox->weight + first, count, fleet->hidden, 0, stream);
            }
        }
    } else if (rows != to) {
        for (int64_t source = 0; source < fleet->world; source++)
            for (int64_t i = starts[source]; i < starts[source] + counts[source]; i++)
                copy_row(to + i * bytes, rows + i * pitch, rows + (i + 1) * pitch, bytes, stream);
    }
    stream_fence(stream);
    return stay ? 1 + fleet->making[set] : 0;
}

/* The rows of one token that this rank placed with experts of `rank`, from entry *entry on: each a term. stayed: what
   moefleet_give said there. */
static int64_t fetch(const Fleet *fleet, int64_t set, int64_t rank, int64_t stayed, int64_t end, int64_t *entry,
                     const char **terms, float *weights)
{
    const Sent *sent = &fleet->sent[set];
    const char *rows = segment(fleet, rank) + fleet->made[stayed == 2];
    int64_t found = 0;
    while (*entry < end && sent->rank[*entry] < rank)
        ++*entry;
    for (; *entry < end && sent->rank[*entry] == rank; ++*entry) {
        terms[found] = rows + sent->place[*entry] * fleet->row_bytes;
        weights[found++] = sent->weight[*entry];
    }
    return found;
}

/* Sum what all ranks made of this rank's tokens into `to` [T, H].

   present: who took part, as bits; placed: [W] where a rank's rows stayed, see moefleet_give. Ranks that served other
   tokens than ours, that is, took us for missing, are left out. Returns the first of them and 1, or 0 for none. */
int64_t moefleet_sum(Fleet *fleet, int64_t set, int64_t type, const int32_t *ids, int64_t count, int64_t topk,
                     const uint8_t *present, const int64_t *placed, char *to)
{
    int64_t due[MAX_RANKS] = {0}, start[MAX_RANKS], done[MAX_RANKS] = {0}, unserved = 0, apart = 0;
    uint8_t taken[MAX_RANKS], whole[MAX_RANKS];
    uint64_t bits[MAX_RANKS / 64];
    int64_t world = fleet->world, bytes = fleet->row_bytes;
    int stream = streams(fleet, count * bytes, to);
    for (int64_t t = 0; t < count; t++) {
        servers(fleet, ids + t * topk, topk, bits);
        FOR_EACH_RANK (rank, bits, world)
            due[rank]++;
    }
    for (int64_t rank = 0; rank < world; rank++) {
        const int64_t *offsets = (const int64_t *)(const void *)(segment(fleet, rank) + fleet->offsets[set]);
        int here = has(present, rank);
        start[rank] = offsets[fleet->rank];
        whole[rank] = !(fleet->pushed[set] && placed[rank] && fleet->layout == EXPERT_MAJOR);
        apart |= !whole[rank];
        taken[rank] = here && offsets[world + fleet->rank] == due[rank] && start[rank] >= 0 &&
                      start[rank] <= fleet->home_rows - due[rank];
        if (taken[rank])
            fleet->rows_sent[rank] += due[rank];
        else if (here && !unserved)
            unserved = rank + 1;
    }
    for (int64_t t = 0; t < count; t++) {
        const char *terms[MAX_RANKS + topk];
        float weights[MAX_RANKS + topk];
        int64_t ends[MAX_RANKS], groups = 0, found = 0, entry = apart ? fleet->sent[set].bag[t] : 0;
        servers(fleet, ids + t * topk, topk, bits);
        FOR_EACH_RANK (rank, bits, world) {
            int64_t row = start[rank] + done[rank]++;
            if (!taken[rank])
                continue;
            if (whole[rank]) {
                weights[found] = 1.0f;
                terms[found++] = segment(fleet, rank) + fleet->combined[set] + row * bytes;
            } else {
                found += fetch(fleet, set, rank, placed[rank], fleet->sent[set].bag[t + 1], &entry, terms + found,
                               weights + found);
            }
            ends[groups++] = found;
        }
        if (apart)
            sum_groups((int)type, to + t * bytes, terms, weights, ends, groups, fleet->hidden, (int)fleet->ties_away,
                       stream);
        else
            sum_rows((int)type, to + t * bytes, terms, NULL, found, fleet->hidden, (int)fleet->ties_away, stream);
    }
    stream_fence(stream);
    return unserved;
}

/* Sizes of what structs.py mirrors. */
int64_t moefleet_sizes(int64_t which)
{
    static const size_t sizes[] = {sizeof(Fleet), sizeof(Inbox), sizeof(Part), sizeof(Call), sizeof(Read)};
    return (int64_t)sizes[which];
}
