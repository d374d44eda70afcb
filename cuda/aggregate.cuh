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
    int64_t row, set, begin; /* begin: the first row of the set */
    int     i, rows;         /* rows: how many the set has */
};

/* Weights that are given. */
template <typename R> struct given_weights {
    template <typename T> static constexpr bool fits = std::is_same<wide_t<T>, R>::value; /* computes in R */
    muvox_matrix                                weights;
    muvox_sets                                  sets;
    struct in_set {
        const void                  *data;
        muvox_dtype                  dtype;
        int64_t                      first;
        int                          stride;
        __device__ __forceinline__ R operator()(int i, int r, int) const
        {
            return load<R>(data, dtype, first + (int64_t)i * stride + r);
        }
    };
    __device__ __forceinline__ in_set of(const row_place &at) const
    {
        return {weights.data, weights.dtype, row_at(weights, sets, at.begin, at.set, 0), (int)weights.row_stride};
    }
};

/* exp(−scale d²) u_j; coords are in R. */
template <typename R> struct gravnet_weights {
    template <typename T> static constexpr bool fits = std::is_same<wide_t<T>, R>::value;
    muvox_matrix                                coords, row_weights;
    muvox_sets                                  sets;
    R                                           scale;
    struct in_set {
        const R                     *coords, *row_weights; /* row_weights NULL: 1 */
        int                          columns, stride, weight_stride;
        R                            scale;
        __device__ __forceinline__ R decay(int i, int j) const
        {
            const R *const a = coords + (int64_t)i * stride, *const b = coords + (int64_t)j * stride;
            R sum = 0;

#pragma unroll 4
            for (int c = 0; c < columns; c++) {
                const R difference = a[c] - b[c];

                sum = fused(difference, difference, sum);
            }
            /* The exponent may be some tens, and its rounding would be that much larger in the result. */
            const R exponent = -scale * sum, lost = fused(-scale, sum, -exponent), decayed = exp(exponent);

            return decayed > 0 && decayed < (R)INFINITY ? fused(lost, decayed, decayed) : decayed;
        }
        __device__ __forceinline__ R row_weight(int j) const
        {
            return row_weights ? row_weights[(int64_t)j * weight_stride] : (R)1;
        }
        __device__ __forceinline__ R operator()(int i, int, int j) const
        {
            return decay(i, j) * row_weight(j);
        }
    };
    __device__ __forceinline__ in_set of(const row_place &at) const
    {
        const R *const u = (const R *)row_weights.data;

        return {(const R *)coords.data + row_at(coords, sets, at.begin, at.set, 0),
                u ? u + row_at(row_weights, sets, at.begin, at.set, 0) : nullptr,
                (int)coords.cols,
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
    const int32_t
        *order; /* (N) the rows of each set, those near each other in turn, so that they share a cache; ~row of a
                                masked one. NULL: as they are */
    aggregate_columns columns;
    bool              mean_by_k;
    int               k;
    muvox_matrix      feats, grad_out;
    muvox_output      neighbours, out, winners, grad_feats;
    W                 weight;
};

/* The lanes of this group, for loops in which groups go their own ways. */
template <int G> __device__ __forceinline__ unsigned group_mask()
{
    return G == WARP ? ALL_LANES : ((1u << G % WARP) - 1) << (lane_id() / G * G);
}

/* The row of this group of lanes; false if there is none. Its lanes stay all the same where shuffles name
 * all lanes of the warp: with fewer each would first have to find out who is there. */
template <int G> __device__ __forceinline__ bool group_row(const muvox_sets &sets, const int32_t *order, row_place *at)
{
    const int64_t place = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / G;

    bool there = place < sets.rows;

    at->set = set_of_row(sets, there ? place : 0);
    at->begin = set_begin(sets, at->set);
    at->rows = (int)(set_end(sets, at->set) - at->begin);
    there = there && place >= at->begin && place - at->begin < at->rows;
    at->i = (int)(place - at->begin);
    if (there) at->i = ordered_row(order, place, at->begin, at->rows);
    at->row = at->begin + at->i;
    if (!there) *at = {0, 0, 0, 0, 0}; /* a row that there is, in a set without any */
    return there;
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

/* A saved rank; what stands for none is the rank of no neighbour. */
__device__ __forceinline__ int load_rank(const muvox_output &winners, int64_t at)
{
    return winners.dtype == MUVOX_U8 ? static_cast<const uint8_t *>(winners.data)[at]
                                     : static_cast<const int32_t *>(winners.data)[at];
}

/* Where the features of a lane begin, so that none of NF loads leaves the row: lanes past the last feature read it again. */
template <int G, int NF> struct lane_features {
    int                        at[NF];
    __device__ __forceinline__ lane_features(int first, int F)
    {
#pragma unroll
        for (int u = 0; u < NF; u++) at[u] = min(first + u * G + (int)(lane_id() % G), F - 1);
    }
};

template <typename T, int G, int NF, typename W> __global__ void aggregate_rows(const aggregate_arguments<W> a)
{
    using R = wide_t<T>;
    const int lane = (int)(lane_id() % G), F = (int)a.feats.cols;
    row_place at;

    const bool              there = group_row<G>(a.sets, a.order, &at);
    const auto              weight = a.weight.of(at);
    const set_rows<const T> feats(a.feats, a.sets, at.begin, at.set);
    const int32_t *const    near = set_rows<const int32_t>(a.neighbours, a.sets, at.begin, at.set)[at.i];
    const int64_t           to = row_at(a.out, a.sets, at.begin, at.set, at.i);
    const int64_t           wins = row_at(a.winners, a.sets, at.begin, at.set, at.i);
    const bool              wants_max = a.columns.max >= 0, wants_absmax = a.columns.absmax >= 0;
    for (int first = 0; first < F; first += G * NF) {
        const lane_features<G, NF> f(first, F);
        R                          sum[NF] = {};
        best<R>                    largest[NF], largest_size[NF];
        int                        count = 0, first_rank = -1;

        for (int r0 = 0; r0 < a.k; r0 += G) {
            const int32_t listed = there && r0 + lane < a.k ? near[r0 + lane] : -1,
                          mine = outside(at, listed) ? -1 : listed;
            const R   my_weight = mine >= 0 ? weight(at.i, r0 + lane, mine) : (R)0;
            const int last = min(a.k - r0, G);

            for (int r = 0; r < last; r++) {
                const int32_t j = __shfl_sync(ALL_LANES, mine, r, G);
                const R       w = __shfl_sync(ALL_LANES, my_weight, r, G);

                if (j < 0) continue;
                const T *const row = feats[j];
                R              m[NF];

#pragma unroll
                for (int u = 0; u < NF; u++) m[u] = fused(w, widen(row[f.at[u]]), (R)0); /* never −0 */
#pragma unroll
                for (int u = 0; u < NF; u++) sum[u] += m[u];
                if (wants_max)
#pragma unroll
                    for (int u = 0; u < NF; u++) largest[u].meet(m[u], r0 + r);
                if (wants_absmax)
#pragma unroll
                    for (int u = 0; u < NF; u++) largest_size[u].meet(fabs(m[u]), r0 + r);
                count++;
                if (first_rank < 0) first_rank = r0 + r;
            }
        }
        const R divisor = a.mean_by_k ? (R)a.k : (R)count;
#pragma unroll
        for (int u = 0; u < NF; u++) {
            const int f_at = first + u * G + lane;
            T *const  out = static_cast<T *>(a.out.data) + to + f_at;

            if (!there || f_at >= F) break;
            largest[u].settle(first_rank);
            largest_size[u].settle(first_rank);
            if (a.winners.data && wants_max)
                store_rank(a.winners, wins + a.columns.max_winner * F + f_at, largest[u].index);
            if (a.winners.data && wants_absmax)
                store_rank(a.winners, wins + a.columns.absmax_winner * F + f_at, largest_size[u].index);
            if (!a.out.data) continue;
            if (a.columns.mean >= 0) out[a.columns.mean * F] = narrow<T>(count ? sum[u] / divisor : (R)0);
            if (wants_max) out[a.columns.max * F] = narrow<T>(largest[u].value);
            if (wants_absmax) out[a.columns.absmax * F] = narrow<T>(largest_size[u].value);
            if (a.columns.sum >= 0) out[a.columns.sum * F] = narrow<T>(sum[u]);
        }
    }
}

/* 1 over what the mean of each row divides by; 0 where there is no neighbour, and no gradient either. */
template <typename R, typename W> __global__ void write_shares(const aggregate_arguments<W> a, R *shares)
{
    row_place at;
    int       count = 0;

    if (!group_row<1>(a.sets, nullptr, &at)) return;
    const int32_t *const near = set_rows<const int32_t>(a.neighbours, a.sets, at.begin, at.set)[at.i];
    for (int r = 0; r < a.k; r++) count += !outside(at, near[r]);
    shares[at.row] = count == 0 ? (R)0 : a.mean_by_k ? 1 / (R)a.k : 1 / (R)count;
}

/* dw[i,r] = Σ_f dm[i,r,f] feats[j,f], 0 where there is no neighbour, handed to set_dw. */
template <typename T, int G, int NF, typename W, typename S>
__global__ void weight_gradients(const aggregate_arguments<W> a, const wide_t<T> *shares, const S set_dw)
{
    using R = wide_t<T>;
    const int lane = (int)(lane_id() % G), F = (int)a.feats.cols;
    row_place at;

    const bool              there = group_row<G>(a.sets, a.order, &at);
    const auto              weight = a.weight.of(at);
    const set_rows<const T> feats(a.feats, a.sets, at.begin, at.set);
    const int32_t *const    near = set_rows<const int32_t>(a.neighbours, a.sets, at.begin, at.set)[at.i];
    const T *const          grad = set_rows<const T>(a.grad_out, a.sets, at.begin, at.set)[at.i];
    const int64_t           wins = row_at(a.winners, a.sets, at.begin, at.set, at.i);
    const R                 share = shares[at.row];
    const bool              wants_absmax = a.columns.absmax >= 0;

    for (int r0 = 0; r0 < a.k; r0 += G) {
        const int32_t listed = there && r0 + lane < a.k ? near[r0 + lane] : -1,
                      mine = outside(at, listed) ? -1 : listed;
        const R   my_weight = mine >= 0 && wants_absmax ? weight(at.i, r0 + lane, mine) : (R)0;
        const int last = min(a.k - r0, G);
        R         dw = 0; /* of rank r0 + lane */

        for (int first = 0; first < F; first += G * NF) {
            const lane_features<G, NF> f(first, F);
            R   even[NF], largest[NF], largest_size[NF]; /* what all ranks, and what winners, get */
            int winner[NF], winner_size[NF];

#pragma unroll
            for (int u = 0; u < NF; u++) {
                even[u] = largest[u] = largest_size[u] = 0;
                winner[u] = winner_size[u] = -1;
                if (!there || first + u * G + lane >= F) continue;
                if (a.columns.mean >= 0) even[u] = widen(grad[a.columns.mean * F + f.at[u]]) * share;
                if (a.columns.sum >= 0) even[u] += widen(grad[a.columns.sum * F + f.at[u]]);
                if (a.columns.max >= 0) {
                    largest[u] = widen(grad[a.columns.max * F + f.at[u]]);
                    winner[u] = load_rank(a.winners, wins + a.columns.max_winner * F + f.at[u]);
                }
                if (wants_absmax) {
                    largest_size[u] = widen(grad[a.columns.absmax * F + f.at[u]]);
                    winner_size[u] = load_rank(a.winners, wins + a.columns.absmax_winner * F + f.at[u]);
                }
            }
            for (int r = 0; r < last; r++) {
                const int32_t  j = __shfl_sync(ALL_LANES, mine, r, G);
                const T *const row = feats[max(j, 0)];
                R              sum = 0;

#pragma unroll
                for (int u = 0; u < NF; u++) {
                    const R x = widen(row[f.at[u]]);

                    sum = fused(even[u] + (winner[u] == r0 + r ? largest[u] : (R)0), x, sum);
                }
                if (wants_absmax) {
                    const R w = __shfl_sync(ALL_LANES, my_weight, r, G);

#pragma unroll
                    for (int u = 0; u < NF; u++) {
                        const R x = widen(row[f.at[u]]), m = w * x;

                        if (winner_size[u] == r0 + r) sum += largest_size[u] * (R)((m > 0) - (m < 0)) * x;
                    }
                }
                sum = sum_of_lanes<G>(sum);
                if (lane == r && j >= 0) dw += sum;
            }
        }
        if (there && r0 + lane < a.k) set_dw(a, weight, at, r0 + lane, mine, dw);
    }
}

/* grad_feats[j,f] = Σ w[i,r] dm[i,r,f] over the places that hold j, ascending. RANK is the type of the winners. */
template <typename T, int G, int NF, typename RANK, typename W, typename P>
__global__ void feature_gradients(const aggregate_arguments<W> a, const wide_t<T> *shares, const reverse_list<P> list)
{
    using R = wide_t<T>;
    const int lane = (int)(lane_id() % G), F = (int)a.feats.cols;
    row_place to;

    const bool                 there = group_row<G>(a.sets, a.order, &to);
    const int64_t              begin = there ? list.begins[to.row] : 0, end = there ? list.begins[to.row + 1] : 0;
    const auto                 weight = a.weight.of(to);
    const set_rows<const T>    grads(a.grad_out, a.sets, to.begin, to.set);
    const set_rows<const RANK> winners(a.winners, a.sets, to.begin, to.set);
    const int                  max_winner = a.columns.max_winner * F, absmax_winner = a.columns.absmax_winner * F;
    const T *const             feats = set_rows<const T>(a.feats, a.sets, to.begin, to.set)[to.i];
    T *const                   result = set_rows<T>(a.grad_feats, a.sets, to.begin, to.set)[to.i];
    const int                  mean = a.columns.mean * F, sums = a.columns.sum * F, max = a.columns.max * F;
    const int                  absmax = a.columns.absmax * F;

    for (int first = 0; first < F; first += G * NF) {
        const lane_features<G, NF> f(first, F);
        R                          sum[NF] = {};

        for (int64_t e0 = begin; e0 < end; e0 += G) {
            const int last = (int)(end - e0 < G ? end - e0 : G);
            int       my_row = 0, my_rank = 0;
            R         my_weight = 0, my_share = 0;

            if (e0 + lane < end) {
                my_row = (int)(list.row(e0 + lane) - to.begin);
                my_rank = list.rank(e0 + lane);
                my_weight = weight(my_row, my_rank, to.i);
                my_share = my_weight * shares[to.begin + my_row];
            }
            for (int n = 0; n < last; n++) {
                const R           w = __shfl_sync(group_mask<G>(), my_weight, n, G);
                const R           share = __shfl_sync(group_mask<G>(), my_share, n, G);
                const int         rank = __shfl_sync(group_mask<G>(), my_rank, n, G);
                const int         i = __shfl_sync(group_mask<G>(), my_row, n, G);
                const T *const    grad = grads[i];
                const RANK *const won = winners[i];

                if (mean >= 0)
#pragma unroll
                    for (int u = 0; u < NF; u++) sum[u] = fused(share, widen(grad[mean + f.at[u]]), sum[u]);
                if (sums >= 0)
#pragma unroll
                    for (int u = 0; u < NF; u++) sum[u] = fused(w, widen(grad[sums + f.at[u]]), sum[u]);
                if (max >= 0)
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (won[max_winner + f.at[u]] == rank) sum[u] = fused(w, widen(grad[max + f.at[u]]), sum[u]);
                if (absmax >= 0)
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (won[absmax_winner + f.at[u]] == rank) {
                            const R m = w * widen(feats[f.at[u]]);

                            sum[u] = fused(w * (R)((m > 0) - (m < 0)), widen(grad[absmax + f.at[u]]), sum[u]);
                        }
            }
        }
#pragma unroll
        for (int u = 0; u < NF; u++)
            if (there && first + u * G + lane < F) result[f.at[u]] = narrow<T>(sum[u]);
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

/* What all kernels here need of sizes and strides. */
template <typename W> muvox_status check_launch(muvox_context *ctx, const char *op, const aggregate_arguments<W> &a)
{
    FORWARD(check_grid(ctx, op, a.sets.rows / (THREADS / WARP) + 1));
    FORWARD(check_row_stride(ctx, op, "feats", a.feats.row_stride));
    FORWARD(check_row_stride(ctx, op, "neighbours", a.neighbours.row_stride));
    FORWARD(check_row_stride(ctx, op, "winners", a.winners.row_stride));
    return check_row_stride(ctx, op, "grad_out", a.grad_out.row_stride);
}

template <typename W>
muvox_status aggregate_forward(muvox_context *ctx, const char *op_name, const aggregate_arguments<W> &a)
{
    FORWARD(check_launch(ctx, op_name, a));
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

    FORWARD(check_launch(ctx, op_name, a));
    FORWARD(hold.take(op_name, a.sets.rows * (int64_t)sizeof(R)));
    R *const shares = hold.as<R>();
    write_shares<R><<<blocks_for(a.sets.rows, THREADS), THREADS, 0, stream_of(ctx)>>>(a, shares);
    LAUNCHED();
    return with_group(a.feats.cols, [&](auto group, auto each) -> muvox_status {
        constexpr int  G = decltype(group)::value, NF = decltype(each)::value;
        const unsigned blocks = group_blocks<G>(a.sets);

        if (set_dw) {
            weight_gradients<T, G, NF><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, shares, *set_dw);
            LAUNCHED();
        }
        if (a.grad_feats.data) {
            if (a.winners.dtype == MUVOX_U8)
                feature_gradients<T, G, NF, uint8_t><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, shares, list);
            else
                feature_gradients<T, G, NF, int32_t><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, shares, list);
            LAUNCHED();
        }
        return MUVOX_OK;
    });
}

#endif
