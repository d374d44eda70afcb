/* Aggregation over the neighbours of each row, forward and backward, for aggregate (weights are given) and gravnet (they come
 * from distances). See muvox/aggregate.h for the formulas. A group of G lanes takes one row, each lane NF features of every
 * G · NF; where weights are looked up, lanes stand for neighbours. */
#ifndef MUVOX_CUDA_AGGREGATE_H
#define MUVOX_CUDA_AGGREGATE_H

#include "best.cuh"
#include "reverse.cuh"

#include <math.h>
#include <type_traits>

/* One row: of all, its set, its number within it. */
struct row_place {
    int64_t row, set, begin, i, rows; /* begin, rows: of the set */
};

/* Weights that are given. */
template <typename R> struct given_weights {
    template <typename T> static constexpr bool fits = std::is_same<wide_t<T>, R>::value; /* computes in R */
    muvox_matrix weights;
    muvox_sets   sets;
    __device__ __forceinline__ R operator()(const row_place &at, int64_t r, int64_t) const
    {
        return load<R>(weights.data, weights.dtype, row_at(weights, sets, at.begin, at.set, at.i) + r);
    }
};

/* exp(−scale d²) u_j */
template <typename R> struct gravnet_weights {
    template <typename T> static constexpr bool fits = std::is_same<wide_t<T>, R>::value;
    muvox_matrix coords, row_weights;
    muvox_sets   sets;
    R            scale;
    __device__ __forceinline__ R decay(const row_place &at, int64_t j) const
    {
        const int64_t a = row_at(coords, sets, at.begin, at.set, at.i), b = row_at(coords, sets, at.begin, at.set, j);
        R             sum = 0;

        for (int64_t c = 0; c < coords.cols; c++) {
            const R difference = load<R>(coords.data, coords.dtype, a + c) - load<R>(coords.data, coords.dtype, b + c);

            sum = fused(difference, difference, sum);
        }
        return exp(-scale * sum);
    }
    __device__ __forceinline__ R row_weight(const row_place &at, int64_t j) const
    {
        if (!row_weights.data) return 1;
        return static_cast<const R *>(row_weights.data)[row_at(row_weights, sets, at.begin, at.set, j)];
    }
    __device__ __forceinline__ R operator()(const row_place &at, int64_t, int64_t j) const
    {
        return decay(at, j) * row_weight(at, j);
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
    muvox_sets        sets;
    aggregate_columns columns;
    bool              mean_by_k;
    int64_t           k;
    muvox_matrix      feats, grad_out;
    muvox_output      neighbours, out, winners, grad_feats;
    W                 weight;
};

template <int G> __device__ __forceinline__ unsigned group_mask()
{
    if constexpr (G == WARP)
        return ALL_LANES;
    else
        return ((1u << G % WARP) - 1) << (lane_id() / G * G);
}

/* The row of this group of lanes; false if there is none. */
template <int G> __device__ __forceinline__ bool group_row(const muvox_sets &sets, row_place *at)
{
    at->row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / G;
    if (at->row >= sets.rows) return false;
    at->set = set_of_row(sets, at->row);
    at->begin = set_begin(sets, at->set);
    at->i = at->row - at->begin;
    at->rows = set_end(sets, at->set) - at->begin;
    return at->i >= 0 && at->i < at->rows;
}

/* The neighbours of a row; outside(j): none there, or not in the set. */
template <typename A> __device__ __forceinline__ const int32_t *neighbours_of(const A &a, const row_place &at)
{
    return static_cast<const int32_t *>(a.neighbours.data) + row_at(a.neighbours, a.sets, at.begin, at.set, at.i);
}

__device__ __forceinline__ bool outside(const row_place &at, int32_t j)
{
    return j < 0 || j >= at.rows;
}

__device__ __forceinline__ void store_rank(const muvox_output &winners, int64_t at, int rank)
{
    if (winners.dtype == MUVOX_U8)
        static_cast<uint8_t *>(winners.data)[at] = (uint8_t)rank; /* 255: none */
    else
        static_cast<int32_t *>(winners.data)[at] = rank;
}

/* A saved rank; what stands for none is the rank of no neighbour. */
__device__ __forceinline__ int load_rank(const muvox_output &winners, int64_t at)
{
    return winners.dtype == MUVOX_U8 ? static_cast<const uint8_t *>(winners.data)[at]
                                     : static_cast<const int32_t *>(winners.data)[at];
}

template <typename T, int G, int NF, typename W> __global__ void aggregate_rows(const aggregate_arguments<W> a)
{
    using R = wide_t<T>;
    const int     lane = (int)(lane_id() % G);
    const int64_t F = a.feats.cols;
    row_place     at;

    if (!group_row<G>(a.sets, &at)) return;
    const int32_t *const near = neighbours_of(a, at);
    const T *const       feats = static_cast<const T *>(a.feats.data) + row_at(a.feats, a.sets, at.begin, at.set, 0);
    const int64_t        to = row_at(a.out, a.sets, at.begin, at.set, at.i);
    const int64_t        wins = row_at(a.winners, a.sets, at.begin, at.set, at.i);
    for (int64_t f0 = lane; f0 - lane < F; f0 += G * NF) {
        R       sum[NF] = {};
        best<R> largest[NF], largest_size[NF];
        int     count = 0, first = -1;

        for (int64_t r0 = 0; r0 < a.k; r0 += G) {
            const int32_t listed = r0 + lane < a.k ? near[r0 + lane] : -1, mine = outside(at, listed) ? -1 : listed;
            const R       my_weight = mine >= 0 ? a.weight(at, r0 + lane, mine) : (R)0;
            const int     last = a.k - r0 < G ? (int)(a.k - r0) : G;

            for (int r = 0; r < last; r++) {
                const int32_t j = __shfl_sync(group_mask<G>(), mine, r, G);
                const R       w = __shfl_sync(group_mask<G>(), my_weight, r, G);

                if (j < 0) continue;
                const T *const row = feats + j * a.feats.row_stride + f0;

                count++;
                if (first < 0) first = (int)r0 + r;
#pragma unroll
                for (int u = 0; u < NF; u++) {
                    if (f0 + u * G >= F) break;
                    const R m = fused(w, widen(row[u * G]), (R)0); /* never −0 */

                    sum[u] += m;
                    if (a.columns.max >= 0) largest[u].meet(m, (int)r0 + r);
                    if (a.columns.absmax >= 0) largest_size[u].meet(fabs(m), (int)r0 + r);
                }
            }
        }
        const R divisor = a.mean_by_k ? (R)a.k : (R)count;
#pragma unroll
        for (int u = 0; u < NF; u++) {
            const int64_t f = f0 + u * G;
            T *const      out = static_cast<T *>(a.out.data) + to + f;

            if (f >= F) break;
            largest[u].settle(first);
            largest_size[u].settle(first);
            if (a.winners.data && a.columns.max >= 0) store_rank(a.winners, wins + a.columns.max_winner * F + f, largest[u].index);
            if (a.winners.data && a.columns.absmax >= 0)
                store_rank(a.winners, wins + a.columns.absmax_winner * F + f, largest_size[u].index);
            if (!a.out.data) continue;
            if (a.columns.mean >= 0) out[a.columns.mean * F] = narrow<T>(count ? sum[u] / divisor : (R)0);
            if (a.columns.max >= 0) out[a.columns.max * F] = narrow<T>(largest[u].value);
            if (a.columns.absmax >= 0) out[a.columns.absmax * F] = narrow<T>(largest_size[u].value);
            if (a.columns.sum >= 0) out[a.columns.sum * F] = narrow<T>(sum[u]);
        }
    }
}

/* What the mean of each row divides by: 1 where there is no neighbour, and no gradient either. */
template <typename R, typename W> __global__ void write_divisors(const aggregate_arguments<W> a, R *divisors)
{
    row_place at;
    int       count = 0;

    if (!group_row<1>(a.sets, &at)) return;
    const int32_t *const near = neighbours_of(a, at);
    for (int64_t r = 0; r < a.k; r++) count += !outside(at, near[r]);
    divisors[at.row] = a.mean_by_k ? (R)a.k : count ? (R)count : (R)1;
}

/* dw[i,r] = Σ_f dm[i,r,f] feats[j,f], 0 where there is no neighbour, handed to set_dw. */
template <typename T, int G, int NF, typename W, typename S>
__global__ void weight_gradients(const aggregate_arguments<W> a, const wide_t<T> *divisors, const S set_dw)
{
    using R = wide_t<T>;
    const int     lane = (int)(lane_id() % G);
    const int64_t F = a.feats.cols;
    const bool    several = F > G * NF; /* passes over the features: dw is summed up where it ends up */
    row_place     at;

    if (!group_row<G>(a.sets, &at)) return;
    const int32_t *const near = neighbours_of(a, at);
    const T *const       feats = static_cast<const T *>(a.feats.data) + row_at(a.feats, a.sets, at.begin, at.set, 0);
    const T *const       grad = static_cast<const T *>(a.grad_out.data) + row_at(a.grad_out, a.sets, at.begin, at.set, at.i);
    const int64_t        wins = row_at(a.winners, a.sets, at.begin, at.set, at.i);
    const R              share = 1 / divisors[at.row];

    for (int64_t r0 = 0; r0 < a.k; r0 += G) {
        const int32_t listed = r0 + lane < a.k ? near[r0 + lane] : -1, mine = outside(at, listed) ? -1 : listed;
        const R       my_weight = mine >= 0 && a.columns.absmax >= 0 ? a.weight(at, r0 + lane, mine) : (R)0;
        const int     last = a.k - r0 < G ? (int)(a.k - r0) : G;
        R             dw = 0; /* of rank r0 + lane */

        for (int64_t first = 0; first < F; first += G * NF) {
            const int64_t f0 = first + lane;
            R             even[NF], largest[NF], largest_size[NF]; /* gradients of what all ranks, and what winners, get */
            int           winner[NF], winner_size[NF];

#pragma unroll
            for (int u = 0; u < NF; u++) {
                const int64_t f = f0 + u * G;

                even[u] = largest[u] = largest_size[u] = 0;
                winner[u] = winner_size[u] = -1;
                if (f >= F) continue;
                if (a.columns.mean >= 0) even[u] = widen(grad[a.columns.mean * F + f]) * share;
                if (a.columns.sum >= 0) even[u] += widen(grad[a.columns.sum * F + f]);
                if (a.columns.max >= 0) {
                    largest[u] = widen(grad[a.columns.max * F + f]);
                    winner[u] = load_rank(a.winners, wins + a.columns.max_winner * F + f);
                }
                if (a.columns.absmax >= 0) {
                    largest_size[u] = widen(grad[a.columns.absmax * F + f]);
                    winner_size[u] = load_rank(a.winners, wins + a.columns.absmax_winner * F + f);
                }
            }
            for (int r = 0; r < last; r++) {
                const int32_t j = __shfl_sync(group_mask<G>(), mine, r, G);
                const R       w = __shfl_sync(group_mask<G>(), my_weight, r, G);
                const T      *row = feats + j * a.feats.row_stride + f0;
                R             sum = 0;

                if (j >= 0)
#pragma unroll
                    for (int u = 0; u < NF; u++) {
                        if (f0 + u * G >= F) break;
                        const R x = widen(row[u * G]);
                        R       dm = even[u] + (winner[u] == r0 + r ? largest[u] : (R)0);

                        if (winner_size[u] == r0 + r) dm += largest_size[u] * (R)((w * x > 0) - (w * x < 0));
                        sum += dm * x;
                    }
                for (int step = G / 2; step; step /= 2) sum += __shfl_xor_sync(group_mask<G>(), sum, step, G);
                if (lane == r) dw += sum;
            }
        }
        (void)several;
        if (r0 + lane < a.k) set_dw(a, at, r0 + lane, mine, dw);
    }
}

/* grad_feats[j,f] = Σ w[i,r] dm[i,r,f] over the places that hold j, ascending. */
template <typename T, int G, int NF, typename W, typename P>
__global__ void feature_gradients(const aggregate_arguments<W> a, const wide_t<T> *divisors, const reverse_list<P> list)
{
    using R = wide_t<T>;
    const int     lane = (int)(lane_id() % G);
    const int64_t F = a.feats.cols;
    row_place     to;

    if (!group_row<G>(a.sets, &to)) return;
    const int64_t  first = list.begins[to.row], end = list.begins[to.row + 1];
    const T *const grads = static_cast<const T *>(a.grad_out.data) + row_at(a.grad_out, a.sets, to.begin, to.set, 0);
    const int64_t  wins = row_at(a.winners, a.sets, to.begin, to.set, 0);
    const T *const feats = static_cast<const T *>(a.feats.data) + row_at(a.feats, a.sets, to.begin, to.set, to.i);
    T *const       result = static_cast<T *>(a.grad_feats.data) + row_at(a.grad_feats, a.sets, to.begin, to.set, to.i);

    for (int64_t f0 = lane; f0 - lane < F; f0 += G * NF) {
        R sum[NF] = {}, x[NF] = {};

        if (a.columns.absmax >= 0)
#pragma unroll
            for (int u = 0; u < NF; u++)
                if (f0 + u * G < F) x[u] = widen(feats[f0 + u * G]);
        for (int64_t e0 = first; e0 < end; e0 += G) {
            const int last = end - e0 < G ? (int)(end - e0) : G;
            int       my_row = 0, my_rank = 0;
            R         my_weight = 0, my_share = 0;

            if (e0 + lane < end) {
                row_place mine = to;

                mine.row = list.row(e0 + lane);
                mine.i = mine.row - to.begin;
                my_row = (int)mine.i;
                my_rank = list.rank(e0 + lane);
                my_weight = a.weight(mine, my_rank, to.i);
                my_share = my_weight / divisors[mine.row];
            }
            for (int n = 0; n < last; n++) {
                const R        w = __shfl_sync(group_mask<G>(), my_weight, n, G), share = __shfl_sync(group_mask<G>(), my_share, n, G);
                const int      rank = __shfl_sync(group_mask<G>(), my_rank, n, G), i = __shfl_sync(group_mask<G>(), my_row, n, G);
                const T *const grad = grads + i * a.grad_out.row_stride + f0;
                const int64_t  won = wins + i * a.winners.row_stride + f0;

#pragma unroll
                for (int u = 0; u < NF; u++) {
                    if (f0 + u * G >= F) break;
                    if (a.columns.mean >= 0) sum[u] = fused(share, widen(grad[a.columns.mean * F + u * G]), sum[u]);
                    if (a.columns.sum >= 0) sum[u] = fused(w, widen(grad[a.columns.sum * F + u * G]), sum[u]);
                    if (a.columns.max >= 0 && load_rank(a.winners, won + a.columns.max_winner * F + u * G) == rank)
                        sum[u] = fused(w, widen(grad[a.columns.max * F + u * G]), sum[u]);
                    if (a.columns.absmax >= 0 && load_rank(a.winners, won + a.columns.absmax_winner * F + u * G) == rank) {
                        const R m = w * x[u];

                        sum[u] = fused(w * (R)((m > 0) - (m < 0)), widen(grad[a.columns.absmax * F + u * G]), sum[u]);
                    }
                }
            }
        }
#pragma unroll
        for (int u = 0; u < NF; u++)
            if (f0 + u * G < F) result[f0 + u * G] = narrow<T>(sum[u]);
    }
}

enum { THREADS = 128 };

/* Calls f with a group size and a number of features a lane that suit so many features: up to 32 by groups of 8, up to 64 of
 * 16, more of 32 lanes, 128 features at a time. */
template <typename F> muvox_status with_group(int64_t features, F f)
{
    using std::integral_constant;
    if (features <= 8) return f(integral_constant<int, 8>(), integral_constant<int, 1>());
    if (features <= 16) return f(integral_constant<int, 8>(), integral_constant<int, 2>());
    if (features <= 24) return f(integral_constant<int, 8>(), integral_constant<int, 3>());
    if (features <= 32) return f(integral_constant<int, 8>(), integral_constant<int, 4>());
    if (features <= 48) return f(integral_constant<int, 16>(), integral_constant<int, 3>());
    if (features <= 64) return f(integral_constant<int, 16>(), integral_constant<int, 4>());
    return f(integral_constant<int, 32>(), integral_constant<int, 4>());
}

template <int G> unsigned group_blocks(const muvox_sets &sets)
{
    return blocks_for(sets.rows, THREADS / G);
}

inline muvox_status check_rows_grid(muvox_context *ctx, const char *op, const muvox_sets &sets)
{
    return check_grid(ctx, op, sets.rows / (THREADS / WARP) + 1);
}

template <typename W>
muvox_status aggregate_forward(muvox_context *ctx, const char *op_name, const aggregate_arguments<W> &a)
{
    FORWARD(check_rows_grid(ctx, op_name, a.sets));
    if (!a.sets.rows) return MUVOX_OK;
    return with_dtype(a.feats.dtype, [&](auto element) {
        using T = decltype(element);
        return with_group(a.feats.cols, [&](auto group, auto each) -> muvox_status {
            if constexpr (W::template fits<T>) {
                constexpr int G = decltype(group)::value, NF = decltype(each)::value;

                aggregate_rows<T, G, NF><<<group_blocks<G>(a.sets), THREADS, 0, stream_of(ctx)>>>(a);
                LAUNCHED();
            }
            return MUVOX_OK;
        });
    });
}

/* grad_feats by a reverse list if it is wanted, and what set_dw makes of the gradients of the weights, unless it is null. */
template <typename T, typename W, typename P, typename S>
muvox_status aggregate_backward(muvox_context *ctx, const char *op_name, const aggregate_arguments<W> &a,
                                const reverse_list<P> &list, const S *set_dw)
{
    using R = wide_t<T>;
    workspace hold(ctx);

    FORWARD(hold.take(op_name, a.sets.rows * (int64_t)sizeof(R)));
    R *const divisors = hold.as<R>();
    write_divisors<R><<<blocks_for(a.sets.rows, THREADS), THREADS, 0, stream_of(ctx)>>>(a, divisors);
    LAUNCHED();
    return with_group(a.feats.cols, [&](auto group, auto each) -> muvox_status {
        constexpr int  G = decltype(group)::value, NF = decltype(each)::value;
        const unsigned blocks = group_blocks<G>(a.sets);

        if (set_dw) {
            weight_gradients<T, G, NF><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, divisors, *set_dw);
            LAUNCHED();
        }
        if (a.grad_feats.data) {
            feature_gradients<T, G, NF><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, divisors, list);
            LAUNCHED();
        }
        return MUVOX_OK;
    });
}

#endif
