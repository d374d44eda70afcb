/* aggregate: argument check, plain reference, entry points. The tuned kernels are in aggregate_kernel.inc. */
#include "muvox/aggregate.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_aggregate *op)
{
    const int64_t N = op->sets.rows, k = op->neighbours.cols;

    FORWARD(check_call(ctx, "aggregate", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "aggregate", "feats", op->feats.dtype));
    FORWARD(check_floating(ctx, "aggregate", "weights", op->weights.dtype));
    FORWARD(check_same_arithmetic(ctx, "aggregate", "weights", op->weights.dtype, "feats", op->feats.dtype));
    REQUIRE(op->neighbours.dtype == MUVOX_I32, MUVOX_BAD_DTYPE, "aggregate: neighbours is %s, expected int32",
            dtype_name(op->neighbours.dtype));
    FORWARD(check_neighbour_count(ctx, "aggregate", k));
    FORWARD(check_aggregates(ctx, "aggregate", op->aggregates));
    FORWARD(check_matrix(ctx, "aggregate", "feats", &op->feats, N, -1));
    FORWARD(check_matrix(ctx, "aggregate", "neighbours", &op->neighbours, N, -1));
    FORWARD(check_matrix(ctx, "aggregate", "weights", &op->weights, N, k));
    return check_sets(ctx, "aggregate", &op->sets);
}

/* What the checks before do not read. */
static muvox_status check_data(muvox_context *ctx, const muvox_aggregate *op)
{
    FORWARD(check_splits(ctx, "aggregate", "splits", &op->sets));
    return check_neighbours(ctx, "aggregate", op->neighbours.data, op->neighbours.row_stride, op->neighbours.set_stride,
                            op->neighbours.cols, &op->sets, &op->sets);
}

muvox_status check_aggregate_forward(muvox_context *ctx, const muvox_aggregate *op)
{
    const int64_t F = op->feats.cols, k = op->neighbours.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_row_output(ctx, "aggregate", "out", &op->out, &op->sets, aggregate_count(op->aggregates) * F,
                             op->feats.dtype));
    return check_row_output(ctx, "aggregate", "winners", &op->winners, &op->sets, winner_count(op->aggregates) * F,
                            rank_dtype(k));
}

muvox_status check_aggregate_backward(muvox_context *ctx, const muvox_aggregate *op)
{
    const int64_t N = op->sets.rows, F = op->feats.cols;

    FORWARD(check(ctx, op));
    if (winner_count(op->aggregates))
        FORWARD(check_saved(ctx, "aggregate", "winners", &op->winners, N, winner_count(op->aggregates) * F,
                            rank_dtype(op->neighbours.cols)));
    FORWARD(check_matrix(ctx, "aggregate", "grad_out", &op->grad_out, N, aggregate_count(op->aggregates) * F));
    FORWARD(check_same_dtype(ctx, "aggregate", "grad_out", op->grad_out.dtype, "feats", op->feats.dtype));
    FORWARD(check_row_output(ctx, "aggregate", "grad_feats", &op->grad_feats, &op->sets, F, op->feats.dtype));
    return check_row_output(ctx, "aggregate", "grad_weights", &op->grad_weights, &op->sets, op->neighbours.cols,
                            op->weights.dtype);
}

int64_t rank_element(const muvox_output *winners, int64_t at)
{
    if (winners->dtype == MUVOX_I32) return ((const int32_t *)winners->data)[at];
    return ((const uint8_t *)winners->data)[at] == 255 ? -1 : ((const uint8_t *)winners->data)[at];
}

void set_rank(const muvox_output *winners, int64_t at, int64_t rank)
{
    if (winners->dtype == MUVOX_I32)
        ((int32_t *)winners->data)[at] = (int32_t)rank;
    else
        ((uint8_t *)winners->data)[at] = (uint8_t)(rank < 0 ? 255 : rank);
}

/* What the mean divides by; 0 without neighbours. */
static double divisor(const muvox_neighbourhood *around)
{
    int64_t count = 0;

    for (int64_t r = 0; r < around->k; r++) count += around->rows[r] >= 0;
    return (double)(count && around->mean_by_k ? around->k : count);
}

double aggregate_reference(muvox_aggregate_kind kind, const muvox_matrix *feats, const muvox_sets *sets, int64_t s,
                           int64_t f, const muvox_neighbourhood *around, int64_t *winner)
{
    double sum = 0, best = 0;

    *winner = -1;
    for (int64_t r = 0; r < around->k; r++) {
        if (around->rows[r] < 0) continue;
        const double m =
            around->weights[r] * element(feats->data, feats->dtype, ROW(feats, sets, s, around->rows[r]) + f);
        const double candidate = kind == MUVOX_ABSMAX ? fabs(m) : m;

        sum += m;
        if (*winner < 0 || candidate > best || (isnan(candidate) && !isnan(best))) { /* the first maximum, or NaN */
            *winner = r;
            best = candidate;
        }
    }
    if (kind == MUVOX_MEAN) return divisor(around) == 0 ? 0 : sum / divisor(around);
    return kind == MUVOX_SUM ? sum : best;
}

