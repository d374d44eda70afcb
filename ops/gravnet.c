/* gravnet: argument check, plain reference, entry points. The tuned kernels are in gravnet_kernel.inc. */
#include "muvox/gravnet.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_gravnet *op)
{
    const int64_t N = op->sets.rows;

    FORWARD(check_call(ctx, "gravnet", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "gravnet", "coords", op->coords.dtype));
    FORWARD(check_floating(ctx, "gravnet", "feats", op->feats.dtype));
    FORWARD(check_same_arithmetic(ctx, "gravnet", "coords", op->coords.dtype, "feats", op->feats.dtype));
    FORWARD(check_neighbour_count(ctx, "gravnet", op->k));
    REQUIRE(isfinite(op->scale), MUVOX_BAD_ARGUMENT, "gravnet: scale is %g, expected a finite number", op->scale);
    FORWARD(check_search(ctx, "gravnet", op->options, MUVOX_EXCLUDE_SELF | MUVOX_WITHIN_RADIUS | MUVOX_MEAN_BY_K,
                         op->max_radius));
    FORWARD(check_aggregates(ctx, "gravnet", op->aggregates));
    FORWARD(check_matrix(ctx, "gravnet", "coords", &op->coords, N, -1));
    FORWARD(check_matrix(ctx, "gravnet", "feats", &op->feats, N, -1));
    FORWARD(check_mask(ctx, "gravnet", &op->mask, N));
    FORWARD(check_sets(ctx, "gravnet", &op->sets));
    return check_row_weights(ctx, "gravnet", &op->row_weights, wide_dtype(op->feats.dtype), op->sets.rows);
}

/* What the checks before do not read. */
static muvox_status check_data(muvox_context *ctx, const muvox_gravnet *op)
{
    FORWARD(check_splits(ctx, "gravnet", "splits", &op->sets));
    return check_weight_values(ctx, "gravnet", &op->row_weights, &op->sets);
}

muvox_status check_gravnet_forward(muvox_context *ctx, const muvox_gravnet *op)
{
    const int64_t F = op->feats.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_row_output(ctx, "gravnet", "out", &op->out, &op->sets, aggregate_count(op->aggregates) * F,
                             op->feats.dtype));
    FORWARD(check_row_output(ctx, "gravnet", "neighbours", &op->neighbours, &op->sets, op->k, MUVOX_I32));
    return check_row_output(ctx, "gravnet", "winners", &op->winners, &op->sets, winner_count(op->aggregates) * F,
                            rank_dtype(op->k));
}

muvox_status check_gravnet_backward(muvox_context *ctx, const muvox_gravnet *op)
{
    const int64_t N = op->sets.rows, F = op->feats.cols;

    FORWARD(check(ctx, op));
    FORWARD(check_saved(ctx, "gravnet", "neighbours", &op->neighbours, N, op->k, MUVOX_I32));
    if (winner_count(op->aggregates))
        FORWARD(check_saved(ctx, "gravnet", "winners", &op->winners, N, winner_count(op->aggregates) * F,
                            rank_dtype(op->k)));
    FORWARD(check_matrix(ctx, "gravnet", "grad_out", &op->grad_out, N, aggregate_count(op->aggregates) * F));
    FORWARD(check_same_dtype(ctx, "gravnet", "grad_out", op->grad_out.dtype, "feats", op->feats.dtype));
    FORWARD(check_row_output(ctx, "gravnet", "grad_coords", &op->grad_coords, &op->sets, op->coords.cols,
                             op->coords.dtype));
    FORWARD(check_row_output(ctx, "gravnet", "grad_feats", &op->grad_feats, &op->sets, F, op->feats.dtype));
    REQUIRE(op->row_weights.data || !op->grad_row_weights.data, MUVOX_BAD_ARGUMENT,
            "gravnet: grad_row_weights is asked for without row_weights");
    return check_row_output(ctx, "gravnet", "grad_row_weights", &op->grad_row_weights, &op->sets, 1,
                            op->row_weights.dtype);
}

/* exp(−scale |x_i − x_j|²), and the same times the weight of row j */
static double decay(const muvox_gravnet *op, int64_t s, int64_t i, int64_t j)
{
    return exp(-op->scale * squared_distance_reference(&op->coords, ROW(&op->coords, &op->sets, s, i), &op->coords,
                                                       ROW(&op->coords, &op->sets, s, j)));
}

static double weight(const muvox_gravnet *op, int64_t s, int64_t i, int64_t j)
{
    return decay(op, s, i, j) * (op->row_weights.data ? IN(row_weights, s, j, 0) : 1);
}

