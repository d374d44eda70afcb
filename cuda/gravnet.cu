/* gravnet on the device: see muvox/gravnet.h. */
#include "muvox/gravnet.h"

#include "../ops/checks.h"
#include "aggregate.cuh"
#include "pull.cuh"
#include "search.cuh"

template <typename R>
static aggregate_arguments<gravnet_weights<R>> arguments_of(const muvox_gravnet *op, const muvox_output &neighbours)
{
    return {op->sets, columns_of(op->aggregates), (op->options & MUVOX_MEAN_BY_K) != 0, op->k, op->feats, op->grad_out, neighbours, op->out, op->winners, op->grad_feats, {op->coords, op->row_weights, op->sets, (R)op->scale}};
}

extern "C" muvox_status muvox_gravnet_forward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    search_request request = {op->sets, op->sets, op->coords, op->coords, op->mask, op->k, op->options, op->max_radius, op->neighbours, {}, {}};

    FORWARD(check_gravnet_forward(ctx, op));
    const device_call call(ctx, "gravnet");
    workspace         hold(ctx);
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "gravnet", "splits", &op->sets));
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

/* Keeps what the other gradients need of rank r of row i, at i · k + r: exp(−scale d²) dw for the row weights, and that times
 * u_j for the coordinates. */
template <typename R> struct keep_dw {
    R *decayed, *weighted; /* null: not needed */
    template <typename A>
    __device__ __forceinline__ void operator()(const A &a, const row_place &at, int64_t r, int32_t j, R dw) const
    {
        const R kept = j < 0 ? (R)0 : a.weight.decay(at, j) * dw;

        if (decayed) decayed[at.row * a.k + r] = kept;
        if (weighted) weighted[at.row * a.k + r] = j < 0 ? (R)0 : kept * a.weight.row_weight(at, j);
    }
};

/* grad_row_weights[j] = Σ exp(−scale d²) dw over the places that hold j, ascending. */
template <typename R, typename P>
static __global__ void row_weight_gradients(muvox_sets sets, reverse_list<P> list, const R *decayed, int64_t k, muvox_output grad)
{
    row_place at;
    R         sum = 0;

    if (!group_row<1>(sets, &at)) return;
    for (int64_t e = list.begins[at.row]; e < list.begins[at.row + 1]; e++) sum += decayed[list.row(e) * k + list.rank(e)];
    static_cast<R *>(grad.data)[row_at(grad, sets, at.begin, at.set, at.i)] = sum;
}

template <typename T, typename P> static muvox_status backward(muvox_context *ctx, const muvox_gravnet *op)
{
    using R = wide_t<T>;
    const char *const op_name = "gravnet";
    const auto        a = arguments_of<R>(op, op->neighbours);
    const int64_t     N = a.sets.rows, k = a.k;
    reverse_list<P>   list = {};
    workspace         hold(ctx), decayed(ctx), weighted(ctx);

    FORWARD(reverse_neighbours(ctx, op_name, a.sets, a.sets, a.neighbours, k, &hold, &list));
    if (op->grad_row_weights.data) FORWARD(decayed.take(op_name, N * k * (int64_t)sizeof(R)));
    if (op->grad_coords.data) FORWARD(weighted.take(op_name, N * k * (int64_t)sizeof(R)));
    const keep_dw<R> set_dw = {decayed.as<R>(), weighted.as<R>()};
    FORWARD(aggregate_backward<T>(ctx, op_name, a, list, set_dw.decayed || set_dw.weighted ? &set_dw : nullptr));
    if (op->grad_row_weights.data) {
        row_weight_gradients<R><<<blocks_for(N, 128), 128, 0, stream_of(ctx)>>>(a.sets, list, set_dw.decayed, k, op->grad_row_weights);
        LAUNCHED();
    }
    const muvox_matrix pulls = {set_dw.weighted, sizeof(R) == 8 ? MUVOX_F64 : MUVOX_F32, N, k, k, a.sets.size * k};
    return launch_pull<R>(ctx, op_name, pull_arguments<P>{a.sets, a.sets, op->coords, op->coords, a.neighbours, pulls, -2 * op->scale, list, op->grad_coords, true, true});
}

extern "C" muvox_status muvox_gravnet_backward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    FORWARD(check_gravnet_backward(ctx, op));
    const device_call call(ctx, "gravnet");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "gravnet", "splits", &op->sets));
    FORWARD(check_rows_grid(ctx, "gravnet", op->sets));
    if (!op->sets.rows) return MUVOX_OK;
    return with_dtype(op->feats.dtype, [&](auto element) {
        return with_places(op->sets.rows, op->k, [&](auto place) {
            return backward<decltype(element), decltype(place)>(ctx, op);
        });
    });
}
