/* What the parts of the helper share. structs.py mirrors the structs; moefleet_sizes() holds it to that.

   Letters as everywhere: W ranks, E experts, L local experts, T tokens, M the most of those, K top-k, H hidden. */

#ifndef MOEFLEET_H
#define MOEFLEET_H

#include <stddef.h>
#include <stdint.h>

enum { SETS = 2, MAX_RANKS = 256 };
enum { EXPERT_MAJOR, RANK_MAJOR, FLAT };
enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { NONE, DISPATCH, COMBINE, CLOSED, ROUTES, OPERATIONS };

/* What a rank notes of the rows that it brought to experts: those of token t are bag[t] to bag[t + 1] - 1. */
typedef struct {
    int64_t *bag;   /* [M+1] */
    int64_t *rank;  /* [M*Kmax] who has the expert */
    int64_t *place; /* and which row there it is */
    float *weight;  /* and what it counts: the sum of the slots that name the expert */
} Sent;

/* All ranks' segments and what never changes in a Fleet's life, but for its counters. */
typedef struct {
    char *base;     /* segment r is at base + r * stride; only our own may be written, and landings */
    int64_t stride;
    int64_t rank, world, most, topk; /* W, M, the largest K */
    int64_t hidden, row_bytes, scale_bytes;
    int64_t experts, locals;
    int64_t layout, block; /* rows of one block of the received memory */
    int64_t home_rows;     /* C, rows of a segment's combined memory */
    int64_t ids[SETS], weights[SETS], offsets[SETS], scales[SETS], tokens[SETS], combined[SETS]; /* in a segment */
    int64_t bound[SETS];               /* the same: rows that are bound for each expert, and tokens for each rank */
    int64_t made[SETS], landing[SETS]; /* where rows are placed: in a segment; made in EXPERT_MAJOR only */
    int64_t making[SETS];  /* which of `made` each of the last steps uses */
    int64_t making_step;   /* the step that chose last */
    Sent sent[SETS];       /* EXPERT_MAJOR, where rows are placed */
    int64_t *gathered;     /* [SETS, 2, L] bytes of an expert's rows, and of what it made of them, in huge pages */
    int64_t pushed[SETS];  /* whether this rank placed its rows in the last step of a set */
    int64_t used[SETS];    /* slots of our own that hold ids, from the front */
    const int64_t *local;  /* [E+1] local index of an expert, -1 if it is elsewhere */
    const int64_t *owner;  /* [E+1] rank that holds an expert, -1 if nobody does */
    const int64_t *slot;   /* [E+1] local index of an expert at its owner */
    const int64_t *order;  /* [E+1] place of an expert among all, by rank and slot, -1 if nobody holds it */
    const int64_t *ordered; /* [E] the experts by their place */
    double *sums;          /* [E] by place: room to add in, all 0 between uses */
    int64_t *next, *stamp; /* [max(E, W)] and [E]: room to count in */
    int64_t *rows_received, *rows_sent, *expert_rows; /* [W], [W], [L]: since construction */
    int64_t stream_bytes;  /* what writes as much goes past the caches */
    int64_t ties_away;     /* whether torch rounds sums to bfloat16 so, see lanes.h */
    int64_t flags[OPERATIONS][SETS];   /* word of a segment that commits a phase */
    int64_t headers[OPERATIONS][SETS]; /* where its header is in a segment */
    int64_t generation, early;         /* early: whether ranks wait for routing alone, before they place rows */
    int64_t tolerant;                  /* whether a step may end without some ranks, whose memory then changes */
    int64_t crowded;                   /* whether ranks share cores */
    double spin_s;                     /* how long commits are looked for, in time of the thread's own */
    double *waited;                    /* [W] seconds waited for each rank, since construction */
    int64_t *said_tokens, *said_placed; /* [W] what the ranks said that were collected last */
} Fleet;

