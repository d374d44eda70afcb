/* pool: argument check, plain reference, entry points. The tuned kernels are in pool_kernel.inc. */
#include "muvox/pool.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_pool *op)
{
    FORWARD(check_call(ctx, "pool", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "pool", "x", op->x.dtype));
    FORWARD(check_aggregates(ctx, "pool", op->aggregates));
    FORWARD(check_matrix(ctx, "pool", "x", &op->x, op->sets.rows, -1));
    FORWARD(check_mask(ctx, "pool", &op->mask, op->sets.rows));
    FORWARD(check_sets(ctx, "pool", &op->sets));
    return check_row_weights(ctx, "pool", &op->row_weights, wide_dtype(op->x.dtype), op->sets.rows);
}

/* What the checks before do not read. */
static muvox_status check_data(muvox_context *ctx, const muvox_pool *op)
{
    FORWARD(check_splits(ctx, "pool", "splits", &op->sets));
    return check_weight_values(ctx, "pool", &op->row_weights, &op->sets);
}

muvox_status check_pool_forward(muvox_context *ctx, const muvox_pool *op)
{
    const int64_t S = op->sets.count, F = op->x.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_output(ctx, "pool", "out", &op->out, S, aggregate_count(op->aggregates) * F, op->x.dtype));
    return check_output(ctx, "pool", "winners", &op->winners, S, winner_count(op->aggregates) * F, MUVOX_I32);
}

muvox_status check_pool_backward(muvox_context *ctx, const muvox_pool *op)
{
    const int64_t S = op->sets.count, F = op->x.cols;

    FORWARD(check(ctx, op));
    if (winner_count(op->aggregates))
        FORWARD(check_saved(ctx, "pool", "winners", &op->winners, S, winner_count(op->aggregates) * F, MUVOX_I32));
    FORWARD(check_matrix(ctx, "pool", "grad_out", &op->grad_out, S, aggregate_count(op->aggregates) * F));
    FORWARD(check_same_dtype(ctx, "pool", "grad_out", op->grad_out.dtype, "x", op->x.dtype));
    FORWARD(check_row_output(ctx, "pool", "grad_x", &op->grad_x, &op->sets, F, op->x.dtype));
    REQUIRE(op->row_weights.data || !op->grad_row_weights.data, MUVOX_BAD_ARGUMENT,
            "pool: grad_row_weights is asked for without row_weights");
    return check_row_output(ctx, "pool", "grad_row_weights", &op->grad_row_weights, &op->sets, 1,
                            op->row_weights.dtype);
}

static double weight(const muvox_pool *op, int64_t s, int64_t i)
{
    return op->row_weights.data ? IN(row_weights, s, i, 0) : 1;
}

/* Σ u over the rows of set s that take part: what the mean divides by. */
static double total_weight(const muvox_pool *op, int64_t s)
{
    double total = 0;

    for (int64_t i = 0; i < set_rows(&op->sets, s); i++)
        if (row_valid(&op->mask, &op->sets, s, i)) total += weight(op, s, i);
    return total;
}

/* One output of set s, and the row that won it, −1 for a set without rows that take part. */
static double pooled(const muvox_pool *op, muvox_aggregate_kind kind, int64_t s, int64_t f, int64_t *winner)
{
    const double total = total_weight(op, s);
    double       sum = 0, best = 0;

    *winner = -1;
    for (int64_t i = 0; i < set_rows(&op->sets, s); i++) {
        if (!row_valid(&op->mask, &op->sets, s, i)) continue;
        const double x = IN(x, s, i, f), candidate = kind == MUVOX_ABSMAX ? fabs(x) : x;

        sum += weight(op, s, i) * x;
        if (*winner < 0 || candidate > best || (isnan(candidate) && !isnan(best))) { /* the first maximum, or NaN */
            *winner = i;
            best = candidate;
        }
    }
    if (kind == MUVOX_MEAN) return total == 0 ? 0 : sum / total;
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

/* Both gradients of one feature of one row that takes part. */
static void backward_element(const muvox_pool *op, int64_t s, int64_t i, int64_t f, double *dx, double *du)
{
    const int64_t F = op->x.cols;
    const double  x = IN(x, s, i, f), u = weight(op, s, i), total = total_weight(op, s);
    int64_t       winner;

    for (int a = 0, w = 0; a < aggregate_count(op->aggregates); a++) {
        const muvox_aggregate_kind kind = aggregate_at(op->aggregates, a);
        const double g = element(op->grad_out.data, op->grad_out.dtype, s * op->grad_out.row_stride + a * F + f);

        if (kind == MUVOX_MEAN && total != 0) {
            *dx += g * u / total;
            if (op->grad_row_weights.data) *du += g * (x - pooled(op, MUVOX_MEAN, s, f, &winner)) / total;
        } else if (kind == MUVOX_SUM) {
            *dx += g * u;
            *du += g * x;
        } else if (kind == MUVOX_MAX || kind == MUVOX_ABSMAX) {
            if (((const int32_t *)op->winners.data)[s * op->winners.row_stride + w * F + f] == i)
                *dx += kind == MUVOX_MAX ? g : g * ((x > 0) - (x < 0));
            w++;
        }
    }
}

muvox_status pool_backward_reference(muvox_context *ctx, const muvox_pool *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) {
            double du = 0;

            for (int64_t f = 0; f < op->x.cols; f++) {
                double dx = 0;

                if (row_valid(&op->mask, &op->sets, s, i)) backward_element(op, s, i, f, &dx, &du);
                OUT(grad_x, s, i, f, dx);
            }
            OUT(grad_row_weights, s, i, 0, du);
        }
    return MUVOX_OK;
}

muvox_status muvox_pool_forward(muvox_context *ctx, const muvox_pool *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_pool_forward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "pool", op->x.dtype, &kernels));
    return kernels->pool_forward(ctx, op);
}

muvox_status muvox_pool_backward(muvox_context *ctx, const muvox_pool *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_pool_backward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "pool", op->x.dtype, &kernels));
    return kernels->pool_backward(ctx, op);
}
