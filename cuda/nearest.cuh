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
    static __host__ __device__ __forceinline__ place empty()
    {
        return {~UINT64_C(0)};
    }
    static __host__ __device__ __forceinline__ place least()
    {
        return {0};
    }
    __device__ __forceinline__ float distance2() const
    {
        return __uint_as_float((uint32_t)(bits >> 32));
    }
    __device__ __forceinline__ int32_t row() const
    {
        return (int32_t)(uint32_t)bits;
    }
    __device__ __forceinline__ bool before(place other) const
    {
        return bits < other.bits;
    }
};

template <> struct place<double> {
    uint64_t distance;
    uint32_t number;

    static __host__ __device__ __forceinline__ place of(uint64_t distance, uint32_t row)
    {
        return {distance, row};
    }
    static __device__ __forceinline__ place of(double distance2, int32_t row)
    {
        return {distance2 != distance2 ? UINT64_C(0x7fffffffffffffff) : (uint64_t)__double_as_longlong(distance2),
                (uint32_t)row};
    }
    static __host__ __device__ __forceinline__ place empty()
    {
        return {~UINT64_C(0), ~0u};
    }
    static __host__ __device__ __forceinline__ place least()
    {
        return {0, 0};
    }
    __device__ __forceinline__ double distance2() const
    {
        return __longlong_as_double((long long)distance);
    }
    __device__ __forceinline__ int32_t row() const
    {
        return (int32_t)number;
    }
    __device__ __forceinline__ bool before(place other) const
    {
        return distance < other.distance || (distance == other.distance && number < other.number);
    }
};

/* a takes what comes first of both, b the other. Written out for the packed place, as compilers make branches of it. */
template <typename R> __device__ __forceinline__ void exchange(place<R> &a, place<R> &b)
{
    const bool swap = b.before(a);
    const auto first = swap ? b : a, second = swap ? a : b;

    a = first;
    b = second;
}

template <> __device__ __forceinline__ void exchange<float>(place<float> &a, place<float> &b)
{
    uint64_t first, second;

    asm("{ .reg .pred p; setp.lt.u64 p, %3, %2; selp.b64 %0, %3, %2, p; selp.b64 %1, %2, %3, p; }"
        : "=&l"(first), "=&l"(second)
        : "l"(a.bits), "l"(b.bits));
    a.bits = first;
    b.bits = second;
}

__device__ __forceinline__ void exchange(uint32_t &a, uint32_t &b)
{
    const uint32_t first = min(a, b), second = max(a, b);

    a = first;
    b = second;
}

/* The one that comes first. */
template <typename R> __device__ __forceinline__ place<R> first_of(place<R> a, place<R> b)
{
    return b.before(a) ? b : a;
}

template <> __device__ __forceinline__ place<float> first_of<float>(place<float> a, place<float> b)
{
    uint64_t first;

    asm("{ .reg .pred p; setp.lt.u64 p, %2, %1; selp.b64 %0, %2, %1, p; }" : "=l"(first) : "l"(a.bits), "l"(b.bits));
    return {first};
}

/* Whether Batcher's odd-even merge of runs of `size` compares i with i + step. */
__host__ __device__ constexpr bool merges(int i, int step, int size)
{
    return i >= step % size && (i - step % size) % (2 * step) < step && i / (2 * size) == (i + step) / (2 * size);
}

/* One column of the sorting network after another, all indices known to the compiler. */
template <int I, int STEP, int SIZE, typename T, int N> __device__ __forceinline__ void merge_column(T (&x)[N])
{
    if constexpr (I + STEP < N) {
        if constexpr (merges(I, STEP, SIZE)) exchange(x[I], x[I + STEP]);
        merge_column<I + 1, STEP, SIZE>(x);
    }
}

template <int STEP, int SIZE, typename T, int N> __device__ __forceinline__ void merge_runs(T (&x)[N])
{
    if constexpr (STEP > 0) {
        merge_column<0, STEP, SIZE>(x);
        merge_runs<STEP / 2, SIZE>(x);
    }
}

