#include "calls.h"

#include <math.h>

enum { K = 5, D = 3, F = 7, A = 6 };

#define BOTH MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX)

static descriptor knn_forward(problem *p, layout layout, int64_t rows)
{
    descriptor op = {0};

    *p = problem_make(layout, 3, rows, 11);
    op.knn = (muvox_knn){
        .struct_size = sizeof op.knn,
        .sets = p->sets,
        .k = K,
        .coords = random_input(p, MUVOX_F32, D, 1),
        .neighbours = output(p, MUVOX_I32, K),
        .distance2 = output(p, MUVOX_F32, K),
        .counts = output(p, MUVOX_I32, 1),
    };
    return op;
}

static descriptor knn_backward(problem *p, layout layout, int64_t rows)
{
    descriptor op = knn_forward(p, layout, rows);

    RUN(muvox_knn_forward, &op.knn, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    op.knn.grad_distance2 = random_input(p, MUVOX_F32, K, 1);
    op.knn.grad_coords = output(p, MUVOX_F32, D);
    return op;
}

static descriptor aggregate_forward(problem *p, layout layout, int64_t rows)
{
    descriptor   op = knn_forward(p, layout, rows);
    muvox_matrix neighbours;

    RUN(muvox_knn_forward, &op.knn, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    neighbours = as_matrix(op.knn.neighbours);
    op.aggregate = (muvox_aggregate){
        .struct_size = sizeof op.aggregate,
        .sets = p->sets,
        .aggregates = BOTH,
        .feats = random_input(p, MUVOX_F32, F, 1),
        .neighbours = neighbours,
        .weights = random_input(p, MUVOX_F32, K, 1),
        .out = output(p, MUVOX_F32, 2 * F),
        .winners = output(p, MUVOX_U8, F),
    };
    return op;
}

static descriptor aggregate_backward(problem *p, layout layout, int64_t rows)
{
    descriptor op = aggregate_forward(p, layout, rows);

    RUN(muvox_aggregate_forward, &op.aggregate, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    op.aggregate.grad_out = random_input(p, MUVOX_F32, 2 * F, 1);
    op.aggregate.grad_feats = output(p, MUVOX_F32, F);
    op.aggregate.grad_weights = output(p, MUVOX_F32, K);
    return op;
}

static descriptor gravnet_forward(problem *p, layout layout, int64_t rows)
{
    descriptor op = {0};

    *p = problem_make(layout, 3, rows, 12);
    op.gravnet = (muvox_gravnet){
        .struct_size = sizeof op.gravnet,
        .sets = p->sets,
        .k = K,
        .scale = 10,
        .aggregates = BOTH,
        .coords = random_input(p, MUVOX_F32, D, 1),
        .feats = random_input(p, MUVOX_F32, F, 1),
        .out = output(p, MUVOX_F32, 2 * F),
        .neighbours = output(p, MUVOX_I32, K),
        .winners = output(p, MUVOX_U8, F),
    };
    return op;
}

static descriptor gravnet_backward(problem *p, layout layout, int64_t rows)
{
    descriptor op = gravnet_forward(p, layout, rows);

    RUN(muvox_gravnet_forward, &op.gravnet, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    op.gravnet.grad_out = random_input(p, MUVOX_F32, 2 * F, 1);
    op.gravnet.grad_coords = output(p, MUVOX_F32, D);
    op.gravnet.grad_feats = output(p, MUVOX_F32, F);
    return op;
}

static descriptor attention_forward(problem *p, layout layout, int64_t rows)
{
    descriptor op = {0};

    *p = problem_make(layout, 3, rows, 13);
    op.attention = (muvox_attention){
        .struct_size = sizeof op.attention,
        .sets = p->sets,
        .scale = NAN,
        .q = random_input(p, MUVOX_F32, A, 1),
        .k = random_input(p, MUVOX_F32, A, 1),
        .v = random_input(p, MUVOX_F32, F, 1),
        .out = output(p, MUVOX_F32, F),
        .lse = output(p, MUVOX_F32, 1),
    };
    return op;
}

static descriptor attention_backward(problem *p, layout layout, int64_t rows)
{
    descriptor op = attention_forward(p, layout, rows);

    RUN(muvox_attention_forward, &op.attention, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    op.attention.grad_out = random_input(p, MUVOX_F32, F, 1);
    op.attention.grad_lse = random_input(p, MUVOX_F32, 1, 1);
    op.attention.grad_q = output(p, MUVOX_F32, A);
    op.attention.grad_k = output(p, MUVOX_F32, A);
    op.attention.grad_v = output(p, MUVOX_F32, F);
    return op;
}

static descriptor offset_attention_forward(problem *p, layout layout, int64_t rows)
{
    descriptor op = {0};

    *p = problem_make(layout, 3, rows, 15);
    op.offset_attention = (muvox_offset_attention){
        .struct_size = sizeof op.offset_attention,
        .sets = p->sets,
        .scale = 1,
        .eps = 1e-17,
        .q = random_input(p, MUVOX_F32, A, 1),
        .k = random_input(p, MUVOX_F32, A, 1),
        .v = random_input(p, MUVOX_F32, F, 1),
        .mask = row_mask(p),
        .out = output(p, MUVOX_F32, F),
        .column_lse = output(p, MUVOX_F32, 1),
        .log_sum = output(p, MUVOX_F32, 1),
    };
    return op;
}

static descriptor offset_attention_backward(problem *p, layout layout, int64_t rows)
{
    descriptor op = offset_attention_forward(p, layout, rows);

    RUN(muvox_offset_attention_forward, &op.offset_attention, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    op.offset_attention.grad_out = random_input(p, MUVOX_F32, F, 1);
    op.offset_attention.grad_q = output(p, MUVOX_F32, A);
    op.offset_attention.grad_k = output(p, MUVOX_F32, A);
    op.offset_attention.grad_v = output(p, MUVOX_F32, F);
    return op;
}

static descriptor pool_forward(problem *p, layout layout, int64_t rows)
{
    descriptor op = {0};

    *p = problem_make(layout, 3, rows, 14);
    op.pool = (muvox_pool){
        .struct_size = sizeof op.pool,
        .sets = p->sets,
        .aggregates = BOTH,
        .x = random_input(p, MUVOX_F32, F, 1),
        .out = output_per_set(p, MUVOX_F32, 2 * F),
        .winners = output_per_set(p, MUVOX_I32, F),
    };
    return op;
}

static descriptor pool_backward(problem *p, layout layout, int64_t rows)
{
    descriptor op = pool_forward(p, layout, rows);

    RUN(muvox_pool_forward, &op.pool, MUVOX_SIMD_REFERENCE, 1);
    freeze(p);
    op.pool.grad_out = random_input_per_set(p, MUVOX_F32, 2 * F, 1);
    op.pool.grad_x = output(p, MUVOX_F32, F);
    return op;
}

#define RUNNER(name)                                                                                                   \
    static muvox_status run_##name##_forward(muvox_context *ctx, const descriptor *op)                                 \
    {                                                                                                                  \
        return muvox_##name##_forward(ctx, &op->name);                                                                 \
    }                                                                                                                  \
    static muvox_status run_##name##_backward(muvox_context *ctx, const descriptor *op)                                \
    {                                                                                                                  \
        return muvox_##name##_backward(ctx, &op->name);                                                                \
    }

RUNNER(knn)
RUNNER(aggregate)
RUNNER(gravnet)
RUNNER(attention)
RUNNER(offset_attention)
RUNNER(pool)

#define CALL(name)                                                                                                     \
    {#name, "forward", run_##name##_forward, name##_forward},                                                          \
    {                                                                                                                  \
#name, "backward", run_##name##_backward, name##_backward                                                      \
    }

const operator_call calls[CALLS] = {CALL(knn),       CALL(aggregate),        CALL(gravnet),
                                    CALL(attention), CALL(offset_attention), CALL(pool)};
