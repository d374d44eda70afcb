/* trilinear_weights on the device: see muvox/trilinear_weights.h. One thread for each point. */
#include "muvox/trilinear_weights.h"

#include "../ops/checks.h"
#include "device.cuh"
#include "launch.cuh"

/* Along each axis the lower voxel, whether it and its upper neighbour are in the grid, and the fraction t. */
template <typename R> struct grid_point {
    int64_t    low[3];
    bool       inside[3][2];
    R          t[3];
    __device__ grid_point(const muvox_trilinear_weights &op, int64_t n)
    {
        for (int axis = 0; axis < 3; axis++) {
            const R x = load<R>(op.points.data, op.points.dtype, n * op.points.row_stride + axis);
            const R u = (x - (R)op.origin[axis]) / (R)op.voxel_size[axis] - (R)0.5;
            const R lower = floor(u), size = (R)op.shape[axis];

            /* Compared as numbers first: a far, infinite or NaN point has no integer voxel. */
            inside[axis][0] = lower >= 0 && lower < size;
            inside[axis][1] = lower >= -1 && lower < size - 1;
            low[axis] = lower >= -1 && lower < size ? (int64_t)lower : 0;
            t[axis] = u - lower;
        }
    }
    /* Weight of the lower or upper voxel along an axis. */
    __device__ R along(int axis, int up) const
    {
        return up ? t[axis] : 1 - t[axis];
    }
};

template <typename R> static __global__ void corners(muvox_trilinear_weights op)
{
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (n >= op.points.rows) return;
    const grid_point<R> point(op, n);
    for (int c = 0; c < 8; c++) {
        const int up[3] = {c >> 2, c >> 1 & 1, c & 1};
        int64_t   voxel = 0;
        R         weight = 1;
        bool      inside = true;

        for (int axis = 0; axis < 3; axis++) {
            inside = inside && point.inside[axis][up[axis]];
            voxel = voxel * op.shape[axis] + point.low[axis] + up[axis];
            weight *= point.along(axis, up[axis]);
        }
        if (op.index.data)
            static_cast<int32_t *>(op.index.data)[n * op.index.row_stride + c] = inside ? (int32_t)voxel : -1;
        if (op.weights.data) static_cast<R *>(op.weights.data)[n * op.weights.row_stride + c] = inside ? weight : (R)0;
    }
}

template <typename R> static __global__ void point_gradients(muvox_trilinear_weights op)
{
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    R             sum[3] = {0, 0, 0};

    if (n >= op.points.rows) return;
    const grid_point<R> point(op, n);
    for (int c = 0; c < 8; c++) {
        const int up[3] = {c >> 2, c >> 1 & 1, c & 1};
        const R   g = static_cast<const R *>(op.grad_weights.data)[n * op.grad_weights.row_stride + c];

        if (!point.inside[0][up[0]] || !point.inside[1][up[1]] || !point.inside[2][up[2]]) continue;
        for (int axis = 0; axis < 3; axis++) {
            const int one = (axis + 1) % 3, two = (axis + 2) % 3;

            sum[axis] += (up[axis] ? 1 : -1) / (R)op.voxel_size[axis] * point.along(one, up[one]) *
                         point.along(two, up[two]) * g;
        }
    }
    for (int axis = 0; axis < 3; axis++)
        store<R>(op.grad_points.data, op.grad_points.dtype, n * op.grad_points.row_stride + axis, sum[axis]);
}

template <typename K>
static muvox_status launch(muvox_context *ctx, const muvox_trilinear_weights *op, K in_float, K in_double)
{
    const char *const op_name = "trilinear_weights";
    const K           kernel = op->points.dtype == MUVOX_F64 ? in_double : in_float;
    const device_call call(ctx, op_name);

    FORWARD(call.status);
    if (!op->points.rows) return MUVOX_OK;
    FORWARD(check_grid(ctx, op_name, op->points.rows / 256 + 1));
    kernel<<<blocks_for(op->points.rows, 256), 256, 0, stream_of(ctx)>>>(*op);
    LAUNCHED();
    return MUVOX_OK;
}

extern "C" muvox_status muvox_trilinear_weights_forward_cuda(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    FORWARD(check_trilinear_weights_forward(ctx, op));
    return launch(ctx, op, corners<float>, corners<double>);
}

extern "C" muvox_status muvox_trilinear_weights_backward_cuda(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    FORWARD(check_trilinear_weights_backward(ctx, op));
    if (!op->grad_points.data) return MUVOX_OK;
    return launch(ctx, op, point_gradients<float>, point_gradients<double>);
}
