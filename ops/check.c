#include "check.h"

#include "convert.h"
#include "sets.h"

const char *dtype_name(muvox_dtype dtype)
{
    static const char *const names[] = {"half", "bfloat16", "float", "double", "int32", "uint8", "int64"};

    return (unsigned)dtype < sizeof names / sizeof *names ? names[dtype] : "unknown dtype";
}

muvox_status check_call(muvox_context *ctx, const char *op, size_t given, size_t needed)
{
    if (!ctx) return MUVOX_BAD_ARGUMENT;
    if (ctx->struct_size < sizeof *ctx) return MUVOX_BAD_ARGUMENT; /* too small to hold a message */
    ctx->message[0] = 0;
    REQUIRE(given >= needed, MUVOX_BAD_ARGUMENT, "%s: descriptor has struct_size %zu, this library needs %zu", op,
            given, needed);
    REQUIRE(ctx->threads >= 0, MUVOX_BAD_ARGUMENT, "%s: context has %d threads, expected 0 (all) or more", op,
            ctx->threads);
    REQUIRE((unsigned)ctx->simd <= MUVOX_SIMD_AVX512, MUVOX_BAD_ARGUMENT, "%s: context has unknown simd %d", op,
            (int)ctx->simd);
    REQUIRE(!ctx->alloc == !ctx->free, MUVOX_BAD_ARGUMENT, "%s: context has only one of alloc and free", op);
    return MUVOX_OK;
}

muvox_status check_sets(muvox_context *ctx, const char *op, const muvox_sets *sets)
{
    const int64_t S = sets->count;

    REQUIRE(S >= 0 && sets->rows >= 0, MUVOX_BAD_ARGUMENT, "%s: sets has %lld sets of %lld rows, expected 0 or more",
            op, (long long)S, (long long)sets->rows);
    if (!sets->splits) {
        REQUIRE(sets->size >= 0 && (S == 0 || sets->rows / S == sets->size) && sets->rows == S * sets->size,
                MUVOX_BAD_ARGUMENT, "%s: %lld sets of %lld rows do not make %lld rows", op, (long long)S,
                (long long)sets->size, (long long)sets->rows);
        REQUIRE(sets->size <= INT32_MAX, MUVOX_UNSUPPORTED, "%s: a set of %lld rows, at most %d are supported", op,
                (long long)sets->size, INT32_MAX);
    }
    return MUVOX_OK;
}

muvox_status check_splits(muvox_context *ctx, const char *op, const char *name, const muvox_sets *sets)
{
    const int64_t *splits = sets->splits, S = sets->count;

    if (!splits) return MUVOX_OK;
    REQUIRE(splits[0] == 0, MUVOX_BAD_ARGUMENT, "%s: %s begin at %lld, expected 0", op, name, (long long)splits[0]);
    REQUIRE(splits[S] == sets->rows, MUVOX_BAD_ARGUMENT, "%s: %s end at %lld, expected the number of rows, %lld", op,
            name, (long long)splits[S], (long long)sets->rows);
    for (int64_t s = 0; s < S; s++) {
        REQUIRE(splits[s] <= splits[s + 1], MUVOX_BAD_ARGUMENT,
                "%s: %s decrease from %lld to %lld at set %lld, expected non-decreasing values", op, name,
                (long long)splits[s], (long long)splits[s + 1], (long long)s);
        REQUIRE(splits[s + 1] <= sets->rows, MUVOX_BAD_ARGUMENT,
                "%s: %s reach %lld at set %lld, expected at most the number of rows, %lld", op, name,
                (long long)splits[s + 1], (long long)s, (long long)sets->rows);
        REQUIRE(splits[s + 1] - splits[s] <= INT32_MAX, MUVOX_UNSUPPORTED,
                "%s: a set of %lld rows, at most %d are supported", op, (long long)(splits[s + 1] - splits[s]),
                INT32_MAX);
    }
    return MUVOX_OK;
}

static muvox_status check_shape(muvox_context *ctx, const char *op, const char *name, const muvox_matrix *m,
                                int64_t rows, int64_t cols)
{
    REQUIRE(m->rows == rows, MUVOX_BAD_SHAPE, "%s: %s has %lld rows, expected %lld", op, name, (long long)m->rows,
            (long long)rows);
    if (cols < 0)
        REQUIRE(m->cols >= 1, MUVOX_BAD_SHAPE, "%s: %s has width %lld, expected at least 1", op, name,
                (long long)m->cols);
    else
        REQUIRE(m->cols == cols, MUVOX_BAD_SHAPE, "%s: %s has width %lld, expected %lld", op, name, (long long)m->cols,
                (long long)cols);
    REQUIRE(m->data || rows == 0, MUVOX_BAD_ARGUMENT, "%s: %s is missing", op, name);
    return MUVOX_OK;
}

