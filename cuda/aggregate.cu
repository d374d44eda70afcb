/* aggregate on the device: see muvox/aggregate.h. */
#include "muvox/aggregate.h"

#include "../ops/checks.h"
#include "aggregate.cuh"

template <typename R> static aggregate_arguments<given_weights<R>> arguments_of(const muvox_aggregate *op)
{
    const muvox_output neighbours = {const_cast<void *>(op->neighbours.data),
                                     op->neighbours.dtype,
                                     op->neighbours.rows,
                                     op->neighbours.cols,
                                     op->neighbours.row_stride,
                                     op->neighbours.set_stride};

    return {op->sets,
            nullptr,
            columns_of(op->aggregates),
            false,
            (int)op->neighbours.cols,
            op->feats,
            op->grad_out,
            neighbours,
            op->out,
            op->winners,
            op->grad_feats,
            {op->weights, op->sets}};
}

extern "C" muvox_status muvox_aggregate_forward_cuda(muvox_context *ctx, const muvox_aggregate *op)
{
    FORWARD(check_aggregate_forward(ctx, op));
    const device_call call(ctx, "aggregate");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "aggregate", "splits", &op->sets));
    if (op->feats.dtype == MUVOX_F64) return aggregate_forward(ctx, "aggregate", arguments_of<double>(op));
    return aggregate_forward(ctx, "aggregate", arguments_of<float>(op));
}

/* grad_weights[i,r] = dw[i,r] */
template <typename R> struct store_dw {
    muvox_output grad;
    template <typename A, typename W>
    __device__ __forceinline__ void operator()(const A &a, const W &, const row_place &at, int r, int, R dw) const
    {
        store<R>(grad.data, grad.dtype, row_at(grad, a.sets, at.begin, at.set, at.i) + r, dw);
    }
};

extern "C" muvox_status muvox_aggregate_backward_cuda(muvox_context *ctx, const muvox_aggregate *op)
{
    FORWARD(check_aggregate_backward(ctx, op));
    const device_call call(ctx, "aggregate");
    FORWARD(call.status);
    FORWARD(check_splits_on_device(ctx, "aggregate", "splits", &op->sets));
    FORWARD(check_row_stride(ctx, "aggregate", "weights", op->weights.row_stride));
    if (!op->sets.rows) return MUVOX_OK;
    return with_dtype(op->feats.dtype, [&](auto element) {
        using T = decltype(element);
        using R = wide_t<T>;
        const auto        a = arguments_of<R>(op);
        const store_dw<R> set_dw = {op->grad_weights};

        return with_places(a.sets.rows, a.k, [&](auto place) -> muvox_status {
            reverse_list<decltype(place)> list = {};
            workspace                     hold(ctx);

            if (op->grad_feats.data)
                FORWARD(reverse_neighbours(ctx, "aggregate", a.sets, a.sets, a.neighbours, a.k, &hold, &list));
            return aggregate_backward<T>(ctx, "aggregate", a, list, op->grad_weights.data ? &set_dw : nullptr);
        });
    });
}