void store_aggregates_reference(muvox_aggregates aggregates, const muvox_matrix *feats, const muvox_output *out,
                                const muvox_output *winners, const muvox_sets *sets, int64_t s, int64_t i,
                                const muvox_neighbourhood *around)
{
    const int64_t F = feats->cols;

    for (int a = 0, w = 0; a < aggregate_count(aggregates); a++) {
        const muvox_aggregate_kind kind = aggregate_at(aggregates, a);
        const bool                 wins = kind == MUVOX_MAX || kind == MUVOX_ABSMAX;

        for (int64_t f = 0; f < F; f++) {
            int64_t      winner = -1;
            const double value = aggregate_reference(kind, feats, sets, s, f, around, &winner);

            if (out->data) set_element(out->data, out->dtype, ROW(out, sets, s, i) + a * F + f, value);
            if (wins && winners->data) set_rank(winners, ROW(winners, sets, s, i) + w * F + f, winner);
        }
        w += wins;
    }
}

double dm_reference(muvox_aggregates aggregates, const muvox_matrix *grad_out, const muvox_output *winners,
                    const muvox_matrix *feats, const muvox_sets *sets, int64_t s, int64_t i, int64_t f, int64_t r,
                    const muvox_neighbourhood *around)
{
    const double m = around->weights[r] * element(feats->data, feats->dtype, ROW(feats, sets, s, around->rows[r]) + f);
    double       dm = 0;

    for (int a = 0, w = 0; a < aggregate_count(aggregates); a++) {
        const muvox_aggregate_kind kind = aggregate_at(aggregates, a);
        const double g = element(grad_out->data, grad_out->dtype, ROW(grad_out, sets, s, i) + a * feats->cols + f);

        if (kind == MUVOX_MEAN) {
            dm += g / divisor(around);
        } else if (kind == MUVOX_SUM) {
            dm += g;
        } else {
            const bool won = rank_element(winners, ROW(winners, sets, s, i) + w * feats->cols + f) == r;

            if (won) dm += kind == MUVOX_MAX ? g : g * ((m > 0) - (m < 0));
            w++;
        }
    }
    return dm;
}

static void neighbourhood(const muvox_aggregate *op, int64_t s, int64_t i, int64_t *rows, double *weights)
{
    for (int64_t r = 0; r < op->neighbours.cols; r++) {
        rows[r] = (int64_t)IN(neighbours, s, i, r);
        weights[r] = IN(weights, s, i, r);
    }
}

muvox_status aggregate_forward_reference(muvox_context *ctx, const muvox_aggregate *op)
{
    const int64_t k = op->neighbours.cols;
    int64_t      *rows;
    void         *workspace;

    FORWARD(workspace_alloc(ctx, "aggregate", (size_t)k * (sizeof *rows + sizeof(double)), 1, &workspace));
    rows = workspace;
    double *const             weights = (double *)(rows + k);
    const muvox_neighbourhood around = {k, rows, weights, false};

    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) {
            neighbourhood(op, s, i, rows, weights);
            store_aggregates_reference(op->aggregates, &op->feats, &op->out, &op->winners, &op->sets, s, i, &around);
        }
    workspace_free(ctx, workspace);
    return MUVOX_OK;
}

muvox_status aggregate_backward_reference(muvox_context *ctx, const muvox_aggregate *op)
{
    const int64_t F = op->feats.cols, k = op->neighbours.cols;
    int64_t      *rows;
    void         *workspace;

    FORWARD(workspace_alloc(ctx, "aggregate", (size_t)k * (sizeof *rows + sizeof(double)), 1, &workspace));
    rows = workspace;
    double *const             weights = (double *)(rows + k);
    const muvox_neighbourhood around = {k, rows, weights, false};

    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t i = 0; i < M && op->grad_weights.data; i++) {
            neighbourhood(op, s, i, rows, weights);
            for (int64_t r = 0; r < k; r++) {
                double dw = 0;

                for (int64_t f = 0; f < F && rows[r] >= 0; f++)
                    dw += dm_reference(op->aggregates, &op->grad_out, &op->winners, &op->feats, &op->sets, s, i, f, r,
                                       &around) *
                          IN(feats, s, rows[r], f);
                OUT(grad_weights, s, i, r, dw);
            }
        }
        for (int64_t j = 0; j < M && op->grad_feats.data; j++)
            for (int64_t f = 0; f < F; f++) {
                double sum = 0;

                for (int64_t i = 0; i < M; i++) {
                    neighbourhood(op, s, i, rows, weights);
                    for (int64_t r = 0; r < k; r++)
                        if (rows[r] == j)
                            sum += weights[r] * dm_reference(op->aggregates, &op->grad_out, &op->winners, &op->feats,
                                                             &op->sets, s, i, f, r, &around);
                }
                OUT(grad_feats, s, j, f, sum);
            }
    }
    workspace_free(ctx, workspace);
    return MUVOX_OK;
}

muvox_status muvox_aggregate_forward(muvox_context *ctx, const muvox_aggregate *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_aggregate_forward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "aggregate", op->feats.dtype, &kernels));
    return kernels->aggregate_forward(ctx, op);
}

muvox_status muvox_aggregate_backward(muvox_context *ctx, const muvox_aggregate *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_aggregate_backward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "aggregate", op->feats.dtype, &kernels));
    return kernels->aggregate_backward(ctx, op);
}
