/* A row's routing looked up and shown eight slots at a time, where the processor can: which of them name an expert that is
   here is as good as random, so that a branch for each costs more than all else. */

#ifndef SLOTS_H
#define SLOTS_H

#include "moefleet.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>

enum { SLOTS = 8 }; /* K has to divide by it */

/* Show a row's routing at its place: local experts, or -1, and weights, or 0. Returns whether any expert is here: if not,
   the place looks like one past all rows. */
static inline int show_slots(const Fleet *fleet, const Inbox *inbox, const int32_t *ids, const float *weights,
                             int64_t topk, int64_t place)
{
    _Alignas(64) int64_t experts[SLOTS];
    const __m256i last = _mm256_set1_epi32((int)fleet->experts);
    uint32_t any = 0;
    for (int64_t k = 0, at = place * topk; k < topk; k += SLOTS, at += SLOTS) {
        __m256i entries = _mm256_min_epu32(_mm256_loadu_si256((const void *)(ids + k)), last); /* see looked_up() */
        __m512i found = _mm512_i32gather_epi64(entries, (const void *)fleet->local, 8);
        __mmask8 here = (__mmask8)~_mm512_movepi64_mask(found);
        _mm512_storeu_si512(inbox->ids + at, found);
        _mm256_storeu_ps(inbox->weights + at, _mm256_maskz_loadu_ps(here, weights + k));
        _mm512_store_si512(experts, found);
        for (uint32_t left = here; left; left &= left - 1)
            inbox->expert_rows[experts[__builtin_ctz(left)]]++;
        any |= here;
    }
    return any > 0;
}
#else
enum { SLOTS = INT32_MAX }; /* no K divides by it */

static inline int show_slots(const Fleet *fleet, const Inbox *inbox, const int32_t *ids, const float *weights,
                             int64_t topk, int64_t place)
{
    (void)fleet, (void)inbox, (void)ids, (void)weights, (void)topk, (void)place;
    return 0;
}
#endif

#endif
