/* Huge pages for the memory that experts' rows are placed in, and for what experts make of them.

   It is large and mostly empty, so that its pages are taken one by one, as rows come. Rows of some size then miss the TLB
   all the time: where an expert has enough of them, this rank gathers their pages. Peers see the same memory. */

#define _GNU_SOURCE
#include "moefleet.h"

#include <sys/mman.h>

#ifndef MADV_COLLAPSE
enum { MADV_COLLAPSE = 25 };
#endif

static const int64_t HUGE_PAGE = 1 << 21;
static const int64_t ENOUGH = 1 << 18; /* of a huge page, in bytes: it takes no more than eight times its rows */

static void gather(char *rows, int64_t bytes)
{
    char *end = rows + bytes;
    for (char *page = rows - (uintptr_t)rows % (uintptr_t)HUGE_PAGE; page < end; page += HUGE_PAGE) {
        const char *first = rows > page ? rows : page, *last = end < page + HUGE_PAGE ? end : page + HUGE_PAGE;
        if (last - first >= ENOUGH)
            madvise(page, (size_t)HUGE_PAGE, MADV_COLLAPSE); /* where the kernel can */
    }
}

/* counts: [L] rows that have arrived for each expert. Nothing is gathered twice, and what experts make of rows not in the
   first step of a set: it is not there yet. */
void moefleet_gather_pages(Fleet *fleet, int64_t set, const int32_t *counts)
{
    char *mine = segment(fleet, fleet->rank);
    int64_t making = fleet->making[set];
    int64_t *placed = fleet->gathered + 2 * set * fleet->locals, *made = fleet->gathered + (2 * making + 1) * fleet->locals;
    for (int64_t expert = 0; expert < fleet->locals; expert++) {
        int64_t bytes = counts[expert] * fleet->row_bytes, at = expert * fleet->block * fleet->row_bytes;
        if (placed[expert] && bytes >= made[expert] + ENOUGH) {
            gather(mine + fleet->made[making] + at, bytes);
            made[expert] = bytes;
        }
        if (bytes >= placed[expert] + ENOUGH) {
            gather(mine + fleet->landing[set] + at, bytes);
            placed[expert] = bytes;
        }
    }
}
