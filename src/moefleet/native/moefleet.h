/* What the parts of the helper share. structs.py mirrors the two structs; moefleet_sizes() holds it to that.

   Letters as everywhere: W ranks, E experts, L local experts, T tokens, M the most of those, K top-k, H hidden. */

#ifndef MOEFLEET_H
#define MOEFLEET_H

#include <stddef.h>
#include <stdint.h>

enum { SETS = 2, MAX_RANKS = 256 };
enum { EXPERT_MAJOR, RANK_MAJOR, FLAT };
enum { FLOAT32, BFLOAT16, FLOAT16 };

/* All ranks' segments and what never changes in a Fleet's life, but for its counters. */
typedef struct {
    char *base;     /* segment r is at base + r * stride; only our own may be written */
    int64_t stride;
    int64_t rank, world, most, topk; /* W, M, the largest K */
    int64_t hidden, row_bytes, scale_bytes;
    int64_t experts, locals;
    int64_t layout, block; /* rows of one block of the received memory */
    int64_t home_rows;     /* C, rows of a segment's combined memory */
    int64_t ids[SETS], weights[SETS], offsets[SETS], scales[SETS], tokens[SETS], combined[SETS]; /* in a segment */
    int64_t used[SETS];    /* slots of our own that hold ids, from the front */
    const int64_t *local;  /* [E+1] local index of an expert, -1 if it is elsewhere */
    const int64_t *owner;  /* [E+1] rank that holds an expert, -1 if nobody does */
    int64_t *rows_received, *rows_sent, *expert_rows; /* [W], [W], [L]: since construction */
    int64_t stream_bytes;  /* what writes more than this goes past the caches */
    int64_t ties_away;     /* whether torch rounds sums to bfloat16 so, see lanes.h */
} Fleet;

/* Private memory that one step's rows are received into, and how they are sorted. */
typedef struct {
    char *rows, *scales;
    int32_t *counts;    /* [L], [W] or [1], by layout */
    int64_t *ids;       /* [places, K], RANK_MAJOR and FLAT: local experts, -1 past the counts */
    float *weights;     /* the same, 0 where an id is -1 */
    int64_t *shown;     /* [W] or [1]: places of each block that hold routing */
    int64_t total;      /* rows that arrived */
    int64_t *bounds;    /* [W+1] where each source's rows begin among them */
    int32_t *token;     /* [W*M] the row's token at its source */
    int64_t *bag;       /* [W*M+1] EXPERT_MAJOR: where each row's entries begin, one for each of its experts here */
    int64_t *position;  /* an entry's place in the received rows */
    float *weight;      /* and its weight: the sum of the slots that name the expert */
    int64_t *expert_rows; /* [L] what counts as this step's rows of an expert */
    int64_t *local;     /* [Kmax] the row at hand: the local expert of each slot, or -1 */
    int64_t *expert;    /* [Kmax] each of these once */
    double *sum;        /* [Kmax] and its weight */
} Inbox;

/* rows.c */
int streams(const Fleet *fleet, int64_t bytes, const void *to);
void stream_fence(int streamed);
void copy_row(char *to, const char *from, const char *next, int64_t bytes, int stream);
void sum_rows(int type, char *to, const char *const *rows, const float *weights, int64_t count, int64_t hidden,
              int away, int stream);

#endif
