/* trilinear_weights: argument check, plain reference, entry points. The tuned kernels are in trilinear_weights_kernel.inc. */
#include "muvox/trilinear_weights.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

#define OP "trilinear_weights"

muvox_status check_trilinear_weights_forward(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    const int64_t N = op->points.rows;
    int64_t       voxels = 1;

    FORWARD(check_call(ctx, OP, op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, OP, "points", op->points.dtype));
    FORWARD(check_matrix(ctx, OP, "points", &op->points, N, 3));
    for (int axis = 0; axis < 3; axis++) {
        REQUIRE(isfinite(op->origin[axis]), MUVOX_BAD_ARGUMENT, OP ": origin has %g, expected finite numbers",
                op->origin[axis]);
        REQUIRE(isfinite(op->voxel_size[axis]) && op->voxel_size[axis] > 0, MUVOX_BAD_ARGUMENT,
                OP ": voxel_size has %g, expected finite numbers above 0", op->voxel_size[axis]);
        REQUIRE(op->shape[axis] >= 0 && (op->shape[axis] == 0 || voxels <= INT32_MAX / op->shape[axis]),
                MUVOX_BAD_ARGUMENT, OP ": shape has %lld, expected 0 or more with a product below 2^31",
                (long long)op->shape[axis]);
        voxels *= op->shape[axis];
    }
    FORWARD(check_output(ctx, OP, "index", &op->index, N, 8, MUVOX_I32));
    return check_output(ctx, OP, "weights", &op->weights, N, 8, wide_dtype(op->points.dtype));
}

muvox_status check_trilinear_weights_backward(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    FORWARD(check_trilinear_weights_forward(ctx, op));
    FORWARD(check_matrix(ctx, OP, "grad_weights", &op->grad_weights, op->points.rows, 8));
    REQUIRE(op->grad_weights.dtype == wide_dtype(op->points.dtype), MUVOX_BAD_DTYPE,
            OP ": grad_weights is %s, expected %s", dtype_name(op->grad_weights.dtype),
            dtype_name(wide_dtype(op->points.dtype)));
    return check_output(ctx, OP, "grad_points", &op->grad_points, op->points.rows, 3, op->points.dtype);
}

/* u of a point along one axis: in voxels, from the centre of the first one. In float but for double, so that all kernels
 * find the same voxels. */
static double place(const muvox_trilinear_weights *op, int64_t n, int axis)
{
    const double x = element(op->points.data, op->points.dtype, n * op->points.row_stride + axis);

    if (op->points.dtype == MUVOX_F64) return (x - op->origin[axis]) / op->voxel_size[axis] - 0.5;
    return ((float)x - (float)op->origin[axis]) / (float)op->voxel_size[axis] - 0.5F;
}

/* The voxel at a corner (0 or 1 along the axis) of u, and its weight; −1 outside the grid. */
static int64_t corner(double u, int64_t size, int64_t upper, double *weight, double *slope)
{
    const double low = floor(u), t = u - low;

    *weight = upper ? t : 1 - t;
    *slope = upper ? 1 : -1;
    return low + (double)upper >= 0 && low + (double)upper < (double)size ? (int64_t)low + upper : -1;
}

muvox_status trilinear_weights_forward_reference(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    (void)ctx;
    for (int64_t n = 0; n < op->points.rows; n++)
        for (int64_t c = 0; c < 8; c++) {
            int64_t voxel = 0;
            double  weight = 1;

            for (int axis = 0; axis < 3; axis++) {
                double        along, slope;
                const int64_t i = corner(place(op, n, axis), op->shape[axis], c >> (2 - axis) & 1, &along, &slope);

                voxel = voxel < 0 || i < 0 ? -1 : voxel * op->shape[axis] + i;
                weight *= along;
            }
            OUT_AT(index, n * op->index.row_stride + c, (double)voxel);
            OUT_AT(weights, n * op->weights.row_stride + c, voxel < 0 ? 0 : weight);
        }
    return MUVOX_OK;
}

muvox_status trilinear_weights_backward_reference(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    (void)ctx;
    for (int64_t n = 0; n < op->points.rows; n++)
        for (int axis = 0; axis < 3; axis++) {
            double sum = 0;

            for (int64_t c = 0; c < 8; c++) {
                double product = 1 / op->voxel_size[axis];
                bool   inside = true;

                for (int other = 0; other < 3; other++) {
                    double        along, slope;
                    const int64_t i =
                        corner(place(op, n, other), op->shape[other], c >> (2 - other) & 1, &along, &slope);

                    inside = inside && i >= 0;
                    product *= other == axis ? slope : along;
                }
                if (inside)
                    sum += product *
                           element(op->grad_weights.data, op->grad_weights.dtype, n * op->grad_weights.row_stride + c);
            }
            OUT_AT(grad_points, n * op->grad_points.row_stride + axis, sum);
        }
    return MUVOX_OK;
}

muvox_status muvox_trilinear_weights_forward(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_trilinear_weights_forward(ctx, op));
    FORWARD(kernels_for(ctx, OP, op->points.dtype, &kernels));
    return kernels->trilinear_weights_forward(ctx, op);
}

muvox_status muvox_trilinear_weights_backward(muvox_context *ctx, const muvox_trilinear_weights *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_trilinear_weights_backward(ctx, op));
    FORWARD(kernels_for(ctx, OP, op->points.dtype, &kernels));
    return kernels->trilinear_weights_backward(ctx, op);
}
