/* The gradients of aggregation over the neighbours of each row, all from the side of the rows that are picked: dm of a place
 * is made once, and gives that place's part of the gradient of the features and, against the row's own features, the gradient
 * of the weight. */
#ifndef MUVOX_CUDA_AGGREGATE_BACKWARD_H
#define MUVOX_CUDA_AGGREGATE_BACKWARD_H

#include "aggregate.cuh"
#include "reverse.cuh"

/* 1 over what the mean of each row divides by, unless shares is null; 0 where there is no neighbour, and no gradient either.
 * Places without neighbour get their gradient of weights here, as no row picks them up. */
template <typename R, typename W, typename S>
__global__ void write_shares(const aggregate_arguments<W> a, R *shares, const S set_dw)
{
    row_place at = {};
    int       count = 0;

    if (!find_row(a.sets, nullptr, (int64_t)blockIdx.x * blockDim.x + threadIdx.x, &at)) return;
    const int32_t *const near = set_rows<const int32_t>(a.neighbours, a.sets, at.begin, at.set)[at.i];
    for (int r = 0; r < a.k; r++)
        if (outside(at, __ldg(near + r)))
            set_dw.without_neighbour(a, at, r);
        else
            count++;
    if (shares) shares[at.row] = count == 0 ? (R)0 : a.mean_by_k ? 1 / (R)a.k : 1 / (R)count;
}

