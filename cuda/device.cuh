/* What all kernels share: dtypes, where the rows of a set lie, and the work items that sets are cut into. */
#ifndef MUVOX_CUDA_DEVICE_H
#define MUVOX_CUDA_DEVICE_H

#include "muvox/types.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

enum { WARP = 32 };
constexpr unsigned ALL_LANES = 0xffffffffu;

/* The arithmetic for data of type T: float, double for double. */
template <typename T> struct wide {
    using type = float;
};
template <> struct wide<double> {
    using type = double;
};
template <typename T> using wide_t = typename wide<T>::type;

/* The dtype of an arithmetic. */
template <typename R> constexpr muvox_dtype DTYPE = sizeof(R) == sizeof(double) ? MUVOX_F64 : MUVOX_F32;

__device__ __forceinline__ float widen(__half x)
{
    return __half2float(x);
}
__device__ __forceinline__ float widen(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}
__device__ __forceinline__ float widen(float x)
{
    return x;
}
__device__ __forceinline__ double widen(double x)
{
    return x;
}

/* Rounds to nearest even. */
template <typename T> __device__ __forceinline__ T narrow(wide_t<T> x);
template <> __device__ __forceinline__ __half      narrow<__half>(float x)
{
    return __float2half_rn(x);
}
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ float narrow<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ double narrow<double>(double x)
{
    return x;
}

/* One number of any floating dtype, where the switch costs little beside the load. */
template <typename R> __device__ __forceinline__ R load(const void *data, muvox_dtype dtype, int64_t at)
{
    switch (dtype) {
    case MUVOX_F16: return static_cast<R>(widen(static_cast<const __half *>(data)[at]));
    case MUVOX_BF16: return static_cast<R>(widen(static_cast<const __nv_bfloat16 *>(data)[at]));
    case MUVOX_F64: return static_cast<R>(static_cast<const double *>(data)[at]);
    default: return static_cast<R>(static_cast<const float *>(data)[at]);
    }
}

template <typename R> __device__ __forceinline__ void store(void *data, muvox_dtype dtype, int64_t at, R x)
{
    switch (dtype) {
    case MUVOX_F16: static_cast<__half *>(data)[at] = __float2half_rn(static_cast<float>(x)); break;
    case MUVOX_BF16: static_cast<__nv_bfloat16 *>(data)[at] = __float2bfloat16_rn(static_cast<float>(x)); break;
    case MUVOX_F64: static_cast<double *>(data)[at] = static_cast<double>(x); break;
    default: static_cast<float *>(data)[at] = static_cast<float>(x); break;
    }
}

