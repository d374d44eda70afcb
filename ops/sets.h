/* Where the rows of a set lie. */
#ifndef MUVOX_OPS_SETS_H
#define MUVOX_OPS_SETS_H

#include "muvox/types.h"

#include <stdbool.h>

/* Number of rows of all sets before set s: where its rows begin in (N, …) numbering. */
static inline int64_t set_begin(const muvox_sets *sets, int64_t s)
{
    return sets->splits ? sets->splits[s] : s * sets->size;
}

static inline int64_t set_rows(const muvox_sets *sets, int64_t s)
{
    return sets->splits ? sets->splits[s + 1] - sets->splits[s] : sets->size;
}

static inline int64_t largest_set(const muvox_sets *sets)
{
    int64_t largest = 0;

    if (!sets->splits) return sets->count ? sets->size : 0;
    for (int64_t s = 0; s < sets->count; s++) {
        const int64_t M = set_rows(sets, s);

        if (M > largest) largest = M;
    }
    return largest;
}

/* Element offset of row i of set s in a matrix (or output) with these strides. */
#define ROW(matrix, sets, s, i)                                                                                        \
    ((sets)->splits ? ((sets)->splits[s] + (i)) * (matrix)->row_stride                                                 \
                    : (s) * (matrix)->set_stride + (i) * (matrix)->row_stride)

/* About how many pairs of rows there are: what search and attention look at. */
static inline double set_pairs(const muvox_sets *sets)
{
    return (double)sets->rows * (double)largest_set(sets);
}

/* Whether row i of set s takes part: mask is (N, 1) uint8, or has no data and all do. */
static inline bool row_valid(const muvox_matrix *mask, const muvox_sets *sets, int64_t s, int64_t i)
{
    return !mask->data || ((const uint8_t *)mask->data)[ROW(mask, sets, s, i)];
}

/* The rows of set s that take part, in order; returns how many. */
static inline int64_t valid_rows(const muvox_matrix *mask, const muvox_sets *sets, int64_t s, int32_t *rows)
{
    int64_t count = 0;

    for (int64_t i = 0; i < set_rows(sets, s); i++)
        if (row_valid(mask, sets, s, i)) rows[count++] = (int32_t)i;
    return count;
}

/* Work items: every set cut into blocks of rows. Item numbers are handed out by an upper bound, so that no list is
 * needed: set s owns the items from set_begin(s) / block + s on, and the last of them may be empty. */
static inline int64_t block_items(const muvox_sets *sets, int64_t block)
{
    return sets->rows / block + sets->count;
}

/* The set of an item, and its first row within the set, which is past the set's end for an empty item. */
static inline int64_t block_set(const muvox_sets *sets, int64_t block, int64_t item, int64_t *row)
{
    int64_t low = 0, high = sets->count - 1; /* the last set whose first item is not after this one */

    while (low < high) {
        const int64_t s = (low + high + 1) / 2;

        if (set_begin(sets, s) / block + s <= item)
            low = s;
        else
            high = s - 1;
    }
    *row = (item - set_begin(sets, low) / block - low) * block;
    return low;
}

#endif