/* Lanes in groups of LANES add up COUNT numbers each: the result of a lane is the sum of number lane / SPACING % COUNT. */
template <int COUNT, int SPACING, int LANES, typename R> __device__ __forceinline__ R sums_of_lanes(R (&x)[COUNT])
{
#pragma unroll
    for (int half = COUNT / 2; half; half /= 2) {
        const bool upper = lane_id() & (unsigned)(half * SPACING);

#pragma unroll
        for (int n = 0; n < half; n++) {
            const R kept = upper ? x[n + half] : x[n], sent = upper ? x[n] : x[n + half];

            x[n] = kept + __shfl_xor_sync(ALL_LANES, sent, half * SPACING);
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2)
        if (!(step & (COUNT - 1) * SPACING)) x[0] += __shfl_xor_sync(ALL_LANES, x[0], step);
    return x[0];
}

/* What all lanes of a group need of a place: rank r of row i, its weight, and that row's share of the mean. */
template <typename R> struct alignas(sizeof(R) == sizeof(float) ? 16 : 8) place_data {
    int i, r;
    R   weight, share;
};

/* Places that a group deals with between two sums over lanes. */
enum { PLACES = 8 };

/* One warp for each row j. The places that hold it are dealt out to the groups of lanes in turn, so the sums over them are
 *
 *     grad_feats[j,f] = Σ_group Σ w[i,r] dm[i,r,f]      dw[i,r] = Σ_f dm[i,r,f] feats[j,f]
 *
 * RANK is the type of the winners. set_dw takes dw, and adds up what else is wanted. */
template <typename T, int G, int NF, typename RANK, typename W, typename P, typename S>
__global__ void __launch_bounds__(BLOCK, BLOCKS_AT_ONCE<wide_t<T>>)
    row_gradients(const aggregate_arguments<W> a, const wide_t<T> *shares, const reverse_list<P> list, const S set_dw,
                  int64_t run)
{
    using R = wide_t<T>;
    constexpr int GROUPS = WARP / G;
    __shared__ place_data<R>   shared[BLOCK];
    const int                  lane = (int)(lane_id() % G), group = (int)(lane_id() / G), F = (int)a.feats.cols;
    place_data<R> *const       mine = shared + threadIdx.x;
    const place_data<R> *const of_group = mine - lane;
    const bool                 mean = a.columns.mean >= 0, sum = a.columns.sum >= 0;
    const bool                 max = a.columns.max >= 0, absmax = a.columns.absmax >= 0, wants_dw = set_dw.wanted();
    const int64_t              first_place = blockIdx.x * run + threadIdx.x / WARP;
    row_place                  to = {};

    for (int64_t turn = 0; turn < run; turn += BLOCK / WARP) {
        if (!find_row(a.sets, a.order, first_place + turn, &to)) continue; /* the whole warp */
        const int64_t              end = list.ends[to.row];
        const auto                 weight = a.weight.of(to);
        const R                    row_weight = weight.row_weight(to.i);
        const set_rows<const T>    grads(a.grad_out, a.sets, to.begin, to.set);
        const set_rows<const RANK> winners(a.winners, a.sets, to.begin, to.set);
        const T *const             feats = set_rows<const T>(a.feats, a.sets, to.begin, to.set)[to.i] + lane;
        T *const                   result = set_rows<T>(a.grad_feats, a.sets, to.begin, to.set)[to.i] + lane;
        typename S::sums           sums = {};
        bool                       there; /* whether this lane has a place of the batch, and which */
        int                        i = 0, r = 0, count;
        R                          decay = 0;

        /* The batch from place e0 on: what its places are, and how many are this group's. */
        const auto find_places = [&](int64_t e0) {
            const int64_t e = e0 + GROUPS * (lane % PLACES) + group;
            const int     left = (int)(end - e0 < GROUPS * PLACES ? end - e0 : GROUPS * PLACES);
            R             share = 0;

            there = e < end;
            count = (left + GROUPS - 1 - group) / GROUPS;
            if (there) {
                i = (int)(list.row(e) - to.begin);
                r = list.rank(e);
                decay = weight.decay(i, r, to.i);
                if (mean) share = __ldg(shares + to.begin + i);
            }
            __syncwarp(); /* nobody reads the last batch any more */
            *mine = {i, r, decay * row_weight, share};
            __syncwarp();
        };
        const auto load_feats = [&](int first, R(&x)[NF]) {
#pragma unroll
            for (int u = 0; u < NF; u++)
                x[u] = has_feature<G, NF>(u, first, F) ? widen(__ldg(feats + first + u * G)) : (R)0;
        };
        /* Adds the batch's part of the sums of the features from `first` on. */
        const auto add_places = [&](int first, const R(&x)[NF], R(&of_feats)[NF], R(&of_weights)[PLACES]) {
            const T *const    grad_of_lane = grads.first + first + lane;
            const RANK *const winners_of_lane = winners.first + first + lane;

#pragma unroll
            for (int n = 0; n < PLACES; n++) {
                if (n >= count) break;
                const place_data<R> at = of_group[n];
                const T *const      grad = grad_of_lane + (int64_t)at.i * grads.stride;
                const RANK *const   winner = winners_of_lane + (int64_t)at.i * winners.stride;
                R                   dm[NF] = {};

                if (mean)
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (has_feature<G, NF>(u, first, F))
                            dm[u] = at.share * widen(__ldg(grad + a.columns.mean * F + u * G));
                if (sum)
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (has_feature<G, NF>(u, first, F)) dm[u] += widen(__ldg(grad + a.columns.sum * F + u * G));
                if (max)
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (has_feature<G, NF>(u, first, F) && __ldg(winner + a.columns.max_winner * F + u * G) == at.r)
                            dm[u] += widen(__ldg(grad + a.columns.max * F + u * G));
                if (absmax)
#pragma unroll
                    for (int u = 0; u < NF; u++)
                        if (has_feature<G, NF>(u, first, F) &&
                            __ldg(winner + a.columns.absmax_winner * F + u * G) == at.r) {
                            const R m = at.weight * x[u];

                            dm[u] += (R)((m > 0) - (m < 0)) * widen(__ldg(grad + a.columns.absmax * F + u * G));
                        }
#pragma unroll
                for (int u = 0; u < NF; u++) of_feats[u] = fused(at.weight, dm[u], of_feats[u]);
#pragma unroll
                for (int u = 0; u < NF; u++) of_weights[n] = fused(dm[u], x[u], of_weights[n]);
            }
        };
        const auto finish_places = [&](R(&of_weights)[PLACES]) {
            const R dw = sums_of_lanes<PLACES, 1, G>(of_weights);

            set_dw.add(a, weight, to, i, r, there && lane < PLACES, decay, row_weight, dw, &sums);
        };

        const bool at_once = G < WARP || F <= G * NF; /* all features are in the sums of one pass */
        for (int first = 0; first < F; first += G * NF) {
            R x[NF], of_feats[NF] = {};

            load_feats(first, x);
            for (int64_t e0 = list.begins[to.row]; e0 < end; e0 += GROUPS * PLACES) {
                R of_weights[PLACES] = {};

                find_places(e0);
                add_places(first, x, of_feats, of_weights);
                if (wants_dw && at_once) finish_places(of_weights);
            }
#pragma unroll
            for (int u = 0; u < NF; u++) {
#pragma unroll
                for (int step = G; step < WARP; step *= 2) of_feats[u] += __shfl_xor_sync(ALL_LANES, of_feats[u], step);
                if (a.grad_feats.data && group == 0 && has_feature<G, NF>(u, first, F))
                    result[first + u * G] = narrow<T>(of_feats[u]);
            }
        }
        if (wants_dw && !at_once)
            for (int64_t e0 = list.begins[to.row]; e0 < end; e0 += GROUPS * PLACES) {
                R of_weights[PLACES] = {};

                find_places(e0);
                for (int first = 0; first < F; first += G * NF) {
                    R x[NF], of_feats[NF] = {};

                    load_feats(first, x);
                    add_places(first, x, of_feats, of_weights);
                }
                finish_places(of_weights);
            }
        set_dw.store_sums(a, to, sums);
    }
}

/* grad_feats if it is wanted, and what set_dw makes of the gradients of the weights. */
template <typename T, typename W, typename P, typename S>
muvox_status aggregate_backward(muvox_context *ctx, const char *op_name, const aggregate_arguments<W> &a,
                                const reverse_list<P> &list, const S &set_dw)
{
    using R = wide_t<T>;
    const int64_t N = a.sets.rows, run = rows_of_run(N, BLOCK / WARP);
    workspace     shares(ctx);

    FORWARD(check_launch(ctx, op_name, a));
    if (a.columns.mean >= 0) FORWARD(shares.take(op_name, N * (int64_t)sizeof(R)));
    if (a.columns.mean >= 0 || (S::every_place && set_dw.wanted())) {
        FORWARD(check_grid(ctx, op_name, N / 128 + 1));
        write_shares<R><<<blocks_for(N, 128), 128, 0, stream_of(ctx)>>>(a, shares.as<R>(), set_dw);
        LAUNCHED();
    }
    return with_group(a.feats.cols, [&](auto group, auto each) -> muvox_status {
        constexpr int  G = decltype(group)::value, NF = decltype(each)::value;
        const unsigned blocks = blocks_for(N, run);

        if (a.winners.dtype == MUVOX_U8)
            row_gradients<T, G, NF, uint8_t>
                <<<blocks, BLOCK, 0, stream_of(ctx)>>>(a, shares.as<R>(), list, set_dw, run);
        else
            row_gradients<T, G, NF, int32_t>
                <<<blocks, BLOCK, 0, stream_of(ctx)>>>(a, shares.as<R>(), list, set_dw, run);
        LAUNCHED();
        return MUVOX_OK;
    });
}

#endif
