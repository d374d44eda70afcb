/* knn: argument check, plain reference, entry points. The tuned kernels are in knn_kernel.inc. */
#include "muvox/knn.h"

#include "checks.h"
#include "context.h"
#include "reference.h"

#include <math.h>

static const muvox_sets *query_sets(const muvox_knn *op)
{
    return op->options & MUVOX_QUERIES ? &op->query_sets : &op->sets;
}

static muvox_status check(muvox_context *ctx, const muvox_knn *op)
{
    const unsigned known = MUVOX_EXCLUDE_SELF | MUVOX_WITHIN_RADIUS | MUVOX_QUERIES;

    FORWARD(check_call(ctx, "knn", op->struct_size, sizeof *op));
    const int64_t N = op->sets.rows, Q = query_sets(op)->rows;

    FORWARD(check_search(ctx, "knn", op->options, known, op->max_radius));
    FORWARD(check_floating(ctx, "knn", "coords", op->coords.dtype));
    FORWARD(check_neighbour_count(ctx, "knn", op->k));
    FORWARD(check_matrix(ctx, "knn", "coords", &op->coords, N, -1));
    FORWARD(check_mask(ctx, "knn", &op->mask, N));
    if (op->options & MUVOX_QUERIES) {
        FORWARD(check_same_dtype(ctx, "knn", "queries", op->queries.dtype, "coords", op->coords.dtype));
        FORWARD(check_matrix(ctx, "knn", "queries", &op->queries, Q, op->coords.cols));
        REQUIRE(op->query_sets.count == op->sets.count, MUVOX_BAD_SHAPE, "knn: queries has %lld sets, expected %lld",
                (long long)op->query_sets.count, (long long)op->sets.count);
        FORWARD(check_sets(ctx, "knn", &op->query_sets));
    }
    return check_sets(ctx, "knn", &op->sets);
}

/* What the checks before do not read. */
static muvox_status check_data(muvox_context *ctx, const muvox_knn *op)
{
    if (op->options & MUVOX_QUERIES) FORWARD(check_splits(ctx, "knn", "query_splits", &op->query_sets));
    return check_splits(ctx, "knn", "splits", &op->sets);
}

muvox_status check_knn_forward(muvox_context *ctx, const muvox_knn *op)
{
    const muvox_dtype distance = wide_dtype(op->coords.dtype);

    FORWARD(check(ctx, op));
    FORWARD(check_row_output(ctx, "knn", "neighbours", &op->neighbours, query_sets(op), op->k, MUVOX_I32));
    FORWARD(check_row_output(ctx, "knn", "distance2", &op->distance2, query_sets(op), op->k, distance));
    return check_row_output(ctx, "knn", "counts", &op->counts, query_sets(op), 1, MUVOX_I32);
}

muvox_status check_knn_backward(muvox_context *ctx, const muvox_knn *op)
{
    const muvox_dtype distance = wide_dtype(op->coords.dtype);

    FORWARD(check(ctx, op));
    const int64_t Q = query_sets(op)->rows;

    FORWARD(check_saved(ctx, "knn", "neighbours", &op->neighbours, Q, op->k, MUVOX_I32));
    FORWARD(check_matrix(ctx, "knn", "grad_distance2", &op->grad_distance2, Q, op->k));
    REQUIRE(op->grad_distance2.dtype == distance, MUVOX_BAD_DTYPE, "knn: grad_distance2 is %s, expected %s",
            dtype_name(op->grad_distance2.dtype), dtype_name(distance));
    FORWARD(
        check_row_output(ctx, "knn", "grad_coords", &op->grad_coords, &op->sets, op->coords.cols, op->coords.dtype));
    return check_row_output(ctx, "knn", "grad_queries", &op->grad_queries, query_sets(op), op->coords.cols,
                            op->coords.dtype);
}

double squared_distance_reference(const muvox_matrix *a, int64_t at_a, const muvox_matrix *b, int64_t at_b)
{
    double exact = 0;
    float  rounded = 0;

    for (int64_t c = 0; c < a->cols; c++) {
        const double x = element(a->data, a->dtype, at_a + c), y = element(b->data, b->dtype, at_b + c);
        const float  difference = (float)x - (float)y;

        exact = fma(x - y, x - y, exact);
        rounded = fmaf(difference, difference, rounded);
    }
    return a->dtype == MUVOX_F64 ? exact : (double)rounded;
}

/* distance² of a query to row j of its set */
static double distance2(const muvox_search_reference *search, int64_t j)
{
    return squared_distance_reference(search->queries, search->query_at, search->coords,
                                      ROW(search->coords, search->sets, search->set, j));
}

/* (a, i) ranks before (b, j): by distance, NaN last, ties to the lower row. */
static bool precedes(double a, int64_t i, double b, int64_t j)
{
    if (isnan(a) || isnan(b)) return isnan(a) == isnan(b) ? i < j : isnan(b);
    return a < b || (a == b && i < j);
}

