/* Lists of the nearest rows by keys of 32 bits: a distance² whose last bits make room for the number of the row. A
 * minimum and a maximum exchange two of them, where whole places (nearest.cuh) take six instructions. */
#ifndef MUVOX_CUDA_KEYS_H
#define MUVOX_CUDA_KEYS_H

#include "nearest.cuh"

static constexpr uint32_t NO_KEY = ~0u, NAN_BITS = 0x7fffffffu, INFINITY_BITS = 0x7f800000u;

/* Keys that are merged into a list at a time. */
enum { GROUP = 16 };

/* The L nearest rows by key, ascending; keys have `bits` bits of number. */
template <int L> struct shortlist {
    uint32_t keys[L], number_mask, radius; /* radius: bits of the largest distance² that is not too far */

    __device__ __forceinline__ uint32_t key(float distance2, uint32_t number) const
    {
        return (__float_as_uint(distance2) & ~number_mask) | number; /* what arithmetic gives for NaN is NAN_BITS */
    }
    /* The largest distance² of which something might still come in; NaN: any. */
    __device__ __forceinline__ float limit() const
    {
        return __uint_as_float(min(keys[L - 1] | number_mask, radius));
    }
    __device__ __forceinline__ void insert(uint32_t x)
    {
#pragma unroll
        for (int r = L - 1; r > 0; r--) keys[r] = min(keys[r], max(keys[r - 1], x));
        keys[0] = min(keys[0], x);
    }
    __device__ __forceinline__ void merge(uint32_t (&x)[GROUP])
    {
        sort_places(x);
        /* Rising, then falling: see register_list. */
#pragma unroll
        for (int g = 0; g < (GROUP < L ? GROUP : L); g++) keys[L - 1 - g] = min(keys[L - 1 - g], x[g]);
        sort_bitonic(keys);
    }
};

#endif
