/* The two products of gated experts for few rows, float32. Rows are read where dispatch put them, matrices where they
   lie, each once; what stands between the products is the caller's. */

#include "lanes.h"
#include "moefleet.h"

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

/* Each expert's rows through its matrix: of w [experts, out, in], rows ends[e - 1] to ends[e] - 1 of y [N, out]. Row n is
   row place[n] of x, or row n without places. */
static void multiply(const float *x, int64_t pitch, const int64_t *place, const int64_t *ends, int64_t experts,
                     const float *w, const float *bias, int64_t in, int64_t out, float *y)
{
    for (int64_t e = 0, n = 0; e < experts; e++) {
        while (n < ends[e]) {
            const float *from[ROWS];
            float *to[ROWS];
            int64_t rows = 0;
            for (; rows < ROWS && n < ends[e]; rows++, n++) {
                from[rows] = x + (place ? place[n] : n) * pitch;
                to[rows] = y + n * out;
            }
            few(rows, from, w + e * in * out, bias ? bias + e * out : NULL, in, out, to);
        }
    }
}

/* Find the pairs (row, local expert) of the rows that exist, sorted by expert, and multiply: h [N, wide].

   x: blocks of `capacity` rows, counts[b] of which exist; ids: [blocks * capacity, K], no expert where one is none of 0 to
   experts - 1. plan: room for experts + 2 * most numbers: where each expert's pairs end; of each pair, sorted, the row's
   place; of each pair, in the order of rows, where it is among the sorted. Returns N, or -1 if there are more than `most`
   pairs: then nothing was written but the plan. */
int64_t moefleet_expand(const float *x, int64_t pitch, const int32_t *counts, int64_t blocks, int64_t capacity,
                        const int64_t *ids, int64_t topk, int64_t experts, const float *w, const float *bias, int64_t hidden,
                        int64_t wide, int64_t *plan, int64_t most, float *h)
{
    int64_t *ends = plan, *place = plan + experts, *sorted = place + most, pairs = 0, start = 0;
    for (int64_t e = 0; e < experts; e++)
        ends[e] = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t *first = ids + b * capacity * topk;
        for (int64_t slot = 0; slot < counts[b] * topk; slot++) {
            if ((uint64_t)first[slot] >= (uint64_t)experts)
                continue;
            if (pairs++ == most)
                return -1;
            ends[first[slot]]++;
        }
    }
    for (int64_t e = 0; e < experts; e++) { /* where they begin, for now */
        int64_t count = ends[e];
        ends[e] = start;
        start += count;
    }
    pairs = 0;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t row = b * capacity; row < b * capacity + counts[b]; row++)
            for (int64_t k = 0; k < topk; k++) {
                int64_t expert = ids[row * topk + k];
                if ((uint64_t)expert >= (uint64_t)experts)
                    continue;
                sorted[pairs++] = ends[expert];
                place[ends[expert]++] = row;
            }
    multiply(x, pitch, place, ends, experts, w, bias, hidden, wide, h);
    return pairs;
}

/* Multiply what was made of h, a [N, inter], by the other matrices, y [N, hidden], and give each row that exists the sum of
   its pairs times their weights, in the order of its slots. The plan is that of moefleet_expand. */
void moefleet_contract(const float *a, const int64_t *plan, int64_t most, const int32_t *counts, int64_t blocks,
                       int64_t capacity, const int64_t *ids, const float *weights, int64_t topk, int64_t experts,
                       const float *w, const float *bias, int64_t inter, int64_t hidden, float *y, char *to, int64_t pitch)
{
    const int64_t *sorted = plan + experts + most;
    multiply(a, inter, NULL, plan, experts, w, bias, inter, hidden, y);
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t row = b * capacity; row < b * capacity + counts[b]; row++) {
            const char *terms[topk];
            float weight[topk];
            int64_t found = 0;
            for (int64_t k = 0; k < topk; k++) {
                if ((uint64_t)ids[row * topk + k] >= (uint64_t)experts)
                    continue;
                weight[found] = weights[row * topk + k];
                terms[found++] = (const char *)(y + *sorted++ * hidden);
            }
            sum_rows(FLOAT32, to + row * pitch, terms, weight, found, hidden, 0, 0);
        }
}
