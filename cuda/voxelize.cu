/* voxelize on the device: see muvox/voxelize.h. Points are sorted by voxel, then every voxel sums its own in order. */
#include "muvox/voxelize.h"

#include "../ops/checks.h"
#include "reverse.cuh"
#include "table.cuh"

template <typename T, typename P> static __global__ void average(muvox_voxelize op, reverse_list<P> list)
{
    using R = wide_t<T>;
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, C = op.feats.cols, s = quotient(index, C),
                  c = index - s * C;

    if (s >= op.counts.rows) return;
    const int64_t count = integer(op.counts, s);
    R             sum = 0;

    if (count > 0)
        for (int64_t e = list.begins[s]; e < list.begins[s + 1]; e++)
            sum += widen(static_cast<const T *>(op.feats.data)[list.row(e) * op.feats.row_stride + c]);
    static_cast<T *>(op.out.data)[s * op.out.row_stride + c] = narrow<T>(count > 0 ? sum / (R)count : (R)0);
}

extern "C" muvox_status muvox_voxelize_forward_cuda(muvox_context *ctx, const muvox_voxelize *op)
{
    const char *const op_name = "voxelize";
    const int64_t     N = op->feats.rows, S = op->counts.rows, C = op->feats.cols;

    FORWARD(check_voxelize_forward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    if (!S || !op->out.data) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, S * C / 256 + 1));
    return with_places(N, 1, [&](auto place) {
        using P = decltype(place);
        reverse_list<P> list = {};
        workspace       hold(ctx);

        FORWARD(reverse_index<P>(ctx, op_name, S, op->index, &hold, &list));
        return with_dtype(op->feats.dtype, [&](auto element) -> muvox_status {
            average<decltype(element)><<<blocks_for(S * C, 256), 256, 0, stream_of(ctx)>>>(*op, list);
            LAUNCHED();
            return MUVOX_OK;
        });
    });
}

template <typename T> static __global__ void spread(muvox_voxelize op)
{
    using R = wide_t<T>;
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, C = op.feats.cols, n = quotient(index, C),
                  c = index - n * C;

    if (n >= op.feats.rows) return;
    const int64_t s = integer(op.index, n), count = s >= 0 && s < op.counts.rows ? integer(op.counts, s) : 0;
    R             g = 0;

    if (count > 0) g = widen(static_cast<const T *>(op.grad_out.data)[s * op.grad_out.row_stride + c]) / (R)count;
    static_cast<T *>(op.grad_feats.data)[n * op.grad_feats.row_stride + c] = narrow<T>(g);
}

extern "C" muvox_status muvox_voxelize_backward_cuda(muvox_context *ctx, const muvox_voxelize *op)
{
    const char *const op_name = "voxelize";
    const int64_t     count = op->feats.rows * op->feats.cols;

    FORWARD(check_voxelize_backward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    if (!count || !op->grad_feats.data) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    return with_dtype(op->feats.dtype, [&](auto element) -> muvox_status {
        spread<decltype(element)><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(*op);
        LAUNCHED();
        return MUVOX_OK;
    });
}
