/* Gated experts for few rows, float32, in one call: rows are read where dispatch put them, matrices where they lie, each
   once for up to four rows. */

#include "lanes.h"
#include "moefleet.h"

#include <stdlib.h>

enum { ROWS = 4, OUTPUTS = 4 }; /* of a block whose sums are kept in registers */
enum { AHEAD = 8 };             /* rows of a matrix that are asked for before they are needed: it comes from far */

static inline Lanes lanes_at(const float *from)
{
    Lanes values;
    memcpy(&values, from, sizeof values);
    return values;
}

/* Four outputs of `rows` rows, a number that the compiler knows: y[r][0..3] = x[r] . w[0..3], `in` long. */
static inline __attribute__((always_inline)) void block(int rows, const float *const *x, const float *w, int64_t in,
                                                        Four *y)
{
    Lanes sums[ROWS][OUTPUTS] = {{{0}}};
    int64_t at = 0;
    for (; at + WIDTH <= in; at += WIDTH) {
        Lanes columns[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++) {
            columns[o] = lanes_at(w + o * in + at);
            __builtin_prefetch(w + (AHEAD + o) * in + at);
        }
        for (int r = 0; r < rows; r++) {
            Lanes values = lanes_at(x[r] + at);
            for (int o = 0; o < OUTPUTS; o++)
                sums[r][o] = fused_lanes(values, columns[o], sums[r][o]);
        }
    }
    for (int r = 0; r < rows; r++) {
        y[r] = sums_over(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        for (int64_t rest = at; rest < in; rest++)
            for (int o = 0; o < OUTPUTS; o++)
                y[r][o] = fused1(x[r][rest], w[o * in + rest], y[r][o]);
    }
}

static float dot(const float *x, const float *w, int64_t in)
{
    float sum = 0.0f;
    for (int64_t i = 0; i < in; i++)
        sum = fused1(x[i], w[i], sum);
    return sum;
}

/* One matrix [out, in] for up to four rows, each into y[r] [out]. */
static void few(int64_t rows, const float *const *x, const float *w, const float *bias, int64_t in, int64_t out,
                float *const *y)
{
    int64_t o = 0;
    for (; o + OUTPUTS <= out; o += OUTPUTS) {
        Four made[ROWS];
        const float *columns = w + o * in;
        if (rows == 4)
            block(4, x, columns, in, made);
        else if (rows == 3)
            block(3, x, columns, in, made);
        else if (rows == 2)
            block(2, x, columns, in, made);
        else
            block(1, x, columns, in, made);
        for (int64_t r = 0; r < rows; r++) {
            if (bias)
                for (int i = 0; i < OUTPUTS; i++)
                    made[r][i] += bias[o + i];
            memcpy(y[r] + o, &made[r], sizeof made[r]);
        }
    }
    for (; o < out; o++)
        for (int64_t r = 0; r < rows; r++)
            y[r][o] = dot(x[r], w + o * in, in) + (bias ? bias[o] : 0.0f);
}

/* Each expert's rows through its matrix: of w [experts, out, in], those from ends[e - 1] to ends[e] - 1. Row n is read from
   row from_place[n] of x, and goes to row to_place[n] of y [.., out]; without places it is row n. */
static void multiply(const float *x, int64_t pitch, const int64_t *from_place, const int64_t *ends, int64_t experts,
                     const float *w, const float *bias, int64_t in, int64_t out, float *y, const int64_t *to_place)
{
    for (int64_t e = 0, n = 0; e < experts; e++) {
        while (n < ends[e]) {
            const float *from[ROWS];
            float *to[ROWS];
            int64_t rows = 0;
            for (; rows < ROWS && n < ends[e]; rows++, n++) {
                from[rows] = x + (from_place ? from_place[n] : n) * pitch;
                to[rows] = y + (to_place ? to_place[n] : n) * out;
            }
            few(rows, from, w + e * in * out, bias ? bias + e * out : NULL, in, out, to);
        }
    }
}

/* h [N, 2 * inter], of which the first half of each row becomes gate * sigmoid(alpha * gate) * (up + shift), both halves
   clamped first. */
static void gate(float *h, int64_t pairs, int64_t inter, float limit, float alpha, float shift)
{
    for (int64_t n = 0; n < pairs; n++, h += 2 * inter)
        for (int64_t i = 0; i < inter; i += WIDTH) {
            size_t bytes = 4 * (size_t)(inter - i < WIDTH ? inter - i : WIDTH);
            Lanes g = {0}, up = {0};
            memcpy(&g, h + i, bytes);
            memcpy(&up, h + inter + i, bytes);
            g = at_most(g, limit);
            up = -at_most(-at_most(up, limit), limit);
            g = g / (1.0f + exponential(-alpha * g)) * (up + shift);
            memcpy(h + i, &g, bytes);
        }
}

/* The pairs (row, expert) of the rows that exist. */
typedef struct {
    int64_t count;
    int64_t *ends;   /* [experts] where each expert's pairs end, sorted by expert */
    int64_t *place;  /* [count] of a sorted pair: its row */
    int64_t *sorted; /* [count] of a pair in the order of rows: where it is among the sorted; where rows have ids */
} Pairs;

/* Whether a slot names an expert that is here. */
static int is_here(int64_t id, int64_t experts)
{
    return (uint64_t)id < (uint64_t)experts;
}

/* How many pairs there are, counted in `ends` for each expert; more than `most` are not counted to their end. */
static int64_t count_pairs(const int32_t *counts, int64_t blocks, int64_t capacity, const int64_t *ids, int64_t topk,
                           int64_t experts, int64_t most, int64_t *ends)
{
    int64_t pairs = 0;
    memset(ends, 0, (size_t)experts * sizeof *ends);
    for (int64_t b = 0; b < blocks && pairs <= most; b++) {
        const int64_t *first = ids + b * capacity * topk;
        for (int64_t slot = 0; ids && slot < counts[b] * topk && pairs <= most; slot++)
            if (is_here(first[slot], experts)) {
                ends[first[slot]]++;
                pairs++;
            }
        if (!ids)
            pairs += ends[b] = counts[b];
    }
    return pairs;
}

static void sort_pairs(Pairs *pairs, const int32_t *counts, int64_t blocks, int64_t capacity, const int64_t *ids,
                       int64_t topk, int64_t experts)
{
    int64_t *ends = pairs->ends, *sorted = pairs->sorted, start = 0;
    for (int64_t e = 0; e < experts; e++) { /* where they begin, for now */
        int64_t count = ends[e];
        ends[e] = start;
        start += count;
    }
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t row = b * capacity; row < b * capacity + counts[b]; row++)
            for (int64_t k = 0; k < (ids ? topk : 1); k++) {
                int64_t expert = ids ? ids[row * topk + k] : b;
                if (!is_here(expert, experts))
                    continue;
                if (ids)
                    *sorted++ = ends[expert];
                pairs->place[ends[expert]++] = row;
            }
}

