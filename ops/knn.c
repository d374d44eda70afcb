/* knn: argument check, plain reference, entry points. The tuned kernels are in knn_kernel.inc. */
#include "muvox/knn.h"

#include "check.h"
#include "context.h"
#include "reference.h"

#include <math.h>

static muvox_status check(muvox_context *ctx, const muvox_knn *op)
{
    const int64_t     N = op->sets.rows;
    const muvox_dtype distance = op->coords.dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32;

    FORWARD(check_call(ctx, "knn", op->struct_size, sizeof *op));
    FORWARD(check_floating(ctx, "knn", "coords", op->coords.dtype));
    FORWARD(check_neighbour_count(ctx, "knn", op->k));
    FORWARD(check_matrix(ctx, "knn", "coords", &op->coords, N, -1));
    FORWARD(check_row_output(ctx, "knn", "neighbours", &op->neighbours, &op->sets, op->k, MUVOX_I32));
    FORWARD(check_row_output(ctx, "knn", "distance2", &op->distance2, &op->sets, op->k, distance));
    FORWARD(check_row_output(ctx, "knn", "counts", &op->counts, &op->sets, 1, MUVOX_I32));
    return check_sets(ctx, "knn", &op->sets);
}

static muvox_status check_backward(muvox_context *ctx, const muvox_knn *op)
{
    const int64_t     N = op->sets.rows;
    const muvox_dtype distance = op->coords.dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32;

    FORWARD(check(ctx, op));
    FORWARD(check_given(ctx, "knn", "neighbours", &op->neighbours, N));
    FORWARD(check_matrix(ctx, "knn", "grad_distance2", &op->grad_distance2, N, op->k));
    REQUIRE(op->grad_distance2.dtype == distance, MUVOX_BAD_DTYPE, "knn: grad_distance2 is %s, expected %s",
            dtype_name(op->grad_distance2.dtype), dtype_name(distance));
    FORWARD(
        check_row_output(ctx, "knn", "grad_coords", &op->grad_coords, &op->sets, op->coords.cols, op->coords.dtype));
    return check_neighbours(ctx, "knn", op->neighbours.data, op->neighbours.row_stride, op->neighbours.set_stride,
                            op->k, &op->sets);
}

double distance2_reference(const muvox_matrix *coords, const muvox_sets *sets, int64_t s, int64_t i, int64_t j)
{
    const int64_t at_i = ROW(coords, sets, s, i), at_j = ROW(coords, sets, s, j);
    double        exact = 0;
    float         rounded = 0;

    for (int64_t c = 0; c < coords->cols; c++) {
        const double a = element(coords->data, coords->dtype, at_i + c),
                     b = element(coords->data, coords->dtype, at_j + c);
        const float difference = (float)a - (float)b;

        exact = fma(a - b, a - b, exact);
        rounded = fmaf(difference, difference, rounded);
    }
    return coords->dtype == MUVOX_F64 ? exact : (double)rounded;
}

/* (a, i) ranks before (b, j): by distance, NaN last, ties to the lower row. */
static bool precedes(double a, int64_t i, double b, int64_t j)
{
    if (isnan(a) || isnan(b)) return isnan(a) == isnan(b) ? i < j : isnan(b);
    return a < b || (a == b && i < j);
}

int64_t next_nearest_reference(const muvox_matrix *coords, const muvox_sets *sets, int64_t s, int64_t i, int64_t last)
{
    const double nearer = last < 0 ? 0 : distance2_reference(coords, sets, s, i, last);
    int64_t      best = -1;
    double       least = 0;

    for (int64_t j = 0; j < set_rows(sets, s); j++) {
        const double distance = distance2_reference(coords, sets, s, i, j);

        if (last >= 0 && !precedes(nearer, last, distance, j)) continue;
        if (best < 0 || precedes(distance, j, least, best)) {
            best = j;
            least = distance;
        }
    }
    return best;
}

muvox_status knn_forward_reference(muvox_context *ctx, const muvox_knn *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t i = 0; i < M; i++) {
            int64_t j = -1;

            for (int64_t r = 0; r < op->k; r++) {
                j = r < M ? next_nearest_reference(&op->coords, &op->sets, s, i, j) : -1;
                OUT(neighbours, s, i, r, (double)j);
                OUT(distance2, s, i, r, j < 0 ? INFINITY : distance2_reference(&op->coords, &op->sets, s, i, j));
            }
            OUT(counts, s, i, 0, (double)(op->k < M ? op->k : M));
        }
    }
    return MUVOX_OK;
}

muvox_status knn_backward_reference(muvox_context *ctx, const muvox_knn *op)
{
    (void)ctx;
    for (int64_t s = 0; s < op->sets.count; s++) {
        const int64_t M = set_rows(&op->sets, s);

        for (int64_t i = 0; i < M; i++)
            for (int64_t c = 0; c < op->coords.cols; c++) {
                double sum = 0;

                for (int64_t from = 0; from < M; from++)
                    for (int64_t r = 0; r < op->k; r++) {
                        const int64_t j = (int64_t)IN(neighbours, s, from, r);

                        if (j < 0 || (from != i && j != i)) continue;
                        const double step =
                            2 * IN(grad_distance2, s, from, r) * (IN(coords, s, from, c) - IN(coords, s, j, c));

                        sum += (from == i ? step : 0) - (j == i ? step : 0);
                    }
                OUT(grad_coords, s, i, c, sum);
            }
    }
    return MUVOX_OK;
}

muvox_status muvox_knn_forward(muvox_context *ctx, const muvox_knn *op)
{
    const muvox_kernels *kernels;

    FORWARD(check(ctx, op));
    FORWARD(kernels_for(ctx, "knn", op->coords.dtype, &kernels));
    return kernels->knn_forward(ctx, op);
}

muvox_status muvox_knn_backward(muvox_context *ctx, const muvox_knn *op)
{
    const muvox_kernels *kernels;

    FORWARD(check_backward(ctx, op));
    FORWARD(kernels_for(ctx, "knn", op->coords.dtype, &kernels));
    return kernels->knn_backward(ctx, op);
}