/* Memory that one step's rows are received into, and how they are sorted. */
typedef struct {
    char *rows, *scales;
    int32_t *counts;    /* [L], [W] or [1], by layout */
    int64_t *ids;       /* [places, K], RANK_MAJOR and FLAT: local experts, -1 past the counts */
    float *weights;     /* the same, 0 where an id is -1 */
    int64_t *shown;     /* [W] or [1]: places of each block that hold routing */
    int64_t total;      /* rows that arrived */
    int64_t topk, entered; /* K, and whether the entries below are there */
    int64_t *brought;   /* [W] tokens of each source */
    int64_t *placed;    /* [W] whether a source placed its rows here itself */
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

/* What a rank brings to a step, but for what is new in each: where its tokens lie, and what experts made of others'. */
typedef struct {
    Inbox *inbox;
    const int32_t *ids;   /* [T, K] */
    const float *weights; /* [T, K] */
    int64_t count, topk;  /* T, K */
    int64_t pitch, dtype; /* of tokens: bytes from one to the next, and what headers say of their type */
    const char *scales;   /* may be missing */
    int64_t scale_pitch;
    int64_t placed;       /* whether to place tokens, see push.c */
    int64_t expected;     /* rows that must arrive, or -1 */
    int64_t made_type, made_pitch, made_dtype; /* of the experts' rows: type, and the same */
} Part;

/* What the calls that every step makes take, one after the other in one string of bytes: Python takes longer to convert
   six arguments than to pack them. */
typedef struct {
    Fleet *fleet;
    const Part *part;
    int64_t step, round;
    const char *rows;                              /* tokens, or what experts made of those that arrived */
    char *to;                                      /* [T, H] where combine puts sums */
    uint8_t mask[MAX_RANKS / 8], taking[MAX_RANKS / 8]; /* whom this rank trusts, and of those who takes part, as bits */
} Call;

typedef struct {
    const void *ids; /* of 8 bytes (wide) or 4 */
    int64_t wide;
    const float *weights;
    int64_t slots, experts;
    int32_t *ids_to;
    float *weights_to;
} Read;

static inline char *segment(const Fleet *fleet, int64_t rank)
{
    return fleet->base + rank * fleet->stride;
}

/* What a table of E + 1 entries says of an id. The last entry is for everything that is no expert. */
static inline int64_t looked_up(const int64_t *table, int32_t id, int64_t experts)
{
    return table[(uint32_t)id < (uint64_t)experts ? id : experts];
}

static inline int has(const uint8_t *bits, int64_t rank)
{
    return bits[rank >> 3] >> (rank & 7) & 1;
}

/* The ranks that serve a token, as bits. */
static inline void servers(const Fleet *fleet, const int32_t *ids, int64_t topk, uint64_t *bits)
{
    const int64_t *owner = fleet->owner, experts = fleet->experts;
    if (fleet->world <= 64) { /* in a register, without a branch: three times as fast */
        uint64_t found = 0;
        for (int64_t k = 0; k < topk; k++) {
            int64_t rank = looked_up(owner, ids[k], experts);
            found |= (uint64_t)(rank >= 0) << (rank & 63);
        }
        bits[0] = found;
        return;
    }
    for (int64_t word = 0; word < (fleet->world + 63) / 64; word++)
        bits[word] = 0;
    for (int64_t k = 0; k < topk; k++) {
        int64_t rank = looked_up(owner, ids[k], experts);
        if (rank >= 0)
            bits[rank >> 6] |= 1ull << (rank & 63);
    }
}

/* How many rows of `source`, which brought `most` tokens, are bound for an expert, or, past all experts, a rank: within
   bounds, whatever it says. */
static inline int64_t bound_for(const Fleet *fleet, int64_t source, int64_t set, int64_t whom, int64_t most)
{
    const volatile int32_t *bound = (const volatile int32_t *)(const void *)(segment(fleet, source) + fleet->bound[set]);
    int64_t said = bound[whom];
    return said < 0 ? 0 : said < most ? said : most;
}

/* Each rank in bits, lowest first. */
#define FOR_EACH_RANK(rank, bits, world)                                                                               \
    for (int64_t word_ = 0; word_ < ((world) + 63) / 64; word_++)                                                      \
        for (uint64_t left_ = (bits)[word_]; left_; left_ &= left_ - 1)                                                \
            for (int64_t rank = 64 * word_ + __builtin_ctzll(left_), once_ = 1; once_; once_ = 0)

/* flags.c */
void moefleet_begin(const Fleet *fleet, int64_t step);
void moefleet_combining(const Fleet *fleet, int64_t step);
void moefleet_commit(const Fleet *fleet, int64_t operation, int64_t step, int64_t round, int64_t tokens, int64_t placed,
                     int64_t topk, int64_t dtype, const uint8_t *mask);
int64_t moefleet_collect(const Fleet *fleet, int64_t operation, int64_t step, const uint8_t *taking);
void moefleet_close(const Fleet *fleet, int64_t step);
int64_t moefleet_give_way(const Fleet *fleet, int64_t step, const uint8_t *taking);
void moefleet_choose_made(Fleet *fleet, int64_t step);

/* routes.c and push.c */
void moefleet_store(Fleet *fleet, int64_t set, int64_t count, const char *tokens, int64_t pitch, const char *scales,
                    int64_t scale_pitch, const int32_t *ids, const float *weights, int64_t topk);
void moefleet_push(Fleet *fleet, int64_t set, const int64_t *before, const uint8_t *to, int64_t count, const char *tokens,
                   int64_t pitch, const int32_t *ids, const float *weights, int64_t topk);
int64_t moefleet_arrive(const Fleet *fleet, Inbox *inbox, int64_t set, const int64_t *tokens, const int64_t *placed,
                        int64_t topk);
void moefleet_gather(Fleet *fleet, const Inbox *inbox, int64_t step);
int64_t moefleet_give(const Fleet *fleet, Inbox *inbox, int64_t set, int64_t type, const char *rows, int64_t pitch);
int64_t moefleet_sum(Fleet *fleet, int64_t set, int64_t type, const int32_t *ids, int64_t count, int64_t topk,
                     const uint8_t *present, const int64_t *placed, char *to);

/* pages.c */
void moefleet_gather_pages(Fleet *fleet, int64_t set, const int32_t *counts);

/* rows.c */
int streams(const Fleet *fleet, int64_t bytes, const void *to);
void stream_fence(int streamed);
void copy_row(char *to, const char *from, const char *next, int64_t bytes, int stream);
void sum_rows(int type, char *to, const char *const *rows, const float *weights, int64_t count, int64_t hidden,
              int away, int stream);
void sum_groups(int type, char *to, const char *const *rows, const float *weights, const int64_t *ends, int64_t groups,
                int64_t hidden, int away, int stream);

#endif
