/* devoxelize on the device: see muvox/devoxelize.h. */
#include "muvox/devoxelize.h"

#include "../ops/checks.h"
#include "table.cuh"

template <typename R> static __device__ __forceinline__ R weight_of(const muvox_devoxelize &op, int64_t n, int64_t k)
{
    return load<R>(op.weights.data, op.weights.dtype, n * op.weights.row_stride + k);
}

template <typename T> static __global__ void read_voxels(muvox_devoxelize op)
{
    using R = wide_t<T>;
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, C = op.feats.cols, K = op.index.cols;
    const int64_t n = quotient(index, C), c = index - n * C;
    R             sum = 0;

    if (n >= op.index.rows) return;
    for (int64_t k = 0; k < K; k++) {
        const int64_t s = integer(op.index, n * K + k);

        if (s < 0 || s >= op.feats.rows) continue;
        sum += weight_of<R>(op, n, k) * widen(static_cast<const T *>(op.feats.data)[s * op.feats.row_stride + c]);
    }
    static_cast<T *>(op.out.data)[n * op.out.row_stride + c] = narrow<T>(sum);
}

extern "C" muvox_status muvox_devoxelize_forward_cuda(muvox_context *ctx, const muvox_devoxelize *op)
{
    const char *const op_name = "devoxelize";
    const int64_t     count = op->index.rows * op->feats.cols;

    FORWARD(check_devoxelize_forward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    if (!count || !op->out.data) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    return with_dtype(op->feats.dtype, [&](auto element) -> muvox_status {
        read_voxels<decltype(element)><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(*op);
        LAUNCHED();
        return MUVOX_OK;
    });
}

/* One thread for each voxel and channel, over the places that read the voxel. */
template <typename T, typename P> static __global__ void voxel_gradients(muvox_devoxelize op, reverse_list<P> list)
{
    using R = wide_t<T>;
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, C = op.feats.cols, s = quotient(index, C),
                  c = index - s * C;
    R sum = 0;

    if (s >= op.feats.rows) return;
    for (int64_t e = list.begins[s]; e < list.begins[s + 1]; e++) {
        const int64_t n = list.row(e);

        sum += weight_of<R>(op, n, list.rank(e)) *
               widen(static_cast<const T *>(op.grad_out.data)[n * op.grad_out.row_stride + c]);
    }
    static_cast<T *>(op.grad_feats.data)[s * op.grad_feats.row_stride + c] = narrow<T>(sum);
}

/* One warp for each point: lanes over channels. */
template <typename T> static __global__ void weight_gradients(muvox_devoxelize op)
{
    using R = wide_t<T>;
    const int64_t n = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / WARP, K = op.index.cols;

    if (n >= op.index.rows) return;
    for (int64_t k = 0; k < K; k++) {
        const int64_t s = integer(op.index, n * K + k);
        R             sum = 0;

        if (s >= 0 && s < op.feats.rows)
            for (int64_t c = lane_id(); c < op.feats.cols; c += WARP)
                sum += widen(static_cast<const T *>(op.grad_out.data)[n * op.grad_out.row_stride + c]) *
                       widen(static_cast<const T *>(op.feats.data)[s * op.feats.row_stride + c]);
        sum = sum_of_lanes(sum);
        if (lane_id() == 0)
            store<R>(op.grad_weights.data, op.grad_weights.dtype, n * op.grad_weights.row_stride + k, sum);
    }
}

extern "C" muvox_status muvox_devoxelize_backward_cuda(muvox_context *ctx, const muvox_devoxelize *op)
{
    const char *const op_name = "devoxelize";
    const int64_t     N = op->index.rows, S = op->feats.rows, count = S * op->feats.cols;

    FORWARD(check_devoxelize_backward(ctx, op));
    const device_call call(ctx, op_name);
    FORWARD(call.status);
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    FORWARD(check_grid(ctx, op_name, N / 4 + 1));
    return with_dtype(op->feats.dtype, [&](auto element) {
        using T = decltype(element);
        return with_places(N, op->index.cols, [&](auto place) -> muvox_status {
            reverse_list<decltype(place)> list = {};
            workspace                     hold(ctx);

            if (N && op->grad_weights.data) {
                weight_gradients<T><<<blocks_for(N, 4), 4 * WARP, 0, stream_of(ctx)>>>(*op);
                LAUNCHED();
            }
            if (!count || !op->grad_feats.data) return MUVOX_OK;
            FORWARD(reverse_index(ctx, op_name, S, op->index, &hold, &list));
            voxel_gradients<T><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(*op, list);
            LAUNCHED();
            return MUVOX_OK;
        });
    });
}
