/* The options of knn, gravnet, attention and pool, and offset attention: masks, weights, bias, radius, queries. Every kernel
 * against the plain one, gradients by finite differences, refusals. */
#include "trial.h"

#include <math.h>
#include <string.h>

TRIAL(knn)
TRIAL(gravnet)
TRIAL(attention)
TRIAL(offset_attention)
TRIAL(pool)

#define BOTH_AND_ABSMAX (MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX) | (muvox_aggregates)MUVOX_ABSMAX << 8)

static unsigned search_options(unsigned options)
{
    return (options & EXCLUDE_SELF ? MUVOX_EXCLUDE_SELF : 0u) | (options & RADIUS ? MUVOX_WITHIN_RADIUS : 0u) |
           (options & QUERIES ? MUVOX_QUERIES : 0u) | (options & BY_K ? MUVOX_MEAN_BY_K : 0u);
}

/* A mask, if it is asked for, and NaN under it. */
static muvox_matrix mask_of(trial *t, const trial_case *c, const muvox_matrix *inputs, int count)
{
    const muvox_matrix mask = row_mask(&t->p);

    if (!(c->options & MASK)) return (muvox_matrix){0};
    for (int n = 0; n < count && c->poison; n++)
        if (inputs[n].data) poison_masked(&t->p, &inputs[n], &mask);
    return mask;
}

static void make_knn(trial *t, const trial_case *c)
{
    muvox_knn  *op = &t->op.knn;
    muvox_sets *queries = &op->query_sets;

    t->p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_knn){.struct_size = sizeof *op,
                      .sets = t->p.sets,
                      .query_sets = c->options & QUERIES ? other_sets(&t->p, 5) : t->p.sets,
                      .k = 6,
                      .options = search_options(c->options),
                      .max_radius = 0.9,
                      .coords = random_input(&t->p, c->dtype, 3, 1)};
    if (c->options & QUERIES) op->queries = random_input_of(&t->p, queries, c->dtype, 3, 1);
    op->mask = mask_of(t, c, &op->coords, 1);
    op->grad_distance2 = random_input_of(&t->p, queries, wide(c->dtype), 6, 1);
    op->neighbours = output_of(&t->p, queries, MUVOX_I32, 6);
    op->distance2 = output_of(&t->p, queries, wide(c->dtype), 6);
    op->counts = output_of(&t->p, queries, MUVOX_I32, 1);
    op->grad_coords = output(&t->p, c->dtype, 3);
    if (c->options & QUERIES) op->grad_queries = output_of(&t->p, queries, c->dtype, 3);
    t->forward = forward_knn;
    t->backward = backward_knn;
    forward_result(t, "neighbours", queries, &op->neighbours, true, NULL);
    forward_result(t, "distance2", queries, &op->distance2, true, &op->grad_distance2);
    forward_result(t, "counts", queries, &op->counts, true, NULL);
    gradient_result(t, "grad_coords", &op->sets, &op->grad_coords, &op->coords);
    gradient_result(t, "grad_queries", queries, &op->grad_queries, &op->queries);
}

static void make_gravnet(trial *t, const trial_case *c)
{
    muvox_gravnet *op = &t->op.gravnet;
    muvox_matrix   inputs[3];

    t->p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_gravnet){.struct_size = sizeof *op,
                          .sets = t->p.sets,
                          .k = 6,
                          .scale = 2,
                          .aggregates = BOTH_AND_ABSMAX,
                          .options = search_options(c->options),
                          .max_radius = 0.9,
                          .coords = random_input(&t->p, c->dtype, 3, 1),
                          .feats = random_input(&t->p, c->dtype, 9, 2)};
    if (c->options & WEIGHTS) op->row_weights = row_weights(&t->p, c);
    inputs[0] = op->coords;
    inputs[1] = op->feats;
    inputs[2] = op->row_weights;
    op->mask = mask_of(t, c, inputs, 3);
    op->grad_out = random_input(&t->p, c->dtype, 27, 1);
    op->out = output(&t->p, c->dtype, 27);
    op->neighbours = output(&t->p, MUVOX_I32, 6);
    op->winners = output(&t->p, MUVOX_U8, 18);
    op->grad_coords = output(&t->p, c->dtype, 3);
    op->grad_feats = output(&t->p, c->dtype, 9);
    if (c->options & WEIGHTS) op->grad_row_weights = output(&t->p, wide(c->dtype), 1);
    t->forward = forward_gravnet;
    t->backward = backward_gravnet;
    forward_result(t, "out", &op->sets, &op->out, false, &op->grad_out);
    forward_result(t, "neighbours", &op->sets, &op->neighbours, true, NULL);
    forward_result(t, "winners", &op->sets, &op->winners, true, NULL);
    gradient_result(t, "grad_coords", &op->sets, &op->grad_coords, &op->coords);
    gradient_result(t, "grad_feats", &op->sets, &op->grad_feats, &op->feats);
    gradient_result(t, "grad_row_weights", &op->sets, &op->grad_row_weights, &op->row_weights);
}

