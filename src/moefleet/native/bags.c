/* Rows of any table: copied to places, and summed in bags. What a caller got wrong is refused, before anything is read. */

#include <stdlib.h>

#include "moefleet.h"

static int within(const int64_t *rows, int64_t count, int64_t most)
{
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= most)
            return 0;
    return 1;
}

/* Copy row rows[i] of a table of `height` rows to place places[i] of `places_most`. Returns -1 where there is none. */
int64_t moefleet_copy_rows(const char *table, int64_t pitch, int64_t height, const int64_t *rows, int64_t count,
                           char *out, int64_t places_most, const int64_t *places, int64_t bytes, int64_t stream)
{
    if (!within(rows, count, height) || !within(places, count, places_most))
        return -1;
    for (int64_t i = 0; i < count; i++) {
        const char *from = table + rows[i] * pitch;
        const char *next = i + 1 < count ? table + rows[i + 1] * pitch : from;
        copy_row(out + places[i] * bytes, from, next, bytes, (int)stream);
    }
    stream_fence((int)stream);
    return 0;
}

/* Sum rows[bag[b]] ... rows[bag[b + 1] - 1] of a table for each b, in this order, in float32, rounded once. `weights`
   may be missing. Returns -1 where there is no such row, or no memory. */
int64_t moefleet_sum_bags(int64_t type, const char *table, int64_t pitch, int64_t height, const int64_t *rows,
                          const float *weights, const int64_t *bag, int64_t bags, char *out, int64_t out_pitch,
                          int64_t hidden, int64_t away)
{
    int64_t most = 1;
    for (int64_t b = 0; b < bags; b++)
        if (bag[b + 1] - bag[b] > most)
            most = bag[b + 1] - bag[b];
    if (bags && !within(rows + bag[0], bag[bags] - bag[0], height))
        return -1;
    const char **at = malloc((size_t)most * sizeof *at);
    if (!at)
        return -1;
    for (int64_t b = 0; b < bags; b++) {
        int64_t first = bag[b], count = bag[b + 1] - first;
        for (int64_t k = 0; k < count; k++)
            at[k] = table + rows[first + k] * pitch;
        sum_rows((int)type, out + b * out_pitch, at, weights ? weights + first : NULL, count, hidden, (int)away, 0);
    }
    free(at);
    return 0;
}
