/* gravnet on the device: see muvox/gravnet.h. */
#include "muvox/gravnet.h"

#include "../ops/checks.h"
#include "aggregate.cuh"
#include "pull.cuh"
#include "search.cuh"

template <typename R>
static aggregate_arguments<gravnet_weights<R>> arguments_of(const muvox_gravnet *op, const muvox_output &neighbours)
{
    return {op->sets, op->aggregates, (op->options & MUVOX_MEAN_BY_K) != 0, op->k, op->feats, op->grad_out, neighbours, op->out, op->winners, op->grad_feats, {op->coords, op->row_weights, op->sets, (R)op->scale}, nullptr};
}

extern "C" muvox_status muvox_gravnet_forward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    search_request request = {op->sets, op->sets, op->coords, op->coords, op->mask, op->k, op->options, op->max_radius, op->neighbours, {}, {}};

    FORWARD(check_gravnet_forward(ctx, op));
    const device_call call(ctx, "gravnet");
    workspace         hold(ctx);
    FORWARD(call.status);
    if (!op->sets.rows) return MUVOX_OK;
    if (!op->neighbours.data) {
        FORWARD(hold.take("gravnet", op->sets.rows * op->k * 4));
        request.neighbours = {hold.as<void>(), MUVOX_I32, op->sets.rows, op->k, op->k, op->sets.size * op->k};
    }
    FORWARD(search_neighbours(ctx, "gravnet", request));
    if (!op->out.data && !op->winners.data) return MUVOX_OK;
    if (op->feats.dtype == MUVOX_F64) return aggregate_forward(ctx, "gravnet", arguments_of<double>(op, request.neighbours));
    return aggregate_forward(ctx, "gravnet", arguments_of<float>(op, request.neighbours));
}

/* Keeps exp(−scale d²) dw[i,r] at i · k + r. */
template <typename R> struct keep_dw {
    R *kept;
    template <typename A>
    __device__ __forceinline__ void operator()(const A &a, const row_place &at, int64_t r, int64_t j, R dw) const
    {
        kept[at.row * a.k + r] = j < 0 ? (R)0 : a.weight.decay(at, j) * dw;
    }
};

/* p = −2 scale exp(−scale d²) u_j dw */
template <typename R> struct weight_pull {
    const R           *kept;
    int64_t            k;
    gravnet_weights<R> weight;
    __device__ __forceinline__ R operator()(int64_t row, int64_t s, int64_t i, int64_t r, int64_t j) const
    {
        const row_place at = {row, s, row - i, i, 0};

        return -2 * weight.scale * weight.row_weight(at, j) * kept[row * k + r];
    }
};

/* grad_row_weights[j] = Σ exp(−scale d²) dw over the places that hold j, ascending. */
template <typename R, typename P>
static __global__ void row_weight_gradients(muvox_sets sets, reverse_list<P> list, const R *kept, muvox_output grad)
{
    row_place at;
    R         sum = 0;

    if (!group_row<1>(sets, &at)) return;
    for (int64_t e = list.begins[at.row]; e < list.begins[at.row + 1]; e++) sum += kept[list.places[e]];
    static_cast<R *>(grad.data)[row_at(grad, sets, at.begin, at.set, at.i)] = sum;
}

template <typename T, typename P> static muvox_status backward(muvox_context *ctx, const muvox_gravnet *op)
{
    using R = wide_t<T>;
    const char *const op_name = "gravnet";
    const auto        a = arguments_of<R>(op, op->neighbours);
    const bool        needs_dw = op->grad_coords.data || op->grad_row_weights.data;
    reverse_list<P>   list = {};
    workspace         hold(ctx), kept(ctx);
    keep_dw<R>        set_dw = {};

    FORWARD(reverse_neighbours(ctx, op_name, a.sets, a.sets, a.neighbours, a.k, &hold, &list));
    if (needs_dw) FORWARD(kept.take(op_name, a.sets.rows * a.k * (int64_t)sizeof(R)));
    set_dw.kept = kept.as<R>();
    FORWARD(aggregate_backward<T>(ctx, op_name, a, list, needs_dw ? &set_dw : nullptr));
    if (op->grad_row_weights.data) {
        row_weight_gradients<R><<<blocks_for(a.sets.rows, 128), 128, 0, stream_of(ctx)>>>(a.sets, list, set_dw.kept, op->grad_row_weights);
        LAUNCHED();
    }
    return launch_pull<R>(ctx, op_name, pull_arguments<P, weight_pull<R>>{a.sets, a.sets, op->coords, op->coords, a.neighbours, list, op->grad_coords, true, true, {set_dw.kept, a.k, a.weight}});
}

extern "C" muvox_status muvox_gravnet_backward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    FORWARD(check_gravnet_backward(ctx, op));
    const device_call call(ctx, "gravnet");
    FORWARD(call.status);
    FORWARD(check_rows_grid(ctx, "gravnet", op->sets));
    if (!op->sets.rows) return MUVOX_OK;
    return with_dtype(op->feats.dtype, [&](auto element) {
        return with_places(op->sets.rows * op->k, [&](auto place) {
            return backward<decltype(element), decltype(place)>(ctx, op);
        });
    });
}