static void make_attention(trial *t, const trial_case *c)
{
    muvox_attention *op = &t->op.attention;
    muvox_matrix     inputs[5];

    t->p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_attention){.struct_size = sizeof *op,
                            .sets = t->p.sets,
                            .scale = 0.5,
                            .q = random_input(&t->p, c->dtype, 3, 2),
                            .k = random_input(&t->p, c->dtype, 3, 2),
                            .v = random_input(&t->p, c->dtype, 9, 2)};
    if (c->options & BIAS) op->bias = random_input(&t->p, wide(c->dtype), 1, 2);
    if (c->options & WEIGHTS) op->row_weights = row_weights(&t->p, c);
    inputs[0] = op->q;
    inputs[1] = op->k;
    inputs[2] = op->v;
    inputs[3] = op->bias;
    inputs[4] = op->row_weights;
    op->mask = mask_of(t, c, inputs, 5);
    op->grad_out = random_input(&t->p, c->dtype, 9, 1);
    op->grad_lse = random_input(&t->p, wide(c->dtype), 1, 1);
    op->out = output(&t->p, c->dtype, 9);
    op->lse = output(&t->p, wide(c->dtype), 1);
    op->grad_q = output(&t->p, c->dtype, 3);
    op->grad_k = output(&t->p, c->dtype, 3);
    op->grad_v = output(&t->p, c->dtype, 9);
    if (c->options & BIAS) op->grad_bias = output(&t->p, wide(c->dtype), 1);
    if (c->options & WEIGHTS) op->grad_row_weights = output(&t->p, wide(c->dtype), 1);
    t->forward = forward_attention;
    t->backward = backward_attention;
    forward_result(t, "out", &op->sets, &op->out, false, &op->grad_out);
    forward_result(t, "lse", &op->sets, &op->lse, false, &op->grad_lse);
    gradient_result(t, "grad_q", &op->sets, &op->grad_q, &op->q);
    gradient_result(t, "grad_k", &op->sets, &op->grad_k, &op->k);
    gradient_result(t, "grad_v", &op->sets, &op->grad_v, &op->v);
    gradient_result(t, "grad_bias", &op->sets, &op->grad_bias, &op->bias);
    gradient_result(t, "grad_row_weights", &op->sets, &op->grad_row_weights, &op->row_weights);
}

static void make_offset_attention(trial *t, const trial_case *c)
{
    muvox_offset_attention *op = &t->op.offset_attention;
    muvox_matrix            inputs[3];

    t->p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_offset_attention){.struct_size = sizeof *op,
                                   .sets = t->p.sets,
                                   .scale = 0.5,
                                   .eps = 1e-3,
                                   .q = random_input(&t->p, c->dtype, 3, 2),
                                   .k = random_input(&t->p, c->dtype, 3, 2),
                                   .v = random_input(&t->p, c->dtype, 9, 2)};
    inputs[0] = op->q;
    inputs[1] = op->k;
    inputs[2] = op->v;
    op->mask = mask_of(t, c, inputs, 3);
    op->grad_out = random_input(&t->p, c->dtype, 9, 1);
    op->out = output(&t->p, c->dtype, 9);
    op->column_lse = output(&t->p, wide(c->dtype), 1);
    op->log_sum = output(&t->p, wide(c->dtype), 1);
    op->grad_q = output(&t->p, c->dtype, 3);
    op->grad_k = output(&t->p, c->dtype, 3);
    op->grad_v = output(&t->p, c->dtype, 9);
    t->forward = forward_offset_attention;
    t->backward = backward_offset_attention;
    forward_result(t, "out", &op->sets, &op->out, false, &op->grad_out);
    forward_result(t, "column_lse", &op->sets, &op->column_lse, false, NULL);
    forward_result(t, "log_sum", &op->sets, &op->log_sum, false, NULL);
    gradient_result(t, "grad_q", &op->sets, &op->grad_q, &op->q);
    gradient_result(t, "grad_k", &op->sets, &op->grad_k, &op->k);
    gradient_result(t, "grad_v", &op->sets, &op->grad_v, &op->v);
}

