/* Who picked a row: the places of all neighbour lists, sorted by the row that stands in them. Backward passes sum over it in
 * this fixed order, so that every run gives the same bits. */
#ifndef MUVOX_CUDA_REVERSE_H
#define MUVOX_CUDA_REVERSE_H

#include "device.cuh"
#include "launch.cuh"

/* The places that hold row j of all are places[begins[j]] … places[begins[j + 1] − 1], ascending. A place is i · k + r:
 * rank r of row i of all. P is uint32_t or int64_t. */
template <typename P> struct reverse_list {
    const P       *places;
    const int64_t *begins; /* (N + 1) */
    int64_t        k;
};

/* neighbours (Q, k) int32, rows by query_sets; numbers within sets; those outside their set are passed over. Memory:
 * 8 N k bytes (12 from 2^32 places on) and 8 N, and as much again while it sorts. N is below 2^32 − 1. */
template <typename P>
muvox_status reverse_neighbours(muvox_context *ctx, const char *op, const muvox_sets &sets,
                                const muvox_sets &query_sets, const muvox_output &neighbours, int64_t k,
                                workspace *hold, reverse_list<P> *list);

/* The same from picks (count) that are there already: the row of all that each place holds, N or more for none. They are
 * overwritten. */
template <typename P>
muvox_status reverse_picks(muvox_context *ctx, const char *op, int64_t N, int64_t count, uint32_t *picks,
                           workspace *hold, reverse_list<P> *list);

/* f with a value of the type that holds all places. */
template <typename F> muvox_status with_places(int64_t places, F f)
{
    return places <= INT64_C(0xffffffff) ? f(uint32_t()) : f(int64_t());
}

#endif
