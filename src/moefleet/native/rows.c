/* Rows: copied, and summed in float32, past the caches where they would only push out what is needed again. */

#include "lanes.h"
#include "moefleet.h"

enum { LINE = 64 }; /* bytes */

/* Whether rows go past the caches: only whole lines can. */
int streams(const Fleet *fleet, int64_t bytes, const void *to)
{
#if defined(__SSE2__)
    return bytes >= fleet->stream_bytes && fleet->row_bytes % LINE == 0 && (uintptr_t)to % LINE == 0;
#else
    (void)fleet, (void)bytes, (void)to;
    return 0;
#endif
}

/* Streamed stores are ordered with no other stores, before or after, but for this: neither with the step number that is
   published before them, nor with the flag that commits them. */
void stream_fence(int streamed)
{
#if defined(__SSE2__)
    if (streamed)
        _mm_sfence();
#else
    (void)streamed;
#endif
}

static inline void stream_line(char *to, const char *from)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
    for (int i = 0; i < LINE; i += 32)
        _mm256_stream_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
#elif defined(__SSE2__)
    for (int i = 0; i < LINE; i += 16)
        _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
#else
    memcpy(to, from, LINE);
#endif
}

/* Copy a row; `next` is what will be read after it. */
void copy_row(char *to, const char *from, const char *next, int64_t bytes, int stream)
{
    if (!stream) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += LINE) {
        __builtin_prefetch(next + i, 0, 2);
        stream_line(to + i, from + i);
    }
}

/* Columns that are summed at once, in registers: whole lines of every row type. */
enum { REGISTERS = WIDTH > 4 ? 4 : 8, COLUMNS = REGISTERS * WIDTH };

/* How far ahead sums read, in bytes. What lies behind a row is most often the same rank's or expert's next one. */
enum { AHEAD = 1024 };

static inline void read_ahead(const char *from, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch(from + AHEAD + i, 0, 2);
}

static inline Lanes load(int type, const char *from)
{
    Halves halves;
    if (type == FLOAT32) {
        Lanes values;
        memcpy(&values, from, sizeof values);
        return values;
    }
    memcpy(&halves, from, sizeof halves);
    return type == BFLOAT16 ? lanes_from_bfloat16(halves) : lanes_from_float16(halves);
}

static inline void store(int type, char *to, Lanes values, int away)
{
    if (type == FLOAT32) {
        memcpy(to, &values, sizeof values);
    } else {
        Halves halves = type == BFLOAT16 ? lanes_to_bfloat16(values, away) : lanes_to_float16(values);
        memcpy(to, &halves, sizeof halves);
    }
}

static inline float load1(int type, const char *from)
{
    uint16_t half;
    if (type == FLOAT32) {
        float value;
        memcpy(&value, from, sizeof value);
        return value;
    }
    memcpy(&half, from, sizeof half);
    return type == BFLOAT16 ? from_bfloat16(half) : from_float16(half);
}

static inline void store1(int type, char *to, float value, int away)
{
    uint16_t half;
    if (type == FLOAT32) {
        memcpy(to, &value, sizeof value);
    } else {
        half = type == BFLOAT16 ? to_bfloat16(value, away) : to_float16(value);
        memcpy(to, &half, sizeof half);
    }
}

static inline void store_columns(int type, char *to, const Lanes *sums, int away, int stream)
{
    int64_t size = type == FLOAT32 ? 4 : 2;
    char done[4 * COLUMNS];
    for (int i = 0; i < REGISTERS; i++)
        store(type, done + i * WIDTH * size, sums[i], away);
    if (stream)
        for (int64_t i = 0; i < COLUMNS * size; i += LINE)
            stream_line(to + i, done + i);
    else
        memcpy(to, done, (size_t)(COLUMNS * size));
}

