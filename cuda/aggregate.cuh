/* What aggregation over the neighbours of each row has in common forward and backward, for aggregate (weights are
 * given) and gravnet (they come from distances). See muvox/aggregate.h for the formulas. A group of G lanes takes a
 * row, each lane NF features of every G · NF; where weights are looked up, lanes stand for neighbours.
 *
 * Rows of a set share neighbours, so a block takes a run of rows one after the other: they find each other's in its
 * cache. */
#ifndef MUVOX_CUDA_AGGREGATE_H
#define MUVOX_CUDA_AGGREGATE_H

#include "../ops/convert.h"
#include "best.cuh"
#include "device.cuh"
#include "launch.cuh"

#include <math.h>
#include <type_traits>

/* One row: of all, its set, its number within it. */
struct row_place {
    int64_t row, set, begin; /* begin: the first row of the set */
    int     i, rows;         /* rows: how many the set has */
};

/* Four columns of coordinates, at a multiple of 16 bytes. */
template <typename R> struct four {
    R x[4];
};

/* Weights are decay · row_weight: of rank r of row i, which is row j. These are given. */
template <typename R> struct given_weights {
    template <typename T> static constexpr bool fits = std::is_same<wide_t<T>, R>::value; /* computes in R */
    muvox_matrix                                weights;
    muvox_sets                                  sets;
    struct in_set {
        const void                  *data;
        muvox_dtype                  dtype;
        int64_t                      first;
        int                          stride;
        __device__ __forceinline__ R decay(int i, int r, int, four<R> *) const
        {
            return load<R>(data, dtype, first + (int64_t)i * stride + r);
        }
        __device__ __forceinline__ R row_weight(int) const
        {
            return 1;
        }
    };
    __device__ __forceinline__ in_set of(const row_place &at) const
    {
        return {weights.data, weights.dtype, row_at(weights, sets, at.begin, at.set, 0), (int)weights.row_stride};
    }
};

__device__ __forceinline__ four<float> load_four(const float *from)
{
    const float4 x = __ldg(reinterpret_cast<const float4 *>(from));

    return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ four<double> load_four(const double *from)
{
    const double2 low = __ldg(reinterpret_cast<const double2 *>(from)),
                  high = __ldg(reinterpret_cast<const double2 *>(from) + 1);

    return {low.x, low.y, high.x, high.y};
}

/* exp(−scale d²) u_j; coords are in R, each row a number of `four`, the last filled with 0. */
template <typename R> struct gravnet_weights {
    template <typename T> static constexpr bool fits = std::is_same<wide_t<T>, R>::value;
    muvox_matrix                                coords, row_weights;
    muvox_sets                                  sets;
    R                                           scale;
    struct in_set {
        const R                   *coords, *row_weights; /* row_weights NULL: 1 */
        int                        fours, stride, weight_stride;
        R                          scale;
        __device__ __forceinline__ four<R> differences(int i, int j, int q) const
        {
            const four<R> a = load_four(coords + (int64_t)i * stride + 4 * q),
                          b = load_four(coords + (int64_t)j * stride + 4 * q);

            return {a.x[0] - b.x[0], a.x[1] - b.x[1], a.x[2] - b.x[2], a.x[3] - b.x[3]};
        }
        /* *first: the first four of x_i − x_j */
        __device__ __forceinline__ R decay(int i, int, int j, four<R> *first) const
        {
            R sum = 0;

#pragma unroll 1
            for (int q = 0; q < fours; q++) {
                const four<R> difference = differences(i, j, q);

                if (q == 0) *first = difference;
#pragma unroll
                for (int c = 0; c < 4; c++) sum = fused(difference.x[c], difference.x[c], sum);
            }
            /* The exponent may be some tens, and its rounding would be that much larger in the result. */
            const R exponent = -scale * sum, lost = fused(-scale, sum, -exponent), decayed = exp(exponent);

            return decayed > 0 && decayed < (R)INFINITY ? fused(lost, decayed, decayed) : decayed;
        }
        __device__ __forceinline__ R row_weight(int j) const
        {
            return row_weights ? __ldg(row_weights + (int64_t)j * weight_stride) : (R)1;
        }
    };
    __device__ __forceinline__ in_set of(const row_place &at) const
    {
        const R *const u = (const R *)row_weights.data;

        return {(const R *)coords.data + row_at(coords, sets, at.begin, at.set, 0),
                u ? u + row_at(row_weights, sets, at.begin, at.set, 0) : nullptr,
                (int)(coords.cols + 3) / 4,
                (int)coords.row_stride,
                (int)row_weights.row_stride,
                scale};
    }
};

/* The block of columns of each aggregate in the output, and in the winners; −1: not asked for. */
struct aggregate_columns {
    int mean, max, absmax, sum, max_winner, absmax_winner;
};

inline aggregate_columns columns_of(muvox_aggregates kinds)
{
    aggregate_columns columns = {-1, -1, -1, -1, -1, -1};

    for (int a = 0, w = 0; a < aggregate_count(kinds); a++) switch (aggregate_at(kinds, a)) {
        case MUVOX_MEAN: columns.mean = a; break;
        case MUVOX_SUM: columns.sum = a; break;
        case MUVOX_MAX:
            columns.max = a;
            columns.max_winner = w++;
            break;
        case MUVOX_ABSMAX:
            columns.absmax = a;
            columns.absmax_winner = w++;
            break;
        }
    return columns;
}

template <typename W> struct aggregate_arguments {
    muvox_sets sets;
    /* (N) the rows of each set, those near each other in turn, so that they share a cache; ~row of a masked one.
     * NULL: as they are. */
    const int32_t    *order;
    aggregate_columns columns;
    bool              mean_by_k;
    int               k;
    muvox_matrix      feats, grad_out;
    muvox_output      neighbours, out, winners, grad_feats;
    W                 weight;
};

/* How rows are dealt out: to RUNS blocks, where there are enough rows. A GPU of 132 multiprocessors takes 264 of
 * them at once (132 in double). More and shorter runs are balanced better; of longer ones more is found in the
 * cache. */
enum { BLOCK = 512, RUNS = 1056 };

/* Blocks on a multiprocessor: as many as registers allow without spills. */
template <typename R> constexpr int BLOCKS_AT_ONCE = sizeof(R) == sizeof(float) ? 2 : 1;

/* Rows that each block takes, at_once of them side by side. */
inline int rows_of_run(int64_t rows, int64_t at_once)
{
    return (int)((rows + RUNS * at_once - 1) / (RUNS * at_once) * at_once);
}

/* The row at a place of all; false if there is none. *at is the place found before, or zeros. */
__device__ __forceinline__ bool find_row(const muvox_sets &sets, const int32_t *order, int64_t place, row_place *at)
{
    if ((uint64_t)(place - at->begin) >= (uint64_t)at->rows) {
        at->set = set_of_row(sets, place < sets.rows ? place : 0);
        at->begin = set_begin(sets, at->set);
        at->rows = (int)(set_end(sets, at->set) - at->begin);
        if (place >= sets.rows || (uint64_t)(place - at->begin) >= (uint64_t)at->rows) {
            *at = {0, 0, 0, 0, 0}; /* a row that there is, in a set without any */
            return false;
        }
    }
    at->i = ordered_row(order, place, at->begin, at->rows);
    at->row = at->begin + at->i;
    return true;
}

/* The same where each group of lanes looks at one row, in blocks of THREADS. */
enum { THREADS = 128 };

template <int G> __device__ __forceinline__ bool group_row(const muvox_sets &sets, const int32_t *order, row_place *at)
{
    *at = {0, 0, 0, 0, 0};
    return find_row(sets, order, ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / G, at);
}

template <int G> unsigned group_blocks(const muvox_sets &sets)
{
    return blocks_for(sets.rows, THREADS / G);
}

__device__ __forceinline__ bool outside(const row_place &at, int32_t j)
{
    return (unsigned)j >= (unsigned)at.rows;
}

__device__ __forceinline__ void store_rank(const muvox_output &winners, int64_t at, int rank)
{
    if (winners.dtype == MUVOX_U8)
        static_cast<uint8_t *>(winners.data)[at] = (uint8_t)rank; /* 255: none */
    else
        static_cast<int32_t *>(winners.data)[at] = rank;
}

template <typename M> int64_t row_bytes(const M &m)
{
    return m.row_stride * (int64_t)dtype_size(m.dtype);
}

/* first + i · bytes: written out, as the compiler takes the multiplication of 64 bits apart and hoists half of it. */
template <typename T> __device__ __forceinline__ T *row_of(T *first, int i, int bytes)
{
    T *row;

    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(row) : "r"(i), "r"(bytes), "l"(first));
    return row;
}

