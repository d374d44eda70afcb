/* voxelize: argument check, plain reference, entry points. The tuned kernels are in voxelize_kernel.inc. */
#include "muvox/voxelize.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

static muvox_status check(muvox_context *ctx, const muvox_voxelize *op, bool counts)
{
    const int64_t N = op->feats.rows, S = op->counts.rows;

    FORWARD(check_call(ctx, "voxelize", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "voxelize", "feats", op->feats.dtype));
    FORWARD(check_integer(ctx, "voxelize", "index", op->index.dtype));
    FORWARD(check_matrix(ctx, "voxelize", "index", &op->index, N, 1));
    if (counts) {
        FORWARD(check_integer(ctx, "voxelize", "counts", op->counts.dtype));
        FORWARD(check_matrix(ctx, "voxelize", "counts", &op->counts, S, 1));
    }
    return check_output(ctx, "voxelize", "out", &op->out, S, op->feats.cols, op->feats.dtype);
}

muvox_status check_voxelize_forward(muvox_context *ctx, const muvox_voxelize *op)
{
    FORWARD(check(ctx, op, !op->histogram.data));
    FORWARD(check_output(ctx, "voxelize", "histogram", &op->histogram, op->counts.rows, 1, MUVOX_I64));
    return check_matrix(ctx, "voxelize", "feats", &op->feats, op->feats.rows, -1);
}

muvox_status check_voxelize_backward(muvox_context *ctx, const muvox_voxelize *op)
{
    const int64_t C = op->feats.cols;

    FORWARD(check(ctx, op, true));
    FORWARD(check_matrix(ctx, "voxelize", "grad_out", &op->grad_out, op->counts.rows, C));
    FORWARD(check_same_dtype(ctx, "voxelize", "grad_out", op->grad_out.dtype, "feats", op->feats.dtype));
    return check_output(ctx, "voxelize", "grad_feats", &op->grad_feats, op->feats.rows, C, op->feats.dtype);
}

static int64_t count(const muvox_voxelize *op, int64_t s)
{
    return integer(&op->counts, s * op->counts.row_stride);
}

static int64_t voxel_of(const muvox_voxelize *op, int64_t n)
{
    return integer(&op->index, n * op->index.row_stride);
}

muvox_status voxelize_forward_reference(muvox_context *ctx, const muvox_voxelize *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->counts.rows; s++)
        for (int64_t c = 0; c < op->feats.cols; c++) {
            double sum = 0;

            for (int64_t n = 0; n < op->feats.rows; n++)
                if (voxel_of(op, n) == s) sum += element(op->feats.data, op->feats.dtype, n * op->feats.row_stride + c);
            OUT_AT(out, s * op->out.row_stride + c, count(op, s) > 0 ? sum / (double)count(op, s) : 0);
        }
    return MUVOX_OK;
}

muvox_status voxelize_backward_reference(muvox_context *ctx, const muvox_voxelize *op)
{
    (void)ctx;
    for (int64_t n = 0; n < op->feats.rows; n++) {
        const int64_t s = voxel_of(op, n);
        const bool    seen = s >= 0 && s < op->counts.rows && count(op, s) > 0;

        for (int64_t c = 0; c < op->feats.cols; c++)
            OUT_AT(grad_feats, n * op->grad_feats.row_stride + c,
                   seen ? element(op->grad_out.data, op->grad_out.dtype, s * op->grad_out.row_stride + c) /
                              (double)count(op, s)
                        : 0);
    }
    return MUVOX_OK;
}

/* The histogram of index, as counts. */
static muvox_matrix count_points(const muvox_voxelize *op)
{
    const muvox_output h = op->histogram;
    int64_t *const     count = h.data;

    for (int64_t s = 0; s < h.rows; s++) count[s * h.row_stride] = 0;
    for (int64_t n = 0; n < op->index.rows; n++) {
        const int64_t s = voxel_of(op, n);

        if (s >= 0 && s < h.rows) count[s * h.row_stride]++;
    }
    return (muvox_matrix){h.data, h.dtype, h.rows, h.cols, h.row_stride, h.set_stride};
}

muvox_status muvox_voxelize_forward(muvox_context *ctx, const muvox_voxelize *op)
{
    const muvox_kernels *kernels;
    muvox_voxelize       counted;

    FORWARD(check_voxelize_forward(ctx, op));
    FORWARD(kernels_for(ctx, "voxelize", op->feats.dtype, &kernels));
    if (!op->histogram.data) return kernels->voxelize_forward(ctx, op);
    counted = *op;
    counted.counts = count_points(op);
    return kernels->voxelize_forward(ctx, &counted);
}

muvox_status muvox_voxelize_backward(muvox_context *ctx, const muvox_voxelize *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_voxelize_backward(ctx, op));
    FORWARD(kernels_for(ctx, "voxelize", op->feats.dtype, &kernels));
    return kernels->voxelize_backward(ctx, op);
}
