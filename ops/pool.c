/* pool: argument check, plain reference, entry points. The tuned kernels are in pool_kernel.inc. */
#include "muvox/pool.h"

#include "check.h"
#include "context.h"
#include "reference.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_pool *op)
{
    const int64_t S = op->sets.count, F = op->x.cols;

    FORWARD(check_call(ctx, "pool", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "pool", "x", op->x.dtype));
    FORWARD(check_aggregates(ctx, "pool", op->aggregates));
    FORWARD(check_matrix(ctx, "pool", "x", &op->x, op->sets.rows, -1));
    FORWARD(check_output(ctx, "pool", "out", &op->out, S, aggregate_count(op->aggregates) * F, op->x.dtype));
    FORWARD(check_output(ctx, "pool", "winners", &op->winners, S, winner_count(op->aggregates) * F, MUVOX_I32));
    return check_sets(ctx, "pool", &op->sets);
}

static muvox_status check_backward(muvox_context *ctx, const muvox_pool *op)
{
    const int64_t S = op->sets.count, F = op->x.cols;

    FORWARD(check(ctx, op));
    if (winner_count(op->aggregates)) FORWARD(check_given(ctx, "pool", "winners", &op->winners, S));
    FORWARD(check_matrix(ctx, "pool", "grad_out", &op->grad_out, S, aggregate_count(op->aggregates) * F));
    FORWARD(check_same_dtype(ctx, "pool", "grad_out", op->grad_out.dtype, "x", op->x.dtype));
    return check_row_output(ctx, "pool", "grad_x", &op->grad_x, &op->sets, F, op->x.dtype);
}

/* One output of set s, and the row that won it, −1 for an empty set. */
static double pooled(const muvox_pool *op, muvox_aggregate_kind kind, int64_t s, int64_t f, int64_t *winner)
{
    const int64_t M = set_rows(&op->sets, s);
    double        sum = 0, best = 0;

    *winner = -1;
    for (int64_t i = 0; i < M; i++) {
        const double x = IN(x, s, i, f), candidate = kind == MUVOX_ABSMAX ? fabs(x) : x;

        sum += x;
        if (*winner < 0 || candidate > best || (isnan(candidate) && !isnan(best))) { /* the first maximum, or NaN */
            *winner = i;
            best = candidate;
        }
    }
    if (kind == MUVOX_MEAN) return M ? sum / (double)M : 0;
    return kind == MUVOX_SUM ? sum : best;
}

muvox_status pool_forward_reference(muvox_context *ctx, const muvox_pool *op)
{
    const int64_t F = op->x.cols;

    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int a = 0, w = 0; a < aggregate_count(op->aggregates); a++) {
            const muvox_aggregate_kind kind = aggregate_at(op->aggregates, a);
            const bool                 wins = kind == MUVOX_MAX || kind == MUVOX_ABSMAX;

            for (int64_t f = 0; f < F; f++) {
                int64_t      winner = -1;
                const double value = pooled(op, kind, s, f, &winner);

                if (op->out.data) set_element(op->out.data, op->out.dtype, s * op->out.row_stride + a * F + f, value);
                if (wins && op->winners.data)
                    set_element(op->winners.data, MUVOX_I32, s * op->winners.row_stride + w * F + f, (double)winner);
            }
            w += wins;
        }
    return MUVOX_OK;
}

muvox_status pool_backward_reference(muvox_context *ctx, const muvox_pool *op)
{
    const int64_t F = op->x.cols;

    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++)
            for (int64_t f = 0; f < F; f++) {
                double dx = 0;

                for (int a = 0, w = 0; a < aggregate_count(op->aggregates); a++) {
                    const muvox_aggregate_kind kind = aggregate_at(op->aggregates, a);
                    const double               g =
                        element(op->grad_out.data, op->grad_out.dtype, s * op->grad_out.row_stride + a * F + f);

                    if (kind == MUVOX_MEAN) {
                        dx += g / (double)set_rows(&op->sets, s);
                    } else if (kind == MUVOX_SUM) {
                        dx += g;
                    } else {
                        const double x = IN(x, s, i, f);

                        if (((const int32_t *)op->winners.data)[s * op->winners.row_stride + w * F + f] == i)
                            dx += kind == MUVOX_MAX ? g : g * ((x > 0) - (x < 0));
                        w++;
                    }
                }
                OUT(grad_x, s, i, f, dx);
            }
    return MUVOX_OK;
}

muvox_status muvox_pool_forward(muvox_context *ctx, const muvox_pool *op)
{
    const muvox_kernels *kernels;

    FORWARD(check(ctx, op));
    FORWARD(kernels_for(ctx, "pool", op->x.dtype, &kernels));
    return kernels->pool_forward(ctx, op);
}

muvox_status muvox_pool_backward(muvox_context *ctx, const muvox_pool *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_backward(ctx, op));
    FORWARD(kernels_for(ctx, "pool", op->x.dtype, &kernels));
    return kernels->pool_backward(ctx, op);
}