/* Sorts N places, a power of two. */
template <int SIZE = 1, typename T, int N> __device__ __forceinline__ void sort_places(T (&x)[N])
{
    if constexpr (SIZE < N) {
        merge_runs<SIZE, SIZE>(x);
        sort_places<2 * SIZE>(x);
    }
}

/* The power of two that is not below n. */
__host__ __device__ constexpr int power_above(int n)
{
    int power = 1;

    while (power < n) power *= 2;
    return power;
}

/* Sorts a sequence that rises, then falls. N that is no power of two: as if least places came before, which stay
 * there. */
template <int N, int STEP = power_above(N) / 2, typename T> __device__ __forceinline__ void sort_bitonic(T (&x)[N])
{
    if constexpr (STEP > 0) {
#pragma unroll
        for (int r = 0; r < N; r++)
            if (!((r + power_above(N) - N) & STEP)) exchange(x[r], x[r + STEP]);
        sort_bitonic<N, STEP / 2>(x);
    }
}

/* The place of the lane whose number is this one's with the bits of `lanes` turned. */
__device__ __forceinline__ place<float> other_place(place<float> x, int lanes)
{
    return {__shfl_xor_sync(ALL_LANES, x.bits, lanes)};
}
__device__ __forceinline__ place<double> other_place(place<double> x, int lanes)
{
    return {__shfl_xor_sync(ALL_LANES, x.distance, lanes), __shfl_xor_sync(ALL_LANES, x.number, lanes)};
}

/* Up to K places in registers, nearest first. With k < K the first K − k hold what nothing comes before. New places
 * come in groups of GROUP, which are sorted and merged in, except that short lists take them one by one. */
template <typename R, int K> struct register_list {
    static constexpr int GROUP = K <= 8 ? 1 : K <= 16 || sizeof(R) == 8 ? 8 : 16;
    place<R>             places[K];

    __device__ __forceinline__ void clear(int64_t k, place<R> empty)
    {
#pragma unroll
        for (int r = 0; r < K; r++) places[r] = r < K - (int)k ? place<R>::least() : empty;
    }
    __device__ __forceinline__ place<R> farthest() const
    {
        return places[K - 1];
    }
    __device__ __forceinline__ void insert(place<R> (&x)[GROUP]) /* places that are not there are empty ones */
    {
        if constexpr (GROUP == 1) {
#pragma unroll
            for (int r = 0; r < K; r++) exchange(places[r], x[0]);
            return;
        }
        sort_places(x);
        /* The nearest of an ascending and a descending sequence, place by place, are the K nearest of both, first
         * rising, then falling: a bitonic sequence, which log K steps sort. */
#pragma unroll
        for (int g = 0; g < GROUP; g++) places[K - 1 - g] = first_of(places[K - 1 - g], x[g]);
        sort_bitonic(places);
    }
    __device__ __forceinline__ void sort()
    {
    }
    template <typename F> __device__ __forceinline__ void each(int64_t k, F f) const
    {
#pragma unroll
        for (int r = 0; r < K; r++)
            if (r >= K - (int)k) f(r - (K - (int)k), places[r]);
    }
};

/* Any k: a heap with the farthest place on top, in global memory, the lists of a warp interleaved. */
template <typename R> struct heap_list {
    static constexpr int GROUP = 1;
    place<R>            *places; /* place r of this lane at r · WARP */
    int64_t              size;

    __device__ __forceinline__ place<R> &at(int64_t r) const
    {
        return places[r * WARP];
    }
    __device__ void clear(int64_t k, place<R> empty)
    {
        size = k;
        for (int64_t r = 0; r < k; r++) at(r) = empty;
    }
    __device__ __forceinline__ place<R> farthest() const
    {
        return at(0);
    }
    __device__ void sink(place<R> x, int64_t length) /* puts x in the place of the top */
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
    __device__ void insert(place<R> (&x)[GROUP])
    {
        if (x[0].before(farthest())) sink(x[0], size);
    }
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