static void make_pool(trial *t, const trial_case *c)
{
    muvox_pool  *op = &t->op.pool;
    muvox_sets   rows;
    muvox_matrix inputs[2];

    t->p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 100 + c->options));
    rows = per_set(&t->p.sets);
    *op = (muvox_pool){.struct_size = sizeof *op,
                       .sets = t->p.sets,
                       .aggregates = BOTH_AND_ABSMAX | (muvox_aggregates)MUVOX_SUM << 12,
                       .x = random_input(&t->p, c->dtype, 9, 2)};
    if (c->options & WEIGHTS) op->row_weights = row_weights(&t->p, c);
    inputs[0] = op->x;
    inputs[1] = op->row_weights;
    op->mask = mask_of(t, c, inputs, 2);
    op->grad_out = random_input_per_set(&t->p, c->dtype, 36, 1);
    op->out = output_per_set(&t->p, c->dtype, 36);
    op->winners = output_per_set(&t->p, MUVOX_I32, 18);
    op->grad_x = output(&t->p, c->dtype, 9);
    if (c->options & WEIGHTS) op->grad_row_weights = output(&t->p, wide(c->dtype), 1);
    t->forward = forward_pool;
    t->backward = backward_pool;
    forward_result(t, "out", &rows, &op->out, false, &op->grad_out);
    forward_result(t, "winners", &rows, &op->winners, true, NULL);
    gradient_result(t, "grad_x", &op->sets, &op->grad_x, &op->x);
    gradient_result(t, "grad_row_weights", &op->sets, &op->grad_row_weights, &op->row_weights);
}

const subject option_subjects[OPTION_SUBJECTS] = {
    {"knn",
     make_knn,
     8,
     {EXCLUDE_SELF, RADIUS, QUERIES, MASK, EXCLUDE_SELF | RADIUS | MASK, QUERIES | RADIUS | MASK, EXCLUDE_SELF | MASK,
      QUERIES | MASK}},
    {"gravnet",
     make_gravnet,
     7,
     {EXCLUDE_SELF, RADIUS | BY_K, MASK, WEIGHTS, BY_K | MASK, EXCLUDE_SELF | RADIUS | MASK | WEIGHTS,
      MASK | WEIGHTS | BY_K | RADIUS}},
    {"attention", make_attention, 6, {BIAS, MASK, WEIGHTS, BIAS | WEIGHTS, MASK | WEIGHTS, BIAS | MASK | WEIGHTS}},
    {"offset_attention", make_offset_attention, 2, {0, MASK}},
    {"pool", make_pool, 3, {MASK, WEIGHTS, MASK | WEIGHTS}},
};

/* Round the edges of tiles; the test's number gives dtype and layout, the rest goes round. */
START_TEST(every_kernel_equals_the_reference)
{
    const int64_t sizes[] = {0, 1, 2, 16, 17, 66};

    for (int o = 0; o < OPTION_SUBJECTS; o++)
        for (int m = 0; runs_here(option_subjects[o].name) && m < COUNT(sizes); m++)
            for (int turn = 0; turn < 2; turn++) {
                const trial_case c = {(layout)(_i / 4),
                                      floating_dtypes[_i % 4],
                                      sizes[m],
                                      option_subjects[o].options[(_i + m + turn * 3) % option_subjects[o].count],
                                      true,
                                      false};

                try_all_kernels(option_subjects[o].name, option_subjects[o].make, &c);
            }
}
END_TEST

START_TEST(gradients_by_finite_differences)
{
    const layout   layouts[] = {UNIFORM, RAGGED, STRIDED};
    const subject *of = &option_subjects[_i];

    for (int o = 0; o < of->count; o++) {
        const trial_case c = {layouts[o % 3], MUVOX_F64, 9, of->options[o], true, true};

        try_gradients(of->name, of->make, &c);
    }
}
END_TEST

