/* Errors are values: a check fills ctx->message and returns a status, FORWARD passes a status up.
 * Checks stand apart from compute. Those of an operator (checks.h) read no data, so the CPU and CUDA share them; what data
 * must hold is checked by functions of its own. */
#ifndef MUVOX_OPS_CHECK_H
#define MUVOX_OPS_CHECK_H

#include "muvox/types.h"

#include <stdbool.h>
#include <stdio.h>

#define REQUIRE(cond, status, ...)                                                                                     \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            snprintf(ctx->message, sizeof ctx->message, __VA_ARGS__);                                                  \
            return (status);                                                                                           \
        }                                                                                                              \
    } while (0)

#define FORWARD(call)                                                                                                  \
    do {                                                                                                               \
        muvox_status status_ = (call);                                                                                 \
        if (status_ != MUVOX_OK) return status_;                                                                       \
    } while (0)

#define MAX_AGGREGATES 8

#ifdef __cplusplus
extern "C" {
#endif

/* "half", "bfloat16", …: how messages name a dtype. */
const char *dtype_name(muvox_dtype dtype);

/* Context and descriptor have the size this library knows; clears the message. */
muvox_status check_call(muvox_context *ctx, const char *op, size_t given, size_t needed);

/* Sets are well formed, as far as that shows without splits, which may lie on a device. */
muvox_status check_sets(muvox_context *ctx, const char *op, const muvox_sets *sets);

/* The values of splits, an argument of this name, run from 0 to rows and never decrease. */
muvox_status check_splits(muvox_context *ctx, const char *op, const char *name, const muvox_sets *sets);

/* Shape and strides of an input or of a wanted output; cols < 0: any width of at least 1. */
muvox_status check_matrix(muvox_context *ctx, const char *op, const char *name, const muvox_matrix *m, int64_t rows,
                          int64_t cols);
muvox_status check_output(muvox_context *ctx, const char *op, const char *name, const muvox_output *m, int64_t rows,
                          int64_t cols, muvox_dtype dtype);

/* The same for an output with the rows of sets, which must not overlap either. */
muvox_status check_row_output(muvox_context *ctx, const char *op, const char *name, const muvox_output *m,
                              const muvox_sets *sets, int64_t cols, muvox_dtype dtype);

/* What forward made for backward is there. It is only read now, so its sets may share their rows. */
muvox_status check_saved(muvox_context *ctx, const char *op, const char *name, const muvox_output *m, int64_t rows,
                         int64_t cols, muvox_dtype dtype);

/* half, bfloat16, float or double. */
muvox_status check_floating(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype);

/* int32 or int64. */
muvox_status check_integer(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype);

/* m has the dtype of another argument. */
muvox_status check_same_dtype(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype,
                              const char *other, muvox_dtype expected);

/* k is at least 1 and fits a neighbour's 32 bits. */
muvox_status check_neighbour_count(muvox_context *ctx, const char *op, int64_t k);

/* Every neighbour of a row of `sets` is a row of the same set of `others` (the same sets, but with queries), or −1. */
muvox_status check_neighbours(muvox_context *ctx, const char *op, const int32_t *neighbours, int64_t row_stride,
                              int64_t set_stride, int64_t k, const muvox_sets *sets, const muvox_sets *others);

/* coords (or weights) and feats compute in one arithmetic: both double, or neither. */
muvox_status check_same_arithmetic(muvox_context *ctx, const char *op, const char *name, muvox_dtype dtype,
                                   const char *other, muvox_dtype other_dtype);

/* mask is (N, 1) uint8, or not given. */
muvox_status check_mask(muvox_context *ctx, const char *op, const muvox_matrix *mask, int64_t rows);

/* row_weights is (N, 1) of this dtype, or not given. */
muvox_status check_row_weights(muvox_context *ctx, const char *op, const muvox_matrix *weights, muvox_dtype dtype,
                               int64_t rows);

/* No row weight is negative; sets and splits were checked before. */
muvox_status check_weight_values(muvox_context *ctx, const char *op, const muvox_matrix *weights,
                                 const muvox_sets *sets);

/* Only options of `known` are set, and the radius is usable if it is asked for. */
muvox_status check_search(muvox_context *ctx, const char *op, unsigned options, unsigned known, double max_radius);

/* dtype of distances, statistics and row weights beside data of this dtype. */
static inline muvox_dtype wide_dtype(muvox_dtype dtype)
{
    return dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32;
}

/* At least one aggregate, all of them known, none twice. */
muvox_status check_aggregates(muvox_context *ctx, const char *op, muvox_aggregates aggregates);

/* The aggregates one by one. */
static inline int aggregate_count(muvox_aggregates aggregates)
{
    int n = 0;

    while (n < MAX_AGGREGATES && (aggregates >> 4 * n & 15)) n++;
    return n;
}

static inline muvox_aggregate_kind aggregate_at(muvox_aggregates aggregates, int a)
{
    return (muvox_aggregate_kind)(aggregates >> 4 * a & 15);
}

/* How many of them have a winner: one block of columns of `winners` each, in order. */
static inline int winner_count(muvox_aggregates aggregates)
{
    int n = 0;

    for (int a = 0; a < aggregate_count(aggregates); a++) {
        const muvox_aggregate_kind kind = aggregate_at(aggregates, a);

        n += kind == MUVOX_MAX || kind == MUVOX_ABSMAX;
    }
    return n;
}

/* Winners of aggregation are ranks: a byte holds them up to this k. */
static inline muvox_dtype rank_dtype(int64_t k)
{
    return k <= 254 ? MUVOX_U8 : MUVOX_I32;
}

#ifdef __cplusplus
}
#endif
#endif