static bool admitted(const muvox_search_reference *search, int64_t j, double distance)
{
    const bool within = !(search->options & MUVOX_WITHIN_RADIUS) || distance <= search->max_radius * search->max_radius;

    return within && j != search->self && row_valid(search->mask, search->sets, search->set, j);
}

int64_t next_nearest_reference(const muvox_search_reference *search, int64_t last)
{
    const double nearer = last < 0 ? 0 : distance2(search, last);
    int64_t      best = -1;
    double       least = 0;

    for (int64_t j = 0; j < set_rows(search->sets, search->set); j++) {
        const double distance = distance2(search, j);

        if (!admitted(search, j, distance) || (last >= 0 && !precedes(nearer, last, distance, j))) continue;
        if (best < 0 || precedes(distance, j, least, best)) {
            best = j;
            least = distance;
        }
    }
    return best;
}

muvox_status knn_forward_reference(muvox_context *ctx, const muvox_knn *op)
{
    const bool          cross = op->options & MUVOX_QUERIES;
    const muvox_sets   *sets = query_sets(op);
    const muvox_matrix *queries = cross ? &op->queries : &op->coords;

    (void)ctx;
    for (int64_t s = 0; s < sets->count; s++)
        for (int64_t i = 0; i < set_rows(sets, s); i++) {
            const bool                   looks = cross || row_valid(&op->mask, sets, s, i);
            const muvox_search_reference search = {.options = op->options,
                                                   .max_radius = op->max_radius,
                                                   .coords = &op->coords,
                                                   .queries = queries,
                                                   .mask = &op->mask,
                                                   .sets = &op->sets,
                                                   .set = s,
                                                   .query_at = ROW(queries, sets, s, i),
                                                   .self = op->options & MUVOX_EXCLUDE_SELF ? i : -1};
            int64_t                      j = -1, count = 0;

            for (int64_t r = 0; r < op->k; r++) {
                j = looks && count == r ? next_nearest_reference(&search, j) : -1;
                count += j >= 0;
                OUT_AT(neighbours, ROW(&op->neighbours, sets, s, i) + r, (double)j);
                OUT_AT(distance2, ROW(&op->distance2, sets, s, i) + r, j < 0 ? INFINITY : distance2(&search, j));
            }
            OUT_AT(counts, ROW(&op->counts, sets, s, i), (double)count);
        }
    return MUVOX_OK;
}

/* Σ over the places (i, r) of set s of 2 g (x_i − x_j): those of query i = `query`, less those that picked row j = `picked`;
 * −1 for either is none. */
static double pulled(const muvox_knn *op, int64_t s, int64_t c, int64_t query, int64_t picked)
{
    const muvox_sets   *sets = query_sets(op);
    const muvox_matrix *queries = op->options & MUVOX_QUERIES ? &op->queries : &op->coords;
    double              sum = 0;

    for (int64_t i = 0; i < set_rows(sets, s); i++)
        for (int64_t r = 0; r < op->k; r++) {
            const int64_t j = (int64_t)element(op->neighbours.data, MUVOX_I32, ROW(&op->neighbours, sets, s, i) + r);

            if (j < 0 || (i != query && j != picked)) continue;
            const double g =
                element(op->grad_distance2.data, op->grad_distance2.dtype, ROW(&op->grad_distance2, sets, s, i) + r);
            const double step =
                2 * g * (element(queries->data, queries->dtype, ROW(queries, sets, s, i) + c) - IN(coords, s, j, c));

            sum += (i == query ? step : 0) - (j == picked ? step : 0);
        }
    return sum;
}

muvox_status knn_backward_reference(muvox_context *ctx, const muvox_knn *op)
{
    const bool        cross = op->options & MUVOX_QUERIES;
    const muvox_sets *sets = query_sets(op);

    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t c = 0; c < op->coords.cols; c++) {
            for (int64_t j = 0; j < set_rows(&op->sets, s); j++)
                OUT(grad_coords, s, j, c, pulled(op, s, c, cross ? -1 : j, j));
            for (int64_t i = 0; cross && i < set_rows(sets, s); i++)
                OUT_AT(grad_queries, ROW(&op->grad_queries, sets, s, i) + c, pulled(op, s, c, i, -1));
        }
    return MUVOX_OK;
}

muvox_status muvox_knn_forward(muvox_context *ctx, const muvox_knn *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_knn_forward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(kernels_for(ctx, "knn", op->coords.dtype, &kernels));
    return kernels->knn_forward(ctx, op);
}

muvox_status muvox_knn_backward(muvox_context *ctx, const muvox_knn *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_knn_backward(ctx, op));
    FORWARD(check_data(ctx, op));
    FORWARD(check_neighbours(ctx, "knn", op->neighbours.data, op->neighbours.row_stride, op->neighbours.set_stride,
                             op->k, query_sets(op), &op->sets));
    FORWARD(kernels_for(ctx, "knn", op->coords.dtype, &kernels));
    return kernels->knn_backward(ctx, op);
}
