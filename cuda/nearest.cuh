/* Lists of the nearest rows found so far, one for each lane. */
#ifndef MUVOX_CUDA_NEAREST_H
#define MUVOX_CUDA_NEAREST_H

#include "device.cuh"

/* A distance² and a row as unsigned integers that compare as they rank: distances are never negative, so their bits do;
 * a NaN becomes the largest one, after +inf; ties go to the lower row. An empty place comes after everything. */
template <typename R> struct place;

template <> struct place<float> {
    uint64_t bits;

    static __host__ __device__ __forceinline__ place of(uint32_t distance, uint32_t row)
    {
        return {(uint64_t)distance << 32 | row};
    }
    static __device__ __forceinline__ place of(float distance2, int32_t row)
    {
        return of(distance2 != distance2 ? 0x7fffffffu : __float_as_uint(distance2), (uint32_t)row);
    }
    static __host__ __device__ __forceinline__ place empty() { return {~UINT64_C(0)}; }
    static __host__ __device__ __forceinline__ place least() { return {0}; }
    __device__ __forceinline__ float   distance2() const { return __uint_as_float((uint32_t)(bits >> 32)); }
    __device__ __forceinline__ int32_t row() const { return (int32_t)(uint32_t)bits; }
    __device__ __forceinline__ bool    before(place other) const { return bits < other.bits; }
};

template <> struct place<double> {
    uint64_t distance;
    uint32_t number;

    static __host__ __device__ __forceinline__ place of(uint64_t distance, uint32_t row) { return {distance, row}; }
    static __device__ __forceinline__ place of(double distance2, int32_t row)
    {
        return {distance2 != distance2 ? UINT64_C(0x7fffffffffffffff) : (uint64_t)__double_as_longlong(distance2),
                (uint32_t)row};
    }
    static __host__ __device__ __forceinline__ place empty() { return {~UINT64_C(0), ~0u}; }
    static __host__ __device__ __forceinline__ place least() { return {0, 0}; }
    __device__ __forceinline__ double  distance2() const { return __longlong_as_double((long long)distance); }
    __device__ __forceinline__ int32_t row() const { return (int32_t)number; }
    __device__ __forceinline__ bool    before(place other) const
    {
        return distance < other.distance || (distance == other.distance && number < other.number);
    }
};

/* Up to K places in registers, nearest first. With k < K the first K − k hold what nothing comes before. */
template <typename R, int K> struct register_list {
    place<R> places[K];

    __device__ __forceinline__ void clear(int64_t k, place<R> empty)
    {
#pragma unroll
        for (int r = 0; r < K; r++) places[r] = r < K - (int)k ? place<R>::least() : empty;
    }
    __device__ __forceinline__ place<R> farthest() const { return places[K - 1]; }
    __device__ __forceinline__ void     insert(place<R> x) /* which comes before the farthest */
    {
#pragma unroll
        for (int r = K - 1; r > 0; r--)
            places[r] = x.before(places[r - 1]) ? places[r - 1] : x.before(places[r]) ? x : places[r];
        places[0] = x.before(places[0]) ? x : places[0];
    }
    __device__ __forceinline__ void sort() {}
    template <typename F> __device__ __forceinline__ void each(int64_t k, F f) const
    {
#pragma unroll
        for (int r = 0; r < K; r++)
            if (r >= K - (int)k) f(r - (K - (int)k), places[r]);
    }
};

/* Any k: a heap with the farthest place on top, in global memory, the lists of a warp interleaved. */
template <typename R> struct heap_list {
    place<R> *places; /* place r of this lane at r · WARP */
    int64_t   size;

    __device__ __forceinline__ place<R> &at(int64_t r) const { return places[r * WARP]; }
    __device__ void                      clear(int64_t k, place<R> empty)
    {
        size = k;
        for (int64_t r = 0; r < k; r++) at(r) = empty;
    }
    __device__ __forceinline__ place<R> farthest() const { return at(0); }
    __device__ void                     sink(place<R> x, int64_t length) /* puts x in the place of the top */
    {
        int64_t hole = 0;

        for (int64_t child = 1; child < length; child = 2 * hole + 1) {
            if (child + 1 < length && at(child).before(at(child + 1))) child++;
            if (!x.before(at(child))) break;
            at(hole) = at(child);
            hole = child;
        }
        at(hole) = x;
    }
    __device__ void insert(place<R> x) { sink(x, size); }
    __device__ void sort()
    {
        for (int64_t last = size - 1; last > 0; last--) {
            const place<R> top = at(0), x = at(last);

            sink(x, last);
            at(last) = top;
        }
    }
    template <typename F> __device__ void each(int64_t k, F f) const
    {
        for (int64_t r = 0; r < k; r++) f(r, at(r));
    }
};

#endif
