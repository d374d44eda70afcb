/* devoxelize: argument check, plain reference, entry points. The tuned kernels are in devoxelize_kernel.inc. */
#include "muvox/devoxelize.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

muvox_status check_devoxelize_forward(muvox_context *ctx, const muvox_devoxelize *op)
{
    const int64_t N = op->index.rows, K = op->index.cols;

    FORWARD(check_call(ctx, "devoxelize", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "devoxelize", "feats", op->feats.dtype));
    FORWARD(check_floating(ctx, "devoxelize", "weights", op->weights.dtype));
    FORWARD(check_same_arithmetic(ctx, "devoxelize", "weights", op->weights.dtype, "feats", op->feats.dtype));
    FORWARD(check_integer(ctx, "devoxelize", "index", op->index.dtype));
    FORWARD(check_matrix(ctx, "devoxelize", "feats", &op->feats, op->feats.rows, -1));
    FORWARD(check_matrix(ctx, "devoxelize", "index", &op->index, N, -1));
    FORWARD(check_matrix(ctx, "devoxelize", "weights", &op->weights, N, K));
    return check_output(ctx, "devoxelize", "out", &op->out, N, op->feats.cols, op->feats.dtype);
}

muvox_status check_devoxelize_backward(muvox_context *ctx, const muvox_devoxelize *op)
{
    const int64_t N = op->index.rows, C = op->feats.cols;

    FORWARD(check_devoxelize_forward(ctx, op));
    FORWARD(check_matrix(ctx, "devoxelize", "grad_out", &op->grad_out, N, C));
    FORWARD(check_same_dtype(ctx, "devoxelize", "grad_out", op->grad_out.dtype, "feats", op->feats.dtype));
    FORWARD(check_output(ctx, "devoxelize", "grad_feats", &op->grad_feats, op->feats.rows, C, op->feats.dtype));
    return check_output(ctx, "devoxelize", "grad_weights", &op->grad_weights, N, op->index.cols, op->weights.dtype);
}

/* The voxel that place (n, k) reads, −1 where it is skipped. */
static int64_t voxel_of(const muvox_devoxelize *op, int64_t n, int64_t k)
{
    const int64_t s = integer(&op->index, n * op->index.row_stride + k);

    return s >= 0 && s < op->feats.rows ? s : -1;
}

static double weight(const muvox_devoxelize *op, int64_t n, int64_t k)
{
    return element(op->weights.data, op->weights.dtype, n * op->weights.row_stride + k);
}

static double feature(const muvox_devoxelize *op, int64_t s, int64_t c)
{
    return element(op->feats.data, op->feats.dtype, s * op->feats.row_stride + c);
}

static double grad(const muvox_devoxelize *op, int64_t n, int64_t c)
{
    return element(op->grad_out.data, op->grad_out.dtype, n * op->grad_out.row_stride + c);
}

muvox_status devoxelize_forward_reference(muvox_context *ctx, const muvox_devoxelize *op)
{
    (void)ctx;
    for (int64_t n = 0; n < op->index.rows; n++)
        for (int64_t c = 0; c < op->feats.cols; c++) {
            double sum = 0;

            for (int64_t k = 0; k < op->index.cols; k++)
                if (voxel_of(op, n, k) >= 0) sum += weight(op, n, k) * feature(op, voxel_of(op, n, k), c);
            OUT_AT(out, n * op->out.row_stride + c, sum);
        }
    return MUVOX_OK;
}

muvox_status devoxelize_backward_reference(muvox_context *ctx, const muvox_devoxelize *op)
{
    const int64_t N = op->index.rows, K = op->index.cols, C = op->feats.cols;

    (void)ctx;
    for (int64_t s = 0; s < op->feats.rows && op->grad_feats.data; s++)
        for (int64_t c = 0; c < C; c++) {
            double sum = 0;

            for (int64_t n = 0; n < N; n++)
                for (int64_t k = 0; k < K; k++)
                    if (voxel_of(op, n, k) == s) sum += weight(op, n, k) * grad(op, n, c);
            OUT_AT(grad_feats, s * op->grad_feats.row_stride + c, sum);
        }
    for (int64_t n = 0; n < N && op->grad_weights.data; n++)
        for (int64_t k = 0; k < K; k++) {
            double sum = 0;

            for (int64_t c = 0; c < C && voxel_of(op, n, k) >= 0; c++)
                sum += grad(op, n, c) * feature(op, voxel_of(op, n, k), c);
            OUT_AT(grad_weights, n * op->grad_weights.row_stride + k, sum);
        }
    return MUVOX_OK;
}

muvox_status muvox_devoxelize_forward(muvox_context *ctx, const muvox_devoxelize *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_devoxelize_forward(ctx, op));
    FORWARD(kernels_for(ctx, "devoxelize", op->feats.dtype, &kernels));
    return kernels->devoxelize_forward(ctx, op);
}

muvox_status muvox_devoxelize_backward(muvox_context *ctx, const muvox_devoxelize *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_devoxelize_backward(ctx, op));
    FORWARD(kernels_for(ctx, "devoxelize", op->feats.dtype, &kernels));
    return kernels->devoxelize_backward(ctx, op);
}
