/* gravnet on the device: see muvox/gravnet.h. */
#include "muvox/gravnet.h"

#include "../ops/checks.h"
#include "aggregate.cuh"
#include "order.cuh"
#include "pull.cuh"
#include "search.cuh"

template <typename R> static __global__ void widen_rows(muvox_sets sets, muvox_matrix m, R *to)
{
    const int64_t number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = quotient(number, m.cols);
    row_place     at;

    if (row >= sets.rows) return;
    at.set = set_of_row(sets, row);
    at.begin = set_begin(sets, at.set);
    to[number] = load<R>(m.data, m.dtype, row_at(m, sets, at.begin, at.set, row - at.begin) + number - row * m.cols);
}

/* coords in the arithmetic of the features: themselves, or a copy in hold. */
template <typename R>
static muvox_status widen_coords(muvox_context *ctx, const muvox_sets &sets, workspace *hold, muvox_matrix *coords)
{
    const char *const op_name = "gravnet";
    const int64_t     count = sets.rows * coords->cols;

    FORWARD(check_row_stride(ctx, op_name, "coords", coords->row_stride));
    if (coords->dtype == DTYPE<R> || !count) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    FORWARD(hold->take(op_name, count * (int64_t)sizeof(R)));
    widen_rows<R><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(sets, *coords, hold->as<R>());
    LAUNCHED();
    *coords = {hold->as<R>(), DTYPE<R>, sets.rows, coords->cols, coords->cols, sets.size * coords->cols};
    return MUVOX_OK;
}

/* coords are in R. */
template <typename R>
static aggregate_arguments<gravnet_weights<R>> arguments_of(const muvox_gravnet *op, const muvox_output &neighbours,
                                                            const muvox_matrix &coords, const int32_t *order)
{
    return {op->sets,
            order,
            columns_of(op->aggregates),
            (op->options & MUVOX_MEAN_BY_K) != 0,
            (int)op->k,
            op->feats,
            op->grad_out,
            neighbours,
            op->out,
            op->winners,
            op->grad_feats,
            {coords, op->row_weights, op->sets, (R)op->scale}};
}

template <typename R>
static muvox_status aggregate(muvox_context *ctx, const muvox_gravnet *op, const muvox_output &neighbours,
                              const int32_t *order)
{
    muvox_matrix coords = op->coords;
    workspace    hold(ctx);

    if (!op->out.data && !op->winners.data) return MUVOX_OK;
    FORWARD(widen_coords<R>(ctx, op->sets, &hold, &coords));
    return aggregate_forward(ctx, "gravnet", arguments_of<R>(op, neighbours, coords, order));
}

extern "C" muvox_status muvox_gravnet_forward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    search_request request = {op->sets,    op->sets,       op->coords,     op->coords, op->mask, op->k,
                              op->options, op->max_radius, op->neighbours, {},         {}};
    const int32_t *order;

    FORWARD(check_gravnet_forward(ctx, op));
    const device_call call(ctx, "gravnet");
    workspace         hold(ctx), rows(ctx);
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "gravnet", "splits", &op->sets));
    if (!op->sets.rows) return MUVOX_OK;
    if (!op->neighbours.data) {
        FORWARD(hold.take("gravnet", op->sets.rows * op->k * 4));
        request.neighbours = {hold.as<void>(), MUVOX_I32, op->sets.rows, op->k, op->k, op->sets.size * op->k};
    }
    FORWARD(search_neighbours(ctx, "gravnet", request, &rows, &order));
    if (op->feats.dtype == MUVOX_F64) return aggregate<double>(ctx, op, request.neighbours, order);
    return aggregate<float>(ctx, op, request.neighbours, order);
}

/* Keeps what the other gradients need of rank r of row i, at i · k + r: exp(−scale d²) dw for the row weights, and that times
 * u_j for the coordinates. */
template <typename R> struct keep_dw {
    R *decayed, *weighted; /* null: not needed */
    template <typename A, typename W>
    __device__ __forceinline__ void operator()(const A &a, const W &weight, const row_place &at, int r, int j,
                                               R dw) const
    {
        const R kept = j < 0 ? (R)0 : weight.decay(at.i, j) * dw;

        if (decayed) decayed[at.row * a.k + r] = kept;
        if (weighted) weighted[at.row * a.k + r] = j < 0 ? (R)0 : kept * weight.row_weight(j);
    }
};

/* grad_row_weights[j] = Σ exp(−scale d²) dw over the places that hold j, ascending. */
template <typename R, typename P>
static __global__ void row_weight_gradients(muvox_sets sets, reverse_list<P> list, const R *decayed, int64_t k,
                                            muvox_output grad)
{
    row_place at;
    R         sum = 0;

    if (!group_row<1>(sets, nullptr, &at)) return;
    for (int64_t e = list.begins[at.row]; e < list.begins[at.row + 1]; e++)
        sum += decayed[list.row(e) * k + list.rank(e)];
    static_cast<R *>(grad.data)[row_at(grad, sets, at.begin, at.set, at.i)] = sum;
}

template <typename T, typename P> static muvox_status backward(muvox_context *ctx, const muvox_gravnet *op)
{
    using R = wide_t<T>;
    const char *const op_name = "gravnet";
    const int64_t     N = op->sets.rows, k = op->k;
    muvox_matrix      coords = op->coords;
    reverse_list<P>   list = {};
    const int32_t    *order;
    workspace         hold(ctx), decayed(ctx), weighted(ctx), wide(ctx), order_hold(ctx);

    FORWARD(widen_coords<R>(ctx, op->sets, &wide, &coords));
    FORWARD(order_only(ctx, op_name, op->sets, coords, &order_hold, &order));
    const auto a = arguments_of<R>(op, op->neighbours, coords, order);
    FORWARD(reverse_neighbours(ctx, op_name, a.sets, a.sets, a.neighbours, k, &hold, &list));
    if (op->grad_row_weights.data) FORWARD(decayed.take(op_name, N * k * (int64_t)sizeof(R)));
    if (op->grad_coords.data) FORWARD(weighted.take(op_name, N * k * (int64_t)sizeof(R)));
    const keep_dw<R> set_dw = {decayed.as<R>(), weighted.as<R>()};
    FORWARD(aggregate_backward<T>(ctx, op_name, a, list, set_dw.decayed || set_dw.weighted ? &set_dw : nullptr));
    if (op->grad_row_weights.data) {
        row_weight_gradients<R>
            <<<blocks_for(N, 128), 128, 0, stream_of(ctx)>>>(a.sets, list, set_dw.decayed, k, op->grad_row_weights);
        LAUNCHED();
    }
    const muvox_matrix pulls = {set_dw.weighted, DTYPE<R>, N, k, k, a.sets.size * k};
    return launch_pull<R>(ctx, op_name,
                          pull_arguments<P>{a.sets, a.sets, coords, coords, a.neighbours, pulls, -2 * op->scale, order,
                                            list, op->grad_coords, true, true});
}

extern "C" muvox_status muvox_gravnet_backward_cuda(muvox_context *ctx, const muvox_gravnet *op)
{
    FORWARD(check_gravnet_backward(ctx, op));
    const device_call call(ctx, "gravnet");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "gravnet", "splits", &op->sets));
    if (!op->sets.rows) return MUVOX_OK;
    return with_dtype(op->feats.dtype, [&](auto element) {
        return with_places(op->sets.rows, op->k,
                           [&](auto place) { return backward<decltype(element), decltype(place)>(ctx, op); });
    });
}
