/* Aggregation over the neighbours of each row, forward and backward, for aggregate (weights are given) and gravnet (they come
 * from distances). See muvox/aggregate.h for the formulas. A group of G lanes takes one row; lanes stand for features, and
 * for neighbours where weights are looked up. */
#ifndef MUVOX_CUDA_AGGREGATE_H
#define MUVOX_CUDA_AGGREGATE_H

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
    __device__ __forceinline__ R operator()(const row_place &at, int64_t r, int64_t j) const
    {
        return decay(at, j) * row_weight(at, j);
    }
};

template <typename W> struct aggregate_arguments {
    muvox_sets       sets;
    muvox_aggregates kinds;
    bool             mean_by_k;
    int64_t          k;
    muvox_matrix     feats, grad_out;
    muvox_output     neighbours, out, winners, grad_feats;
    W                weight;
    const void      *divisors; /* (N) in the arithmetic of feats: what means divide by; backward only */
};

__host__ __device__ __forceinline__ bool has_kind(muvox_aggregates kinds, unsigned kind)
{
    for (; kinds & 15; kinds >>= 4)
        if ((kinds & 15) == kind) return true;
    return false;
}

template <int G> __device__ __forceinline__ unsigned group_mask()
{
    if constexpr (G == 32)
        return ALL_LANES;
    else
        return ((1u << G) - 1) << (lane_id() / G * G);
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

/* Neighbour r of a row, −1 if it has none there or one outside its set. */
template <typename A> __device__ __forceinline__ int64_t neighbour(const A &a, const row_place &at, int64_t r)
{
    const int64_t from = row_at(a.neighbours, a.sets, at.begin, at.set, at.i);
    const int32_t j = r < a.k ? static_cast<const int32_t *>(a.neighbours.data)[from + r] : -1;

    return j < at.rows ? j : -1;
}

/* What the mean of a row divides by. */
template <typename R, int G, typename A> __device__ __forceinline__ R divisor(const A &a, const row_place &at)
{
    int count = 0;

    if (a.mean_by_k) return (R)a.k;
    for (int64_t r0 = 0; r0 < a.k; r0 += G)
        count += __popc(__ballot_sync(group_mask<G>(), neighbour(a, at, r0 + lane_id() % G) >= 0) & group_mask<G>());
    return (R)count;
}

/* The largest so far, and its rank: the first one, and NaN is larger than anything. */
template <typename R> struct best {
    R   value = 0;
    int rank = -1;
    __device__ __forceinline__ void meet(R x, int r)
    {
        if (rank < 0 || x > value || (x != x && value == value)) {
            value = x;
            rank = r;
        }
    }
};

__device__ __forceinline__ void store_rank(const muvox_output &winners, int64_t at, int rank)
{
    if (winners.dtype == MUVOX_U8)
        static_cast<uint8_t *>(winners.data)[at] = (uint8_t)rank; /* 255: none */
    else
        static_cast<int32_t *>(winners.data)[at] = rank;
}

__device__ __forceinline__ bool won(const muvox_output &winners, int64_t at, int64_t rank)
{
    return winners.dtype == MUVOX_U8 ? static_cast<const uint8_t *>(winners.data)[at] == rank
                                     : static_cast<const int32_t *>(winners.data)[at] == rank;
}

template <typename T, int G, typename W> __global__ void aggregate_rows(const aggregate_arguments<W> a)
{
    using R = wide_t<T>;
    const int     lane = (int)(lane_id() % G);
    const T      *feats = static_cast<const T *>(a.feats.data);
    const int64_t F = a.feats.cols;
    row_place     at;

    if (!group_row<G>(a.sets, &at)) return;
    const R    total = divisor<R, G>(a, at);
    const bool wants_max = has_kind(a.kinds, MUVOX_MAX), wants_absmax = has_kind(a.kinds, MUVOX_ABSMAX);
    for (int64_t f0 = 0; f0 < F; f0 += G) {
        const int64_t f = f0 + lane;
        R             sum = 0;
        best<R>       largest, largest_size;

        for (int64_t r0 = 0; r0 < a.k; r0 += G) {
            const int64_t mine = neighbour(a, at, r0 + lane);
            const R       my_weight = mine >= 0 ? a.weight(at, r0 + lane, mine) : (R)0;
            const int     last = a.k - r0 < G ? (int)(a.k - r0) : G;

            for (int r = 0; r < last; r++) {
                const int64_t j = __shfl_sync(group_mask<G>(), (int)mine, r, G);
                const R       w = __shfl_sync(group_mask<G>(), my_weight, r, G);

                if (j < 0 || f >= F) continue;
                const R m = w * widen(feats[row_at(a.feats, a.sets, at.begin, at.set, j) + f]);

                sum += m;
                if (wants_max) largest.meet(m, (int)r0 + r);
                if (wants_absmax) largest_size.meet(fabs(m), (int)r0 + r);
            }
        }
        if (f >= F) continue;
        const int64_t to = row_at(a.out, a.sets, at.begin, at.set, at.i), wins = row_at(a.winners, a.sets, at.begin, at.set, at.i);
        int           block = 0, winner = 0;

        for (muvox_aggregates kinds = a.kinds; kinds & 15; kinds >>= 4, block++) {
            const unsigned kind = kinds & 15;
            const bool     wants_rank = kind == MUVOX_MAX || kind == MUVOX_ABSMAX;
            const best<R> &b = kind == MUVOX_MAX ? largest : largest_size;
            const R        mean = total == 0 ? (R)0 : sum / total;

            if (a.out.data) static_cast<T *>(a.out.data)[to + block * F + f] = narrow<T>(wants_rank ? b.value : kind == MUVOX_MEAN ? mean : sum);
            if (wants_rank && a.winners.data) store_rank(a.winners, wins + winner * F + f, b.rank);
            winner += wants_rank;
        }
    }
}

/* dm[r,f] of row i, whose weighted feature m at (r, f) is positive, negative or 0. */
template <typename T, typename W>
__device__ __forceinline__ wide_t<T> message_gradient(const aggregate_arguments<W> &a, const row_place &at, wide_t<T> total, int64_t r, int64_t f, wide_t<T> m)
{
    using R = wide_t<T>;
    const int64_t from = row_at(a.grad_out, a.sets, at.begin, at.set, at.i), wins = row_at(a.winners, a.sets, at.begin, at.set, at.i), F = a.feats.cols;
    int           block = 0, winner = 0;
    R             dm = 0;

    for (muvox_aggregates kinds = a.kinds; kinds & 15; kinds >>= 4, block++) {
        const unsigned kind = kinds & 15;

        if (kind == MUVOX_MAX || kind == MUVOX_ABSMAX) {
            if (won(a.winners, wins + winner++ * F + f, r)) {
                const R g = widen(static_cast<const T *>(a.grad_out.data)[from + block * F + f]);

                dm += kind == MUVOX_MAX ? g : g * (R)((m > 0) - (m < 0));
            }
        } else {
            const R g = widen(static_cast<const T *>(a.grad_out.data)[from + block * F + f]);

            dm += kind == MUVOX_MEAN ? g / total : g;
        }
    }
    return dm;
}

template <typename R, int G, typename W> __global__ void count_neighbours(const aggregate_arguments<W> a, R *divisors)
{
    row_place at;

    if (!group_row<G>(a.sets, &at)) return;
    const R total = divisor<R, G>(a, at);
    if (lane_id() % G == 0) divisors[at.row] = total;
}

/* dw[i,r] = Σ_f dm[i,r,f] feats[j,f], 0 where there is no neighbour, handed to set_dw. */
template <typename T, int G, typename W, typename S>
__global__ void weight_gradients(const aggregate_arguments<W> a, const S set_dw)
{
    using R = wide_t<T>;
    const int     lane = (int)(lane_id() % G);
    const int64_t F = a.feats.cols;
    row_place     at;

    if (!group_row<G>(a.sets, &at)) return;
    const R total = static_cast<const R *>(a.divisors)[at.row];
    for (int64_t r0 = 0; r0 < a.k; r0 += G) {
        const int64_t mine = neighbour(a, at, r0 + lane);
        const R       my_weight = mine >= 0 ? a.weight(at, r0 + lane, mine) : (R)0;
        const int     last = a.k - r0 < G ? (int)(a.k - r0) : G;
        R             dw = 0; /* of rank r0 + lane */

        for (int r = 0; r < last; r++) {
            const int64_t j = __shfl_sync(group_mask<G>(), (int)mine, r, G);
            const R       w = __shfl_sync(group_mask<G>(), my_weight, r, G);
            R             sum = 0;

            if (j >= 0)
                for (int64_t f = lane; f < F; f += G) {
                    const R x = widen(static_cast<const T *>(a.feats.data)[row_at(a.feats, a.sets, at.begin, at.set, j) + f]);

                    sum += message_gradient<T>(a, at, total, r0 + r, f, w * x) * x;
                }
            for (int step = G / 2; step; step /= 2) sum += __shfl_xor_sync(group_mask<G>(), sum, step, G);
            if (lane == r) dw = sum;
        }
        if (r0 + lane < a.k) set_dw(a, at, r0 + lane, mine, dw);
    }
}

/* grad_feats[j,f] = Σ w[i,r] dm[i,r,f] over the places that hold j, ascending. */
template <typename T, int G, typename W, typename P>
__global__ void feature_gradients(const aggregate_arguments<W> a, const reverse_list<P> list)
{
    using R = wide_t<T>;
    const int     lane = (int)(lane_id() % G);
    const int64_t F = a.feats.cols;
    row_place     to;

    if (!group_row<G>(a.sets, &to)) return;
    const int64_t first = list.begins[to.row], end = list.begins[to.row + 1];
    for (int64_t f0 = 0; f0 < F; f0 += G) {
        const int64_t f = f0 + lane;
        const R       x = f < F ? widen(static_cast<const T *>(a.feats.data)[row_at(a.feats, a.sets, to.begin, to.set, to.i) + f]) : (R)0;
        R             sum = 0;

        for (int64_t e0 = first; e0 < end; e0 += G) {
            const int64_t e = e0 + lane;
            const int     last = end - e0 < G ? (int)(end - e0) : G;
            row_place     mine = to;
            int           my_rank = 0;
            R             my_weight = 0, my_divisor = 0;

            if (e < end) {
                const int64_t place = (int64_t)list.places[e];

                mine.row = place / list.k;
                mine.i = mine.row - to.begin;
                my_rank = (int)(place - mine.row * list.k);
                my_weight = a.weight(mine, my_rank, to.i);
                my_divisor = static_cast<const R *>(a.divisors)[mine.row];
            }
            for (int n = 0; n < last; n++) {
                row_place at = to;
                const R   w = __shfl_sync(group_mask<G>(), my_weight, n, G);
                const R   total = __shfl_sync(group_mask<G>(), my_divisor, n, G);
                const int rank = __shfl_sync(group_mask<G>(), my_rank, n, G);

                at.i = __shfl_sync(group_mask<G>(), (int)mine.i, n, G);
                at.row = to.begin + at.i;
                if (f < F) sum += w * message_gradient<T>(a, at, total, rank, f, w * x);
            }
        }
        if (f < F) static_cast<T *>(a.grad_feats.data)[row_at(a.grad_feats, a.sets, to.begin, to.set, to.i) + f] = narrow<T>(sum);
    }
}

/* Groups of 16 lanes take up to 16 features at a time, groups of 32 more. Calls f with a value of that size. */
template <typename F> muvox_status with_group(int64_t features, F f)
{
    return features <= 16 ? f(std::integral_constant<int, 16>()) : f(std::integral_constant<int, 32>());
}

enum { THREADS = 128 };

template <int G> unsigned group_blocks(const muvox_sets &sets)
{
    return blocks_for(sets.rows, THREADS / G);
}

inline muvox_status check_rows_grid(muvox_context *ctx, const char *op, const muvox_sets &sets)
{
    return check_grid(ctx, op, sets.rows / (THREADS / WARP) + 1);
}

template <typename W> muvox_status aggregate_forward(muvox_context *ctx, const char *op_name, const aggregate_arguments<W> &a)
{
    FORWARD(check_rows_grid(ctx, op_name, a.sets));
    if (!a.sets.rows) return MUVOX_OK;
    return with_dtype(a.feats.dtype, [&](auto element) {
        using T = decltype(element);
        return with_group(a.feats.cols, [&](auto group) -> muvox_status {
            if constexpr (W::template fits<T>) {
                constexpr int G = decltype(group)::value;

                aggregate_rows<T, G><<<group_blocks<G>(a.sets), THREADS, 0, stream_of(ctx)>>>(a);
                LAUNCHED();
            }
            return MUVOX_OK;
        });
    });
}

/* grad_feats by a reverse list if it is wanted, and what set_dw makes of the gradients of the weights, unless it is null. */
template <typename T, typename W, typename P, typename S>
muvox_status aggregate_backward(muvox_context *ctx, const char *op_name, aggregate_arguments<W> a, const reverse_list<P> &list, const S *set_dw)
{
    using R = wide_t<T>;
    workspace divisors(ctx);

    FORWARD(divisors.take(op_name, a.sets.rows * (int64_t)sizeof(R)));
    a.divisors = divisors.as<R>();
    return with_group(a.feats.cols, [&](auto group) -> muvox_status {
        constexpr int  G = decltype(group)::value;
        const unsigned blocks = group_blocks<G>(a.sets);

        count_neighbours<R, G><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, divisors.as<R>());
        LAUNCHED();
        if (set_dw) {
            weight_gradients<T, G><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, *set_dw);
            LAUNCHED();
        }
        if (a.grad_feats.data) {
            feature_gradients<T, G><<<blocks, THREADS, 0, stream_of(ctx)>>>(a, list);
            LAUNCHED();
        }
        return MUVOX_OK;
    });
}

#endif