/* Whether feature u of a lane is there. with_group takes no more features than it needs, so that below a whole warp
 * only the last of them may be missing. */
template <int G, int NF> __device__ __forceinline__ bool has_feature(int u, int first, int F)
{
    return (G < WARP && u + 1 < NF) || first + u * G + (int)(lane_id() % G) < F;
}

/* Calls f with a group size and a number of features a lane that suit so many features: up to 32 by groups of 8, up
 * to 64 of 16, more of 32 lanes, 128 features at a time. */
template <typename F> muvox_status with_group(int64_t features, F f)
{
    using std::integral_constant;
    if (features <= 8) return f(integral_constant<int, 8>(), integral_constant<int, 1>());
    if (features <= 16) return f(integral_constant<int, 8>(), integral_constant<int, 2>());
    if (features <= 24) return f(integral_constant<int, 8>(), integral_constant<int, 3>());
    if (features <= 32) return f(integral_constant<int, 8>(), integral_constant<int, 4>());
    if (features <= 48) return f(integral_constant<int, 16>(), integral_constant<int, 3>());
    if (features <= 64) return f(integral_constant<int, 16>(), integral_constant<int, 4>());
    if (features <= 96) return f(integral_constant<int, 32>(), integral_constant<int, 3>());
    return f(integral_constant<int, 32>(), integral_constant<int, 4>());
}

/* f with whether mean and max are asked for, and nothing else, as a type: the usual choice is worth kernels of its
 * own. */
template <typename F> void with_mean_max(const aggregate_columns &columns, F f)
{
    if (columns.mean >= 0 && columns.max >= 0 && columns.sum < 0 && columns.absmax < 0)
        f(std::true_type());
    else
        f(std::false_type());
}

/* What all kernels here need of sizes and strides. */
template <typename W> muvox_status check_launch(muvox_context *ctx, const char *op, const aggregate_arguments<W> &a)
{
    FORWARD(check_row_stride(ctx, op, "feats", a.feats.row_stride));
    FORWARD(check_row_stride(ctx, op, "bytes of feats", row_bytes(a.feats)));
    FORWARD(check_row_stride(ctx, op, "neighbours", a.neighbours.row_stride));
    FORWARD(check_row_stride(ctx, op, "winners", a.winners.row_stride));
    return check_row_stride(ctx, op, "grad_out", a.grad_out.row_stride);
}

#endif