/* Column 0 of each row that does not take part, as the headers promise it. */
START_TEST(masked_rows_give_nothing)
{
    muvox_simd simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int o = 0; o < OPTION_SUBJECTS - 1; o++) {
            const trial_case    c = {STRIDED, MUVOX_F32, 17, MASK | (o == 1 || o == 2 ? WEIGHTS : 0u), true, false};
            trial               t = {.count = 0};
            const muvox_matrix *mask;

            if (!runs_here(option_subjects[o].name)) continue;
            option_subjects[o].make(&t, &c);
            mask = o == 0   ? &t.op.knn.mask
                   : o == 1 ? &t.op.gravnet.mask
                   : o == 2 ? &t.op.attention.mask
                            : &t.op.offset_attention.mask;
            doing("%s simd %d", option_subjects[o].name, (int)simds[v]);
            RUN(t.forward, &t.op, simds[v], 1);
            RUN(t.backward, &t.op, simds[v], 1);
            for (int r = 0; r < t.count; r++) {
                const result *one = &t.results[r];
                const bool    lse = strstr(one->name, "lse") || strstr(one->name, "log_sum");
                const double  nothing = lse                                ? -INFINITY
                                        : !strcmp(one->name, "distance2")  ? INFINITY
                                        : !strcmp(one->name, "neighbours") ? -1
                                        : !strcmp(one->name, "winners")    ? 255
                                                                           : 0;

                for (int64_t s = 0; s < one->sets.count; s++)
                    for (int64_t i = 0; i < 17; i++)
                        if (!value_at(mask, &one->sets, s, i, 0) && result_at(one->m, &one->sets, s, i, 0) != nothing)
                            ck_abort_msg("%s: %s of masked row %d is %g", done(), one->name, (int)i,
                                         result_at(one->m, &one->sets, s, i, 0));
            }
            problem_free(&t.p);
        }
}
END_TEST

/* Rows at 0, 1, 2, 4: the radius takes its border in, the row itself is left out by number, the queries keep their order. */
START_TEST(known_neighbours)
{
    const double x[] = {0, 1, 2, 4}, at[] = {1.5, 4, 9, -1};
    const double without_self[] = {1, 2, -1, 0, 2, -1, 1, 0, 3, 2, -1, -1};
    const double from_queries[] = {1, 2, 0, 3, 2, -1, -1, -1, -1, 0, 1, -1};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem          p = problem_make(UNIFORM, 1, 4, 1);
        const muvox_sets queries = one_set(4);
        muvox_knn        op = {.struct_size = sizeof op,
                               .sets = p.sets,
                               .k = 3,
                               .options = MUVOX_EXCLUDE_SELF | MUVOX_WITHIN_RADIUS,
                               .max_radius = 2,
                               .coords = given_input(&p, MUVOX_F32, 1, x),
                               .neighbours = output(&p, MUVOX_I32, 3)};

        doing("knn simd %d", (int)simds[v]);
        RUN(muvox_knn_forward, &op, simds[v], 1);
        assert_values("neighbours", &p.sets, &op.neighbours, without_self);
        op.options = MUVOX_QUERIES | MUVOX_WITHIN_RADIUS;
        op.query_sets = queries;
        op.queries = given_input(&p, MUVOX_F32, 1, at);
        RUN(muvox_knn_forward, &op, simds[v], 1);
        assert_values("neighbours of queries", &queries, &op.neighbours, from_queries);
        problem_free(&p);
    }
}
END_TEST