/* What gated experts make of the rows that exist, to `to`, which may be x itself.

   x, to: blocks of `capacity` rows, counts[b] of which exist. With ids [blocks * capacity, K] a row gets the sum of its
   slots' experts times their weights, in the order of slots; an id that is none of 0 to experts - 1 counts as none. Without
   ids block b is expert b's, and a row gets what that makes of it.

   w13 [experts, 2 * inter, hidden] and w2 [experts, hidden, inter], their biases may be missing. Returns 0, and writes
   nothing, where there are more than `most` pairs of a row and an expert, or no memory. */
int64_t moefleet_experts(const float *x, const int32_t *counts, int64_t blocks, int64_t capacity, const int64_t *ids,
                         const float *weights, int64_t topk, int64_t experts, int64_t hidden, int64_t inter,
                         const float *w13, const float *b13, const float *w2, const float *b2, double limit,
                         double alpha, double shift, int64_t most, float *to)
{
    int64_t *room = malloc((size_t)(experts + 2 * most) * sizeof *room);
    if (!room)
        return 0;
    Pairs pairs = {0, room, room + experts, room + experts + most};
    pairs.count = count_pairs(counts, blocks, capacity, ids, topk, experts, most, pairs.ends);
    float *h = NULL;
    if (pairs.count <= most)
        h = malloc((size_t)pairs.count * (size_t)(2 * inter + hidden) * sizeof *h + 1);
    if (!h) {
        free(room);
        return 0;
    }
    sort_pairs(&pairs, counts, blocks, capacity, ids, topk, experts);
    multiply(x, hidden, pairs.place, pairs.ends, experts, w13, b13, hidden, 2 * inter, h, NULL);
    gate(h, pairs.count, inter, (float)limit, (float)alpha, (float)shift);
    float *y = ids ? h + pairs.count * 2 * inter : to;
    multiply(h, 2 * inter, NULL, pairs.ends, experts, w2, b2, inter, hidden, y, ids ? NULL : pairs.place);
    const int64_t *sorted = pairs.sorted;
    for (int64_t b = 0; ids && b < blocks; b++)
        for (int64_t row = b * capacity; row < b * capacity + counts[b]; row++) {
            const char *terms[topk];
            float weight[topk];
            int64_t found = 0;
            for (int64_t k = 0; k < topk; k++)
                if (is_here(ids[row * topk + k], experts)) {
                    weight[found] = weights[row * topk + k];
                    terms[found++] = (const char *)(y + *sorted++ * hidden);
                }
            sum_rows(FLOAT32, (char *)(to + row * hidden), terms, weight, found, hidden, 0, 0);
        }
    free(h);
    free(room);
    return 1;
}