/* The sum for one row type, which the compiler knows here, as it knows whether there are weights. */
static inline void sum_typed(int type, int weighted, char *to, const char *const *rows, const float *weights,
                             int64_t count, int64_t hidden, int away, int stream)
{
    int64_t size = type == FLOAT32 ? 4 : 2, at = 0;
    for (; at + COLUMNS <= hidden; at += COLUMNS) {
        Lanes sums[REGISTERS] = {{0}};
        for (int64_t k = 0; k < count; k++) {
            const char *row = rows[k] + at * size;
            read_ahead(row, COLUMNS * size);
            for (int i = 0; i < REGISTERS; i++) {
                Lanes values = load(type, row + i * WIDTH * size);
                sums[i] = weighted ? fused(weights[k], values, sums[i]) : sums[i] + values;
            }
        }
        store_columns(type, to + at * size, sums, away, stream);
    }
    for (; at < hidden; at++) {
        float sum = 0.0f;
        for (int64_t k = 0; k < count; k++) {
            float value = load1(type, rows[k] + at * size);
            sum = weighted ? fused1(weights[k], value, sum) : sum + value;
        }
        store1(type, to + at * size, sum, away);
    }
}

/* The sum of `count` rows, one after the other, in float32 and rounded once. `weights` may be missing. */
void sum_rows(int type, char *to, const char *const *rows, const float *weights, int64_t count, int64_t hidden,
              int away, int stream)
{
    if (type == FLOAT32 && weights)
        sum_typed(FLOAT32, 1, to, rows, weights, count, hidden, away, stream);
    else if (type == FLOAT32)
        sum_typed(FLOAT32, 0, to, rows, weights, count, hidden, away, stream);
    else if (type == BFLOAT16 && weights)
        sum_typed(BFLOAT16, 1, to, rows, weights, count, hidden, away, stream);
    else if (type == BFLOAT16)
        sum_typed(BFLOAT16, 0, to, rows, weights, count, hidden, away, stream);
    else if (weights)
        sum_typed(FLOAT16, 1, to, rows, weights, count, hidden, away, stream);
    else
        sum_typed(FLOAT16, 0, to, rows, weights, count, hidden, away, stream);
}

static inline Lanes as_stored(int type, Lanes values)
{
    if (type == FLOAT32)
        return values;
    if (type == BFLOAT16)
        return lanes_from_bfloat16(lanes_to_bfloat16(values, 0));
    return lanes_from_float16(lanes_to_float16(values));
}

static inline float as_stored1(int type, float value)
{
    if (type == FLOAT32)
        return value;
    return type == BFLOAT16 ? from_bfloat16(to_bfloat16(value, 0)) : from_float16(to_float16(value));
}

static inline void sum_groups_typed(int type, char *to, const char *const *rows, const float *weights,
                                    const int64_t *ends, int64_t groups, int64_t hidden, int away, int stream)
{
    int64_t size = type == FLOAT32 ? 4 : 2, at = 0;
    for (; at + COLUMNS <= hidden; at += COLUMNS) {
        Lanes sums[REGISTERS] = {{0}};
        for (int64_t g = 0, k = 0; g < groups; g++) {
            Lanes part[REGISTERS] = {{0}};
            for (; k < ends[g]; k++) {
                const char *row = rows[k] + at * size;
                read_ahead(row, COLUMNS * size);
                for (int i = 0; i < REGISTERS; i++)
                    part[i] = fused(weights[k], load(type, row + i * WIDTH * size), part[i]);
            }
            for (int i = 0; i < REGISTERS; i++)
                sums[i] += as_stored(type, part[i]);
        }
        store_columns(type, to + at * size, sums, away, stream);
    }
    for (; at < hidden; at++) {
        float sum = 0.0f;
        for (int64_t g = 0, k = 0; g < groups; g++) {
            float part = 0.0f;
            for (; k < ends[g]; k++)
                part = fused1(weights[k], load1(type, rows[k] + at * size), part);
            sum += as_stored1(type, part);
        }
        store1(type, to + at * size, sum, away);
    }
}

/* The sum of groups of rows: each group is weighted, summed, and rounded to the row type, as if somebody had done so
   elsewhere and sent the result; then they are added. Group g ends before row ends[g]. A row that is such a result
   already is a group with weight 1, which changes no bit of it. */
void sum_groups(int type, char *to, const char *const *rows, const float *weights, const int64_t *ends, int64_t groups,
                int64_t hidden, int away, int stream)
{
    if (type == FLOAT32)
        sum_groups_typed(FLOAT32, to, rows, weights, ends, groups, hidden, away, stream);
    else if (type == BFLOAT16)
        sum_groups_typed(BFLOAT16, to, rows, weights, ends, groups, hidden, away, stream);
    else
        sum_groups_typed(FLOAT16, to, rows, weights, ends, groups, hidden, away, stream);
}