muvox_status check_matrix(muvox_context *ctx, const char *op, const char *name, const muvox_matrix *m, int64_t rows,
                          int64_t cols)
{
    FORWARD(check_shape(ctx, op, name, m, rows, cols));
    REQUIRE(m->row_stride >= 0 && m->set_stride >= 0, MUVOX_BAD_ARGUMENT,
            "%s: %s has strides %lld and %lld, expected 0 or more", op, name, (long long)m->set_stride,
            (long long)m->row_stride);
    return MUVOX_OK;
}

muvox_status check_output(muvox_context *ctx, const char *op, const char *name, const muvox_output *m, int64_t rows,
                          int64_t cols, muvox_dtype dtype)
{
    const muvox_matrix shape = {m->data, m->dtype, m->rows, m->cols, m->row_stride, m->set_stride};

    if (!m->data) return MUVOX_OK; /* not wanted */
    FORWARD(check_shape(ctx, op, name, &shape, rows, cols));
    REQUIRE(rows <= 1 || m->row_stride >= cols, MUVOX_BAD_ARGUMENT, "%s: rows of %s overlap (stride %lld, width %lld)",
            op, name, (long long)m->row_stride, (long long)cols);
    REQUIRE(m->dtype == dtype, MUVOX_BAD_DTYPE, "%s: %s is %s, expected %s", op, name, dtype_name(m->dtype),
            dtype_name(dtype));
    return MUVOX_OK;
}

muvox_status check_row_output(muvox_context *ctx, const char *op, const char *name, const muvox_output *m,
                              const muvox_sets *sets, int64_t cols, muvox_dtype dtype)
{
    /* Sets one after the other, or row by row in turn; in double, as nothing is known of the numbers yet. */
    const double row = (double)m->row_stride, set = (double)m->set_stride, width = (double)cols;
    const bool   apart = set >= ((double)sets->size - 1) * row + width;
    const bool   interleaved = set >= width && row >= ((double)sets->count - 1) * set + width;

    FORWARD(check_output(ctx, op, name, m, sets->rows, cols, dtype));
    REQUIRE(!m->data || sets->splits || sets->count <= 1 || sets->rows == 0 || apart || interleaved, MUVOX_BAD_ARGUMENT,
            "%s: sets of %s overlap (strides %lld and %lld, %lld rows of width %lld)", op, name,
            (long long)m->set_stride, (long long)m->row_stride, (long long)sets->size, (long long)cols);
    return MUVOX_OK;
}

muvox_status check_saved(muvox_context *ctx, const char *op, const char *name, const muvox_output *m, int64_t rows,
                         int64_t cols, muvox_dtype dtype)
{
    const muvox_matrix saved = {m->data, m->dtype, m->rows, m->cols, m->row_stride, m->set_stride};

    REQUIRE(m->data || rows == 0, MUVOX_BAD_ARGUMENT, "%s: backward needs %s, which forward was not asked for", op,
            name);
    if (!m->data) return MUVOX_OK;
    REQUIRE(m->dtype == dtype, MUVOX_BAD_DTYPE, "%s: %s is %s, expected %s", op, name, dtype_name(m->dtype),
            dtype_name(dtype));
    return check_matrix(ctx, op, name, &saved, rows, cols);
}

muvox_status check_floating(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype)
{
    REQUIRE(dtype == MUVOX_F16 || dtype == MUVOX_BF16 || dtype == MUVOX_F32 || dtype == MUVOX_F64, MUVOX_BAD_DTYPE,
            "%s: %s is %s, expected half, bfloat16, float or double", op, name, dtype_name(dtype));
    return MUVOX_OK;
}

muvox_status check_same_dtype(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype,
                              const char *other, muvox_dtype expected)
{
    REQUIRE(dtype == expected, MUVOX_BAD_DTYPE, "%s: %s is %s and %s is %s, expected one dtype for both", op, name,
            dtype_name(dtype), other, dtype_name(expected));
    return MUVOX_OK;
}

muvox_status check_aggregates(muvox_context *ctx, const char *op, muvox_aggregates aggregates)
{
    const int n = aggregate_count(aggregates);

    REQUIRE(n >= 1 && (n == MAX_AGGREGATES || aggregates >> 4 * n == 0), MUVOX_BAD_ARGUMENT,
            "%s: aggregates is 0x%x, expected one or more of mean, max, absmax, sum", op, (unsigned)aggregates);
    for (int a = 0; a < n; a++) {
        REQUIRE(aggregate_at(aggregates, a) <= MUVOX_SUM, MUVOX_BAD_ARGUMENT,
                "%s: aggregates has unknown number %d, expected mean, max, absmax or sum", op,
                (int)aggregate_at(aggregates, a));
        for (int b = 0; b < a; b++)
            REQUIRE(aggregate_at(aggregates, a) != aggregate_at(aggregates, b), MUVOX_BAD_ARGUMENT,
                    "%s: aggregates has number %d twice", op, (int)aggregate_at(aggregates, a));
    }
    return MUVOX_OK;
}

