/* A search that keeps more candidates than neighbours, each in 32 bits, and decides between them in the end. */
#ifndef MUVOX_CUDA_SHORTLIST_H
#define MUVOX_CUDA_SHORTLIST_H

#include "itinerary.cuh"

/* What it is for: rows in float of up to 8 columns, up to 32 neighbours, and sets whose rows are numbered in 15 bits. Larger sets
 * of a ragged batch are left to the other search. */
enum { SHORTLIST_DIMS = 8, SHORTLIST_K = 32, SHORTLIST_BITS = 15 };

inline bool shortlist_suits(const muvox_sets &sets, int64_t d, int64_t k)
{
    return d <= SHORTLIST_DIMS && k <= SHORTLIST_K && (sets.splits || sets.size <= 1 << SHORTLIST_BITS);
}

/* coords: what a.rows was ordered from. redo (items): 1 where a tile of queries still has to be searched, 0 elsewhere. */
muvox_status search_by_shortlist(muvox_context *ctx, const char *op, const search_arguments<float> &a,
                                 const muvox_matrix &coords, uint8_t *redo);

#endif