#define REFUSED(operator_, change, status, argument)                                                                   \
    do {                                                                                                               \
        any_descriptor op = t.op;                                                                                      \
        muvox_context  ctx = context(MUVOX_SIMD_AUTO, 1);                                                              \
        change;                                                                                                        \
        doing("%s", #change);                                                                                          \
        assert_refused(&t.p, &ctx, t.forward(&ctx, &op), status, operator_, argument);                                 \
    } while (0)

#define REFUSED_BACKWARD(operator_, change, status, argument)                                                          \
    do {                                                                                                               \
        any_descriptor op = t.op;                                                                                      \
        muvox_context  ctx = context(MUVOX_SIMD_AUTO, 1);                                                              \
        change;                                                                                                        \
        doing("%s", #change);                                                                                          \
        assert_refused(&t.p, &ctx, t.backward(&ctx, &op), status, operator_, argument);                                \
    } while (0)

static const trial_case everything = {STRIDED, MUVOX_F32, 5, MASK | WEIGHTS | BIAS | RADIUS, false, true};

START_TEST(search_refuses_wrong_options)
{
    trial_case c = everything;
    trial      t = {.count = 0};

    c.options = QUERIES | RADIUS | MASK;
    make_knn(&t, &c);
    REFUSED("knn", op.knn.options |= MUVOX_EXCLUDE_SELF, MUVOX_BAD_ARGUMENT, "exclude_self");
    REFUSED("knn", op.knn.options |= MUVOX_MEAN_BY_K, MUVOX_BAD_ARGUMENT, "options");
    REFUSED("knn", op.knn.options |= 64, MUVOX_BAD_ARGUMENT, "options");
    REFUSED("knn", op.knn.max_radius = -1, MUVOX_BAD_ARGUMENT, "max_radius");
    REFUSED("knn", op.knn.max_radius = NAN, MUVOX_BAD_ARGUMENT, "max_radius");
    REFUSED("knn", op.knn.mask.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "mask");
    REFUSED("knn", op.knn.mask.rows++, MUVOX_BAD_SHAPE, "mask");
    REFUSED("knn", op.knn.mask.cols = 2, MUVOX_BAD_SHAPE, "mask");
    REFUSED("knn", op.knn.queries.cols = 2, MUVOX_BAD_SHAPE, "queries");
    REFUSED("knn", op.knn.queries.rows++, MUVOX_BAD_SHAPE, "queries");
    REFUSED("knn", op.knn.queries.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "queries");
    REFUSED("knn", op.knn.queries.data = NULL, MUVOX_BAD_ARGUMENT, "queries");
    REFUSED("knn", op.knn.query_sets.count = 1;
            op.knn.query_sets.rows = op.knn.query_sets.size, MUVOX_BAD_SHAPE, "queries");
    REFUSED("knn", op.knn.query_sets.size++, MUVOX_BAD_ARGUMENT, "sets");
    REFUSED("knn", op.knn.neighbours.rows--, MUVOX_BAD_SHAPE, "neighbours");
    REFUSED_BACKWARD("knn", op.knn.neighbours.data = NULL, MUVOX_BAD_ARGUMENT, "neighbours");
    problem_free(&t.p);
    t = (trial){.count = 0};
    make_gravnet(&t, &everything);
    REFUSED("gravnet", op.gravnet.options |= MUVOX_QUERIES, MUVOX_BAD_ARGUMENT, "options");
    REFUSED("gravnet", op.gravnet.max_radius = -0.5, MUVOX_BAD_ARGUMENT, "max_radius");
    REFUSED("gravnet", op.gravnet.mask.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "mask");
    REFUSED("gravnet", op.gravnet.row_weights.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "row_weights");
    REFUSED("gravnet", op.gravnet.row_weights.rows++, MUVOX_BAD_SHAPE, "row_weights");
    set_value(&t.op.gravnet.row_weights, &t.p.sets, t.p.sets.count - 1, 4, 0, -0.25);
    if (ON_CPU) REFUSED("gravnet", (void)op, MUVOX_BAD_ARGUMENT, "row_weights has -0.25 in row 4");
    problem_free(&t.p);
}
END_TEST

START_TEST(row_operators_refuse_wrong_options)
{
    trial t = {.count = 0};

    make_attention(&t, &everything);
    REFUSED("attention", op.attention.mask.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "mask");
    REFUSED("attention", op.attention.bias.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "bias");
    REFUSED("attention", op.attention.bias.rows--, MUVOX_BAD_SHAPE, "bias");
    REFUSED("attention", op.attention.row_weights.cols = 2, MUVOX_BAD_SHAPE, "row_weights");
    set_value(&t.op.attention.row_weights, &t.p.sets, 0, 0, 0, -1);
    if (ON_CPU) REFUSED("attention", (void)op, MUVOX_BAD_ARGUMENT, "row_weights has -1 in row 0");
    problem_free(&t.p);
    t = (trial){.count = 0};
    make_pool(&t, &everything);
    REFUSED("pool", op.pool.mask.rows--, MUVOX_BAD_SHAPE, "mask");
    REFUSED("pool", op.pool.row_weights.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "row_weights");
    set_value(&t.op.pool.row_weights, &t.p.sets, 0, 1, 0, -2);
    if (ON_CPU) REFUSED("pool", (void)op, MUVOX_BAD_ARGUMENT, "row_weights has -2 in row 1");
    problem_free(&t.p);
    t = (trial){.count = 0};
    make_offset_attention(&t, &everything);
    REFUSED("offset_attention", op.offset_attention.scale = NAN, MUVOX_BAD_ARGUMENT, "scale");
    REFUSED("offset_attention", op.offset_attention.eps = -1e-9, MUVOX_BAD_ARGUMENT, "eps");
    REFUSED("offset_attention", op.offset_attention.k.cols++, MUVOX_BAD_SHAPE, "k has");
    REFUSED("offset_attention", op.offset_attention.v.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "v is double");
    REFUSED("offset_attention", op.offset_attention.mask.cols = 3, MUVOX_BAD_SHAPE, "mask");
    REFUSED("offset_attention", op.offset_attention.out.data = NULL, MUVOX_BAD_ARGUMENT, "out");
    REFUSED("offset_attention", op.offset_attention.log_sum.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "log_sum");
    REFUSED("offset_attention", op.offset_attention.out.set_stride = 0, MUVOX_BAD_ARGUMENT, "out");
    problem_free(&t.p);
}
END_TEST

/* A gradient cannot be asked for of what was not given, and backward needs what forward saves. */
START_TEST(backward_refuses_wrong_options)
{
    trial t = {.count = 0};

    make_gravnet(&t, &everything);
    REFUSED_BACKWARD("gravnet", op.gravnet.neighbours.data = NULL, MUVOX_BAD_ARGUMENT, "neighbours");
    REFUSED_BACKWARD("gravnet", op.gravnet.row_weights.data = NULL, MUVOX_BAD_ARGUMENT, "grad_row_weights");
    REFUSED_BACKWARD("gravnet", op.gravnet.grad_row_weights.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_row_weights");
    problem_free(&t.p);
    t = (trial){.count = 0};
    make_attention(&t, &everything);
    REFUSED_BACKWARD("attention", op.attention.row_weights.data = NULL, MUVOX_BAD_ARGUMENT, "grad_row_weights");
    REFUSED_BACKWARD("attention", op.attention.grad_bias.cols = 2, MUVOX_BAD_SHAPE, "grad_bias");
    problem_free(&t.p);
    t = (trial){.count = 0};
    make_pool(&t, &everything);
    REFUSED_BACKWARD("pool", op.pool.winners.data = NULL, MUVOX_BAD_ARGUMENT, "winners");
    REFUSED_BACKWARD("pool", op.pool.row_weights.data = NULL, MUVOX_BAD_ARGUMENT, "grad_row_weights");
    problem_free(&t.p);
    t = (trial){.count = 0};
    make_offset_attention(&t, &everything);
    REFUSED_BACKWARD("offset_attention", op.offset_attention.column_lse.data = NULL, MUVOX_BAD_ARGUMENT, "column_lse");
    REFUSED_BACKWARD("offset_attention", op.offset_attention.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    REFUSED_BACKWARD("offset_attention", op.offset_attention.grad_q.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_q");
    problem_free(&t.p);
}
END_TEST

Suite *options_suite(void)
{
    Suite *const suite = suite_create("options");
    TCase *const tests = tcase_create("options");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    for (int o = 0; o < OPTION_SUBJECTS; o++)
        if (runs_here(option_subjects[o].name)) tcase_add_loop_test(tests, gradients_by_finite_differences, o, o + 1);
    tcase_add_test(tests, masked_rows_give_nothing);
    tcase_add_test(tests, known_neighbours);
    tcase_add_test(tests, search_refuses_wrong_options);
    tcase_add_test(tests, row_operators_refuse_wrong_options);
    tcase_add_test(tests, backward_refuses_wrong_options);
    suite_add_tcase(suite, tests);
    return suite;
}
