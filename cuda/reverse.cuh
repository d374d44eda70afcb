/* Who picked a row: the places of all neighbour lists, by the row that stands in them. Backward passes sum over it
 * in this fixed order, so that every run gives the same bits. */
#ifndef MUVOX_CUDA_REVERSE_H
#define MUVOX_CUDA_REVERSE_H

#include "device.cuh"
#include "launch.cuh"

/* The places that hold row j of all are places[begins[j]] … places[ends[j] − 1], ascending. A place is rank r of row
 * i of all, written i · 2^bits + r. P is uint32_t or uint64_t. */
template <typename P> struct reverse_list {
    const P                           *places;
    const int64_t                     *begins, *ends; /* (N) */
    int                                bits;
    __device__ __forceinline__ int64_t row(int64_t e) const
    {
        return (int64_t)(places[e] >> bits);
    }
    __device__ __forceinline__ int rank(int64_t e) const
    {
        return (int)(places[e] & (((P)1 << bits) - 1));
    }
};

/* neighbours (Q, k) int32, rows by query_sets; numbers within sets; those outside their set are passed over. Memory:
 * 4 bytes a place (8 from 2^32 places on) and 16 a row. Uniform sets that are not too large are counted, one block
 * each, with nothing beside; others are sorted, which takes 16 (24) bytes a place meanwhile. N is below 2^32 − 1. */
template <typename P>
muvox_status reverse_neighbours(muvox_context *ctx, const char *op, const muvox_sets &sets,
                                const muvox_sets &query_sets, const muvox_output &neighbours, int64_t k,
                                workspace *hold, reverse_list<P> *list);

/* The same from picks and places (count) that are there already: the row of all that each place holds, N or more for
 * none. Each list ends where the next begins. */
template <typename P>
muvox_status reverse_picks(muvox_context *ctx, const char *op, int64_t N, int64_t count, const uint32_t *picks,
                           const P *places, workspace *hold, reverse_list<P> *list);

/* Whether the places of such sets are counted: nothing is taken beside *hold then. */
muvox_status places_are_counted(muvox_context *ctx, const char *op, const muvox_sets &sets,
                                const muvox_sets &query_sets, int64_t k, bool *counted);

/* Sets that are enough for counting to be worth it, one block each. */
enum { MANY_SETS = 64 };

/* f with a value of the type that holds the places of so many rows. */
template <typename F> muvox_status with_places(int64_t rows, int64_t k, F f)
{
    return rows <= INT64_C(0xffffffff) >> bits_below(k) ? f(uint32_t()) : f(uint64_t());
}

#endif
