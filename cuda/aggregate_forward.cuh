/* Aggregation over the neighbours of each row. */
#ifndef MUVOX_CUDA_AGGREGATE_FORWARD_H
#define MUVOX_CUDA_AGGREGATE_FORWARD_H

#include "aggregate.cuh"

/* MEAN_MAX: these two are asked for, and nothing else. */
template <typename T, int G, int NF, bool MEAN_MAX, typename W>
__global__ void __launch_bounds__(BLOCK, BLOCKS_AT_ONCE<wide_t<T>>)
    aggregate_rows(const aggregate_arguments<W> a, int feats_bytes, int run)
{
    using R = wide_t<T>;
    const int      lane = (int)(lane_id() % G), F = (int)a.feats.cols;
    const unsigned lanes_before = lane_id() / G * G;
    const bool     wants_mean = MEAN_MAX || a.columns.mean >= 0, wants_sum = !MEAN_MAX && a.columns.sum >= 0;
    const bool     wants_max = MEAN_MAX || a.columns.max >= 0, wants_absmax = !MEAN_MAX && a.columns.absmax >= 0;
    const int64_t  first_place = (int64_t)blockIdx.x * run + threadIdx.x / G;
    row_place      at = {};

    for (int turn = 0; turn < run; turn += BLOCK / G) {
        const bool              there = find_row(a.sets, a.order, first_place + turn, &at);
        const auto              weight = a.weight.of(at);
        const set_rows<const T> feats(a.feats, a.sets, at.begin, at.set);
        const int32_t *const    near = set_rows<const int32_t>(a.neighbours, a.sets, at.begin, at.set)[at.i];

        for (int first = 0; first < F; first += G * NF) {
            const T *const of_lane = feats.first + first + lane;
            R              sum[NF] = {};
            best<R>        largest[NF], largest_size[NF];
            int            count = 0, first_rank = -1;

            for (int r0 = 0; r0 < a.k; r0 += G) {
                const int32_t listed = there && r0 + lane < a.k ? __ldg(near + r0 + lane) : -1,
                              mine = outside(at, listed) ? -1 : listed;
                four<R> first_four;
                const R my_weight =
                    mine >= 0 ? weight.decay(at.i, r0 + lane, mine, &first_four) * weight.row_weight(mine) : (R)0;
                const int      last = min(a.k - r0, G);
                const unsigned found =
                    __ballot_sync(ALL_LANES, mine >= 0) >> lanes_before & (unsigned)((UINT64_C(1) << G) - 1);
                const auto add = [&](auto all) { /* whether all of them are neighbours, for all rows of the warp */
#pragma unroll decltype(all)::value ? 4 : 1
                                                 for (int r = 0; r < last; r++) {
                                                     const int32_t j = __shfl_sync(ALL_LANES, mine, r, G);
                                                     const R       w = __shfl_sync(ALL_LANES, my_weight, r, G);
                                                     R             m[NF];

                                                     if (!decltype(all)::value && j < 0) continue;
                                                     const T *const row = row_of(of_lane, j, feats_bytes);
#pragma unroll
                                                     for (int u = 0; u < NF; u++) {
                                                         const R x = has_feature<G, NF>(u, first, F)
                                                                         ? widen(__ldg(row + u * G))
                                                                         : (R)0;

                                                         m[u] = fused(w, x, (R)0); /* never −0 */
                                                     }
#pragma unroll
                                                     for (int u = 0; u < NF; u++) sum[u] += m[u];
                                                     if (wants_max)
#pragma unroll
                                                         for (int u = 0; u < NF; u++) largest[u].meet(m[u], r0 + r);
                                                     if (wants_absmax)
#pragma unroll
                                                         for (int u = 0; u < NF; u++)
                                                             largest_size[u].meet(fabs(m[u]), r0 + r);
                                                 }
                };

                if (__all_sync(ALL_LANES, __popc(found) == last))
                    add(std::true_type());
                else
                    add(std::false_type());
                if (first_rank < 0 && found) first_rank = r0 + __ffs((int)found) - 1;
                count += __popc(found);
            }
            const R       divisor = a.mean_by_k ? (R)a.k : (R)count;
            const int64_t to = row_at(a.out, a.sets, at.begin, at.set, at.i) + first + lane;
            const int64_t wins = row_at(a.winners, a.sets, at.begin, at.set, at.i) + first + lane;
#pragma unroll
            for (int u = 0; u < NF; u++) {
                T *const out = static_cast<T *>(a.out.data) + to + u * G;

                if (!there || !has_feature<G, NF>(u, first, F)) break;
                largest[u].settle(first_rank);
                largest_size[u].settle(first_rank);
                if (a.winners.data && wants_max)
                    store_rank(a.winners, wins + a.columns.max_winner * F + u * G, largest[u].index);
                if (a.winners.data && wants_absmax)
                    store_rank(a.winners, wins + a.columns.absmax_winner * F + u * G, largest_size[u].index);
                if (!a.out.data) continue;
                if (wants_mean) out[a.columns.mean * F] = narrow<T>(count ? sum[u] / divisor : (R)0);
                if (wants_max) out[a.columns.max * F] = narrow<T>(largest[u].value);
                if (wants_absmax) out[a.columns.absmax * F] = narrow<T>(largest_size[u].value);
                if (wants_sum) out[a.columns.sum * F] = narrow<T>(sum[u]);
            }
        }
    }
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
                const int     run = rows_of_run(a.sets.rows, BLOCK / G);

                with_mean_max(a.columns, [&](auto mean_max) {
                    aggregate_rows<T, G, NF, decltype(mean_max)::value>
                        <<<blocks_for(a.sets.rows, run), BLOCK, 0, stream_of(ctx)>>>(a, (int)row_bytes(a.feats), run);
                });
                LAUNCHED();
            }
            return MUVOX_OK;
        });
    });
}

#endif