muvox_status check_neighbour_count(muvox_context *ctx, const char *op, int64_t k)
{
    REQUIRE(k >= 1 && k <= INT32_MAX, MUVOX_BAD_ARGUMENT, "%s: k is %lld, expected 1 to %d", op, (long long)k,
            INT32_MAX);
    return MUVOX_OK;
}

muvox_status check_neighbours(muvox_context *ctx, const char *op, const int32_t *neighbours, int64_t row_stride,
                              int64_t set_stride, int64_t k, const muvox_sets *sets, const muvox_sets *others)
{
    const muvox_matrix strides = {.row_stride = row_stride, .set_stride = set_stride};

    for (int64_t s = 0; s < sets->count; s++) {
        const int64_t M = set_rows(others, s);

        for (int64_t i = 0; i < set_rows(sets, s); i++) {
            const int32_t *row = neighbours + ROW(&strides, sets, s, i);

            for (int64_t r = 0; r < k; r++)
                REQUIRE(row[r] >= -1 && row[r] < M, MUVOX_BAD_ARGUMENT,
                        "%s: neighbours has %d in row %lld of set %lld, expected -1 to %lld", op, (int)row[r],
                        (long long)i, (long long)s, (long long)M - 1);
        }
    }
    return MUVOX_OK;
}

muvox_status check_same_arithmetic(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype,
                                   const char *other, muvox_dtype other_dtype)
{
    REQUIRE((dtype == MUVOX_F64) == (other_dtype == MUVOX_F64), MUVOX_BAD_DTYPE,
            "%s: %s is %s and %s is %s, double goes with double only", op, name, dtype_name(dtype), other,
            dtype_name(other_dtype));
    return MUVOX_OK;
}

muvox_status check_mask(muvox_context *ctx, const char *op, const muvox_matrix *mask, int64_t rows)
{
    if (!mask->data) return MUVOX_OK;
    REQUIRE(mask->dtype == MUVOX_U8, MUVOX_BAD_DTYPE, "%s: mask is %s, expected uint8 (bool)", op,
            dtype_name(mask->dtype));
    return check_matrix(ctx, op, "mask", mask, rows, 1);
}

muvox_status check_row_weights(muvox_context *ctx, const char *op, const muvox_matrix *weights, muvox_dtype dtype,
                               int64_t rows)
{
    if (!weights->data) return MUVOX_OK;
    REQUIRE(weights->dtype == dtype, MUVOX_BAD_DTYPE, "%s: row_weights is %s, expected %s", op,
            dtype_name(weights->dtype), dtype_name(dtype));
    return check_matrix(ctx, op, "row_weights", weights, rows, 1);
}

muvox_status check_weight_values(muvox_context *ctx, const char *op, const muvox_matrix *weights,
                                 const muvox_sets *sets)
{
    for (int64_t s = 0; weights->data && s < sets->count; s++)
        for (int64_t i = 0; i < set_rows(sets, s); i++) {
            const double weight = element(weights->data, weights->dtype, ROW(weights, sets, s, i));

            REQUIRE(!(weight < 0), MUVOX_BAD_ARGUMENT,
                    "%s: row_weights has %g in row %lld of set %lld, expected 0 or more", op, weight, (long long)i,
                    (long long)s);
        }
    return MUVOX_OK;
}

muvox_status check_search(muvox_context *ctx, const char *op, unsigned options, unsigned known, double max_radius)
{
    REQUIRE(!(options & ~known), MUVOX_BAD_ARGUMENT, "%s: options is 0x%x, expected a combination of 0x%x", op, options,
            known);
    REQUIRE(!(options & MUVOX_EXCLUDE_SELF) || !(options & MUVOX_QUERIES), MUVOX_BAD_ARGUMENT,
            "%s: exclude_self is set together with queries, which are other rows than coords", op);
    REQUIRE(!(options & MUVOX_WITHIN_RADIUS) || max_radius >= 0, MUVOX_BAD_ARGUMENT,
            "%s: max_radius is %g, expected 0 or more", op, max_radius);
    return MUVOX_OK;
}

muvox_status check_integer(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype)
{
    REQUIRE(dtype == MUVOX_I32 || dtype == MUVOX_I64, MUVOX_BAD_DTYPE, "%s: %s is %s, expected int32 or int64", op,
            name, dtype_name(dtype));
    return MUVOX_OK;
}