__device__ __forceinline__ float fused(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fused(double a, double b, double c)
{
    return __fma_rn(a, b, c);
}

/* Calls f with a value of the type of dtype: `f(T())`, where T names the type inside. */
template <typename F> auto with_dtype(muvox_dtype dtype, F f)
{
    switch (dtype) {
    case MUVOX_F16: return f(__half());
    case MUVOX_BF16: return f(__nv_bfloat16());
    case MUVOX_F64: return f(double());
    default: return f(float());
    }
}

/* a / b of numbers that are not negative: divisions of 64 bits take long, and are seldom needed. */
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b)
{
    return ((uint64_t)a | (uint64_t)b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}

/* Sets: splits lie on the device and nobody has checked them, so bad ones are clamped: no access leaves the rows. */

__device__ __forceinline__ int64_t clamped(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

__device__ __forceinline__ int64_t set_begin(const muvox_sets &sets, int64_t s)
{
    return sets.splits ? clamped(sets.splits[s], 0, sets.rows) : s * sets.size;
}

__device__ __forceinline__ int64_t set_end(const muvox_sets &sets, int64_t s)
{
    return sets.splits ? clamped(sets.splits[s + 1], set_begin(sets, s), sets.rows) : (s + 1) * sets.size;
}

/* Where row i of set s, the first of whose rows is row `begin` of all, lies in a matrix or output. */
template <typename M>
__device__ __forceinline__ int64_t row_at(const M &m, const muvox_sets &sets, int64_t begin, int64_t s, int64_t i)
{
    return sets.splits ? (begin + i) * m.row_stride : s * m.set_stride + i * m.row_stride;
}

/* The rows of one set of a matrix or output, whose strides within a set fit 32 bits: checked by check_row_stride. */
template <typename T> struct set_rows {
    T  *first;
    int stride;
    template <typename M>
    __device__ __forceinline__ set_rows(const M &m, const muvox_sets &sets, int64_t begin, int64_t s)
        : first((T *)m.data + row_at(m, sets, begin, s, 0)), stride((int)m.row_stride)
    {
    }
    __device__ __forceinline__ T *operator[](int i) const
    {
        return first + (int64_t)i * stride;
    }
};

/* The row at a place of all, in an order of each set's rows that has ~row for those that take no part, or in none
 * (NULL). Wrong splits leave places without a row of their set: they get their own. */
__device__ __forceinline__ int ordered_row(const int32_t *order, int64_t place, int64_t begin, int64_t rows)
{
    const int own = (int)(place - begin), listed = order ? order[place] : own, row = listed < 0 ? ~listed : listed;

    return row < rows ? row : own;
}

/* A number from such an order; where wrong splits let sets overlap it may be no row of this one, and counts as
 * taking no part. */
__device__ __forceinline__ int32_t row_number(int32_t listed, int64_t rows)
{
    return (listed < 0 ? ~listed : listed) < rows ? listed : -1;
}

__device__ __forceinline__ bool row_valid(const muvox_matrix &mask, const muvox_sets &sets, int64_t begin, int64_t s,
                                          int64_t i)
{
    return !mask.data || static_cast<const uint8_t *>(mask.data)[row_at(mask, sets, begin, s, i)];
}

/* The largest s in [0, count) with key(s) <= x, 0 if there is none; keys do not decrease. */
template <typename K> __device__ __forceinline__ int64_t last_not_above(int64_t count, int64_t x, K key)
{
    int64_t low = 0, high = count - 1;

    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;

        if (key(middle) <= x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The set of row `row` of all. Empty sets own no row. */
__device__ __forceinline__ int64_t set_of_row(const muvox_sets &sets, int64_t row)
{
    if (!sets.splits) return quotient(row, sets.size);
    return last_not_above(sets.count, row, [&](int64_t s) { return set_begin(sets, s); });
}

/* Tiles: every set cut into pieces of `size` rows. They are numbered by an upper bound, so that no list and no scan
 * is needed: set s owns the tiles from begin / size + s on (in a uniform batch from s · ⌈M / size⌉ on); some stay
 * empty, but each set has at least one. */
struct tile {
    int64_t set, begin, rows; /* the set, the first of its rows among all, and how many it has */
    int64_t first;            /* the tile's first row within the set; not before `rows` if the tile is empty */
};

/* Tiles of each set of a uniform batch: one at least, so that every set has a tile in any batch. */
__host__ __device__ __forceinline__ int64_t uniform_tiles(const muvox_sets &sets, int64_t size)
{
    return sets.size > size ? (sets.size + size - 1) / size : 1;
}

inline __host__ int64_t tile_count(const muvox_sets &sets, int64_t size)
{
    return sets.splits ? sets.rows / size + sets.count : sets.count * uniform_tiles(sets, size);
}

__device__ __forceinline__ int64_t first_tile(const muvox_sets &sets, int64_t size, int64_t s)
{
    return sets.splits ? set_begin(sets, s) / size + s : s * uniform_tiles(sets, size);
}

__device__ __forceinline__ tile tile_of(const muvox_sets &sets, int64_t size, int64_t number)
{
    tile t;

    if (sets.splits)
        t.set = last_not_above(sets.count, number, [&](int64_t s) { return first_tile(sets, size, s); });
    else
        t.set = quotient(number, uniform_tiles(sets, size));
    t.begin = set_begin(sets, t.set);
    t.rows = set_end(sets, t.set) - t.begin;
    t.first = (number - first_tile(sets, size, t.set)) * size;
    return t;
}

__device__ __forceinline__ unsigned lane_id()
{
    return threadIdx.x % WARP;
}

/* The sum over groups of G lanes; all lanes of the warp take part. */
template <int G = WARP, typename R> __device__ __forceinline__ R sum_of_lanes(R x)
{
    for (int step = G / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step, G);
    return x;
}

#endif
