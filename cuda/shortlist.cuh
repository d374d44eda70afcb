/* A search that keeps more candidates than neighbours, each in 32 bits, and decides between them in the end. */
#ifndef MUVOX_CUDA_SHORTLIST_H
#define MUVOX_CUDA_SHORTLIST_H

#include "itinerary.cuh"

/* What it is for: rows in float of up to 8 columns, up to 32 neighbours, and sets whose rows are numbered in 15 bits
 * (larger ones of a ragged batch are left to the other search). Not for a few large sets: they do not fill a device,
 * and a warp's own time counts. */
enum { SHORTLIST_DIMS = 8, SHORTLIST_K = 32, SHORTLIST_BITS = 15, FEW_TILES = 2048, FEW_TILES_ROWS = 8192 };

inline bool shortlist_suits(const muvox_sets &sets, int64_t query_tiles, int64_t d, int64_t k)
{
    if (d > SHORTLIST_DIMS || k > SHORTLIST_K) return false;
    return sets.splits || sets.size <= (query_tiles < FEW_TILES ? FEW_TILES_ROWS : 1 << SHORTLIST_BITS);
}

/* coords: what a.rows was ordered from. redo (items): the lanes of each tile of queries that still have to be
 * searched for. */
muvox_status search_by_shortlist(muvox_context *ctx, const char *op, const search_arguments<float> &a,
                                 const muvox_matrix &coords, uint32_t *redo);

#endif
