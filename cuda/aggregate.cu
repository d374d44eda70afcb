/* aggregate on the device: see muvox/aggregate.h. */
#include "muvox/aggregate.h"

#include "../ops/checks.h"
#include "aggregate_backward.cuh"
#include "aggregate_forward.cuh"

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
template <typename R> struct weight_gradients {
    static constexpr bool every_place = true;
    struct sums {
    };
    struct in_set {
        int64_t first; /* where its first row lies */
    };
    muvox_output                             grad;
    __host__ __device__ __forceinline__ bool wanted() const
    {
        return grad.data;
    }
    template <typename A> __device__ __forceinline__ in_set of(const A &a, const row_place &at) const
    {
        return {row_at(grad, a.sets, at.begin, at.set, 0)};
    }
    __device__ __forceinline__ void put(const in_set &set, int i, int r, R dw) const
    {
        store<R>(grad.data, grad.dtype, set.first + i * grad.row_stride + r, dw);
    }
    template <typename A>
    __device__ __forceinline__ void without_neighbour(const A &a, const row_place &at, int r) const
    {
        if (grad.data) put(of(a, at), at.i, r, 0);
    }
    template <typename A, typename W>
    __device__ __forceinline__ void add(const A &, const W &, const in_set &set, const row_place &, int i, int r,
                                        bool there, R, const four<R> &, R, R dw, sums *) const
    {
        if (there) put(set, i, r, dw);
    }
    template <typename A> __device__ __forceinline__ void store_sums(const A &, const row_place &, const sums &) const
    {
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
    return with_dtype(op->feats.dtype, [&](auto element) -> muvox_status {
        using T = decltype(element);
        using R = wide_t<T>;
        const auto a = arguments_of<R>(op);

        if (!op->grad_feats.data && !op->grad_weights.data) return MUVOX_OK;
        return with_places(a.sets.rows, a.k, [&](auto place) -> muvox_status {
            reverse_list<decltype(place)> list = {};
            workspace                     hold(ctx);
            backward_memory               memory(ctx);

            FORWARD(reverse_neighbours(ctx, "aggregate", a.sets, a.sets, a.neighbours, a.k, &hold, &list));
            return aggregate_backward<T>(ctx, "aggregate", a, list, weight_gradients<R>{op->grad_weights}, nullptr,
                                         &memory);
        });
    });
}