muvox_status gravnet_forward_reference(muvox_context *ctx, const muvox_gravnet *op)
{
    const int64_t k = op->k;
    int64_t      *rows;
    void         *workspace;

    FORWARD(workspace_alloc(ctx, "gravnet", (size_t)k * (sizeof *rows + sizeof(double)), 1, &workspace));
    rows = workspace;
    double *const             weights = (double *)(rows + k);
    const muvox_neighbourhood around = {k, rows, weights, op->options & MUVOX_MEAN_BY_K};

    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t i = 0; i < M; i++) {
            const muvox_search_reference search = {.options = op->options,
                                                   .max_radius = op->max_radius,
                                                   .coords = &op->coords,
                                                   .queries = &op->coords,
                                                   .mask = &op->mask,
                                                   .sets = &op->sets,
                                                   .set = s,
                                                   .query_at = ROW(&op->coords, &op->sets, s, i),
                                                   .self = op->options & MUVOX_EXCLUDE_SELF ? i : -1};
            bool                         more = row_valid(&op->mask, &op->sets, s, i);

            for (int64_t r = 0; r < k; r++) {
                rows[r] = more ? next_nearest_reference(&search, r ? rows[r - 1] : -1) : -1;
                more = rows[r] >= 0;
                weights[r] = rows[r] < 0 ? 0 : weight(op, s, i, rows[r]);
                OUT(neighbours, s, i, r, (double)rows[r]);
            }
            store_aggregates_reference(op->aggregates, &op->feats, &op->out, &op->winners, &op->sets, s, i, &around);
        }
    }
    workspace_free(ctx, workspace);
    return MUVOX_OK;
}

/* Saved neighbours of row i, their weights, and dw[r] = Σ_f dm[r,f] feats[j,f]. */
static void neighbourhood(const muvox_gravnet *op, int64_t s, int64_t i, int64_t *rows, double *weights, double *dw)
{
    const muvox_neighbourhood around = {op->k, rows, weights, op->options & MUVOX_MEAN_BY_K};

    for (int64_t r = 0; r < op->k; r++) {
        rows[r] = (int64_t)IN(neighbours, s, i, r);
        weights[r] = rows[r] < 0 ? 0 : weight(op, s, i, rows[r]);
    }
    for (int64_t r = 0; r < op->k; r++) {
        dw[r] = 0;
        for (int64_t f = 0; f < op->feats.cols && rows[r] >= 0; f++)
            dw[r] +=
                dm_reference(op->aggregates, &op->grad_out, &op->winners, &op->feats, &op->sets, s, i, f, r, &around) *
                IN(feats, s, rows[r], f);
    }
}

muvox_status gravnet_backward_reference(muvox_context *ctx, const muvox_gravnet *op)
{
    const int64_t F = op->feats.cols, d = op->coords.cols, k = op->k, most = largest_set(&op->sets);
    double       *sums;
    void         *workspace;

    FORWARD(workspace_alloc(ctx, "gravnet", (size_t)(most * (F + d + 1) + 3 * k) * sizeof *sums, 1, &workspace));
    sums = workspace;
    double *const dfeats = sums, *const dcoords = dfeats + most * F, *const du = dcoords + most * d;
    double *const             weights = du + most;
    double *const             dw = weights + k;
    int64_t *const            rows = (int64_t *)(dw + k);
    const muvox_neighbourhood around = {k, rows, weights, op->options & MUVOX_MEAN_BY_K};

    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t at = 0; at < most * (F + d + 1); at++) sums[at] = 0;
        for (int64_t i = 0; i < M; i++) {
            neighbourhood(op, s, i, rows, weights, dw);
            for (int64_t r = 0; r < k; r++) {
                const int64_t j = rows[r];

                if (j >= 0) du[j] += decay(op, s, i, j) * dw[r];
                for (int64_t f = 0; f < F && j >= 0; f++)
                    dfeats[j * F + f] += weights[r] * dm_reference(op->aggregates, &op->grad_out, &op->winners,
                                                                   &op->feats, &op->sets, s, i, f, r, &around);
                for (int64_t c = 0; c < d && j >= 0; c++) {
                    const double step =
                        -2 * op->scale * weights[r] * dw[r] * (IN(coords, s, i, c) - IN(coords, s, j, c));

                    dcoords[i * d + c] += step;
                    dcoords[j * d + c] -= step;
                }
            }
        }
        for (int64_t i = 0; i < M; i++) {
            for (int64_t f = 0; f < F; f++) OUT(grad_feats, s, i, f, dfeats[i * F + f]);
            for (int64_t c = 0; c < d; c++) OUT(grad_coords, s, i, c, dcoords[i * d + c]);
            OUT(grad_row_weights, s, i, 0, du[i]);
        }
    }
    workspace_free(ctx, workspace);
    return MUVOX_OK;
}

muvox_status muvox_gravnet_forward(muvox_context *ctx, const muvox_gravnet *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_gravnet_forward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "gravnet", op->feats.dtype, &kernels));
    return kernels->gravnet_forward(ctx, op);
}

muvox_status muvox_gravnet_backward(muvox_context *ctx, const muvox_gravnet *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_gravnet_backward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(check_neighbours(ctx, "gravnet", op->neighbours.data, op->neighbours.row_stride, op->neighbours.set_stride,
                             op->k, &op->sets, &op->sets));
    FORWARD(kernels_for(ctx, "gravnet", op->feats.dtype, &kernels));
    return kernels->gravnet_backward(ctx, op);
}
