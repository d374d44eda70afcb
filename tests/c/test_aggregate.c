/* aggregate: exact answers, every kernel against the plain one, determinism, gradients, refusals. */
#include "problem.h"

#include <math.h>

typedef struct {
    layout           layout;
    muvox_dtype      feats, weights;
    int64_t          M, k, F;
    muvox_aggregates aggregates;
} aggregate_case;

static muvox_aggregate outputs(problem *p, muvox_matrix feats, muvox_matrix neighbours, muvox_matrix weights,
                               muvox_aggregates aggregates)
{
    const int64_t   F = feats.cols, k = neighbours.cols;
    muvox_aggregate op = {
        .struct_size = sizeof op,
        .sets = p->sets,
        .aggregates = aggregates,
        .feats = feats,
        .neighbours = neighbours,
        .weights = weights,
        .out = output(p, feats.dtype, kinds(aggregates) * F),
        .grad_feats = output(p, feats.dtype, F),
        .grad_weights = output(p, weights.dtype, k),
    };

    if (winner_kinds(aggregates)) op.winners = output(p, k <= 254 ? MUVOX_U8 : MUVOX_I32, winner_kinds(aggregates) * F);
    return op;
}

/* Rows of the set in any order and number; every fifth place is empty, and so is every seventh row. */
static muvox_matrix random_neighbours(problem *p, int64_t k)
{
    const muvox_matrix m = grid_input(p, MUVOX_I32, k, 1);

    for (int64_t s = 0; s < p->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&p->sets, s); i++)
            for (int64_t r = 0; r < k; r++) {
                const bool empty = random_below(p, 5) == 0 || i % 7 == 6;

                set_value(&m, &p->sets, s, i, r, empty ? -1 : (double)random_below(p, set_rows(&p->sets, s)));
            }
    return m;
}

/* The same problem for the same case, each time it is called. Values on a grid, too, so that there are ties. */
static muvox_aggregate make(problem *p, const aggregate_case *c)
{
    muvox_matrix    feats, neighbours, weights, g;
    muvox_aggregate op;

    *p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 1000 + c->k));
    feats = c->k % 2 ? random_input(p, c->feats, c->F, 2) : grid_input(p, c->feats, c->F, 4);
    neighbours = random_neighbours(p, c->k);
    weights = c->k % 2 ? random_input(p, c->weights, c->k, 1) : grid_input(p, c->weights, c->k, 3);
    g = random_input(p, c->feats, kinds(c->aggregates) * c->F, 1);
    op = outputs(p, feats, neighbours, weights, c->aggregates);
    op.grad_out = g;
    return op;
}

static double message(const void *descriptor, int64_t s, int64_t i, int64_t r, int64_t f)
{
    const muvox_aggregate *op = descriptor;
    const int64_t          j = (int64_t)value_at(&op->neighbours, &op->sets, s, i, r);

    return value_at(&op->weights, &op->sets, s, i, r) * value_at(&op->feats, &op->sets, s, j, f);
}

static void assert_all_gaps_untouched(const problem *p, const muvox_aggregate *op)
{
    assert_gaps_untouched("out", p, &p->sets, &op->out);
    if (op->winners.data) assert_gaps_untouched("winners", p, &p->sets, &op->winners);
    assert_gaps_untouched("grad_feats", p, &p->sets, &op->grad_feats);
    assert_gaps_untouched("grad_weights", p, &p->sets, &op->grad_weights);
}

/* Every set gives alone what it gives among others, bit for bit. */
static void assert_sets_independent(const problem *p, const muvox_aggregate *batch, muvox_simd simd)
{
    for (int64_t s = 0; s < p->sets.count; s++) {
        problem         q = {.sets = sets_alone(&p->sets, s)};
        muvox_aggregate op;
        muvox_output    out, grad_feats, grad_weights;

        if (!q.sets.rows) continue;
        op = outputs(&q, matrix_alone(batch->feats, &p->sets, s), matrix_alone(batch->neighbours, &p->sets, s),
                     matrix_alone(batch->weights, &p->sets, s), batch->aggregates);
        op.grad_out = matrix_alone(batch->grad_out, &p->sets, s);
        RUN(muvox_aggregate_forward, &op, simd, 2);
        RUN(muvox_aggregate_backward, &op, simd, 2);
        out = output_alone(batch->out, &p->sets, s);
        grad_feats = output_alone(batch->grad_feats, &p->sets, s);
        grad_weights = output_alone(batch->grad_weights, &p->sets, s);
        assert_same("out of a set alone", &q.sets, &op.out, &out);
        assert_same("grad_feats of a set alone", &q.sets, &op.grad_feats, &grad_feats);
        assert_same("grad_weights of a set alone", &q.sets, &op.grad_weights, &grad_weights);
        problem_free(&q);
    }
}

/* The gradients have the same bits when only one is asked for. */
static void assert_single_gradients(const aggregate_case *c, const muvox_aggregate *both, muvox_simd simd)
{
    for (int which = 0; which < 2; which++) {
        problem         q;
        muvox_aggregate op = make(&q, c);

        op.winners = both->winners;
        *(which ? &op.grad_feats : &op.grad_weights) = (muvox_output){0};
        RUN(muvox_aggregate_backward, &op, simd, 1);
        if (which)
            assert_same("grad_weights alone", &q.sets, &op.grad_weights, &both->grad_weights);
        else
            assert_same("grad_feats alone", &q.sets, &op.grad_feats, &both->grad_feats);
        problem_free(&q);
    }
}

static void compare(const aggregate_case *c, muvox_simd simd, const muvox_aggregate *expected)
{
    problem         p, again;
    muvox_aggregate op = make(&p, c);

    RUN(muvox_aggregate_forward, &op, simd, 1);
    assert_close("out", &p.sets, &op.out, &expected->out, tolerance_of(c->feats), 0);
    if (op.winners.data)
        assert_winners(&p.sets, &op.winners, &expected->winners, c->aggregates,
                       c->feats == MUVOX_F32 || c->weights == MUVOX_F32, message, &op);
    op.winners = expected->winners;
    RUN(muvox_aggregate_backward, &op, simd, 1);
    assert_close("grad_feats", &p.sets, &op.grad_feats, &expected->grad_feats, tolerance_of(c->feats), 0);
    assert_close("grad_weights", &p.sets, &op.grad_weights, &expected->grad_weights, tolerance_of(c->weights), 0);
    assert_single_gradients(c, &op, simd);
    if (c->layout != SHARED) assert_sets_independent(&p, &op, simd);
    problem_free(&p);

    op = make(&p, c);
    RUN(muvox_aggregate_forward, &op, simd, 1);
    RUN(muvox_aggregate_backward, &op, simd, 1);
    assert_all_gaps_untouched(&p, &op);
    for (int threads = 1; threads <= 3; threads++) {
        const muvox_aggregate repeated = make(&again, c);

        RUN(muvox_aggregate_forward, &repeated, simd, threads);
        RUN(muvox_aggregate_backward, &repeated, simd, threads);
        assert_same_outputs(&again, &p);
        problem_free(&again);
    }
    problem_free(&p);
}

static void name_case(const aggregate_case *c, muvox_simd simd)
{
    doing("aggregate simd %d, %s feats, %s weights, layout %d, M %d, k %d, F %d, aggregates 0x%x", (int)simd,
          name_of(c->feats), name_of(c->weights), (int)c->layout, (int)c->M, (int)c->k, (int)c->F, c->aggregates);
}

static void try_case(const aggregate_case *c)
{
    muvox_simd            simds[4];
    problem               p;
    const muvox_aggregate op = make(&p, c);

    name_case(c, MUVOX_SIMD_REFERENCE);
    RUN(muvox_aggregate_forward, &op, MUVOX_SIMD_REFERENCE, 1);
    RUN(muvox_aggregate_backward, &op, MUVOX_SIMD_REFERENCE, 1);
    assert_all_gaps_untouched(&p, &op);
    for (int n = all_simds(simds), v = 1; v < n; v++) {
        name_case(c, simds[v]);
        compare(c, simds[v], &op);
    }
    problem_free(&p);
}

/* Round the edges of vectors; the test's number gives dtype and layout, the rest goes round so that all pairs meet. */
START_TEST(every_kernel_equals_the_reference)
{
    const int64_t     sizes[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130}, widths[] = {1, 5, 8, 12, 22, 48, 64};
    const muvox_dtype feats = floating_dtypes[_i % 4];

    for (int m = 0; m < COUNT(sizes); m++) {
        const int64_t M = sizes[m], ks[] = {1, 8, 25, 33, M ? M : 2, M + 3, 300};

        for (int turn = 0; turn < 2; turn++) {
            aggregate_case c = {(layout)(_i / 4),
                                feats,
                                feats == MUVOX_F64 ? feats : floating_dtypes[(_i + m + turn) % 3],
                                M,
                                ks[(_i + 3 * m + 4 * turn) % COUNT(ks)],
                                widths[(_i + m + 3 * turn) % COUNT(widths)],
                                aggregate_choices[(_i + 2 * m + turn) % AGGREGATE_CHOICES]};

            while (c.F > 1 && M * M * c.k * c.F > 200000) c.F /= 2; /* the plain one takes its time */
            if (wanted()) try_case(&c);
        }
    }
}
END_TEST

/* Two rows, three features and five places by hand. */
START_TEST(known_answers)
{
    const double feats[] = {1, -4, NAN, 2, 2, 6};
    const double neighbours[] = {1, -1, 0, 1, -1, -1, -1, -1, -1, -1};
    const double weights[] = {0.5, NAN, 2, 0.5, NAN, 7, 7, 7, 7, 7};
    /* row 0: m = {1, 1, 3}, {2, −8, NaN}, {1, 1, 3} */
    const double out[] = {4 / 3., -2, NAN, 2, 1, NAN, 2, 8, NAN, 4, -6, NAN, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const double ranks[] = {2, 0, 2, 2, 2, 2, 255, 255, 255, 255, 255, 255};
    const muvox_aggregates all =
        MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX) | (muvox_aggregates)MUVOX_AGGREGATES_2(MUVOX_ABSMAX, MUVOX_SUM) << 8;
    muvox_simd simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem         p = problem_make(UNIFORM, 1, 2, 1);
        muvox_aggregate op =
            outputs(&p, given_input(&p, MUVOX_F64, 3, feats), given_input(&p, MUVOX_I32, 5, neighbours),
                    given_input(&p, MUVOX_F64, 5, weights), all);

        doing("aggregate, simd %d", (int)simds[v]);
        RUN(muvox_aggregate_forward, &op, simds[v], 1);
        assert_values("out", &p.sets, &op.out, out);
        assert_values("winners", &p.sets, &op.winners, ranks);
        problem_free(&p);
    }
}
END_TEST

/* One row that is its own neighbour thrice (f = −3, w = 1, 2, 2): m = −3, −6, −6; mean 1, max 10, absmax 100, sum 1000.
 * dm = 1/3 + 1000 + 10 at rank 0 and − 100 at rank 1. */
START_TEST(known_gradients)
{
    const double feats[] = {-3}, neighbours[] = {0, 0, 0}, weights[] = {1, 2, 2}, g[] = {3, 10, 100, 1000};
    const double grad_weights[] = {-3 * 1011, -3 * 901, -3 * 1001}, grad_feats[] = {1011 + 2 * 901 + 2 * 1001};
    const muvox_aggregates all =
        MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX) | (muvox_aggregates)MUVOX_AGGREGATES_2(MUVOX_ABSMAX, MUVOX_SUM) << 8;
    muvox_simd simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem         p = problem_make(UNIFORM, 1, 1, 1);
        muvox_aggregate op =
            outputs(&p, given_input(&p, MUVOX_F32, 1, feats), given_input(&p, MUVOX_I32, 3, neighbours),
                    given_input(&p, MUVOX_F32, 3, weights), all);

        doing("aggregate, simd %d", (int)simds[v]);
        op.grad_out = given_input(&p, MUVOX_F32, 4, g);
        RUN(muvox_aggregate_forward, &op, simds[v], 1);
        RUN(muvox_aggregate_backward, &op, simds[v], 1);
        assert_values("grad_weights", &p.sets, &op.grad_weights, grad_weights);
        assert_values("grad_feats", &p.sets, &op.grad_feats, grad_feats);
        problem_free(&p);
    }
}
END_TEST

/* absmax of nothing but zeros has gradient sign(0) = 0; a row without neighbours passes nothing on. */
START_TEST(zero_and_empty_take_no_gradient)
{
    const double feats[] = {0, 5}, neighbours[] = {0, 0, -1, -1}, weights[] = {1, 1, 1, 1}, g[] = {7, NAN};
    const double zeros[] = {0, 0, 0, 0};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem         p = problem_make(UNIFORM, 1, 2, 1);
        muvox_aggregate op =
            outputs(&p, given_input(&p, MUVOX_F32, 1, feats), given_input(&p, MUVOX_I32, 2, neighbours),
                    given_input(&p, MUVOX_F32, 2, weights), MUVOX_ABSMAX);

        doing("aggregate, simd %d", (int)simds[v]);
        op.grad_out = given_input(&p, MUVOX_F32, 1, g);
        RUN(muvox_aggregate_forward, &op, simds[v], 1);
        RUN(muvox_aggregate_backward, &op, simds[v], 1);
        assert_values("grad_weights", &p.sets, &op.grad_weights, zeros);
        assert_values("grad_feats", &p.sets, &op.grad_feats, zeros);
        problem_free(&p);
    }
}
END_TEST

static double loss(const void *descriptor, muvox_simd simd)
{
    const muvox_aggregate *op = descriptor;

    RUN(muvox_aggregate_forward, op, simd, 1);
    return dot(&op->sets, &op->out, &op->grad_out);
}

START_TEST(gradients_by_finite_differences)
{
    const layout layouts[] = {UNIFORM, RAGGED, STRIDED};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int a = 0; a < AGGREGATE_CHOICES; a++) {
            if (!wanted()) continue;
            const aggregate_case  c = {layouts[_i], MUVOX_F64, MUVOX_F64, 8, 5, 3, aggregate_choices[a]};
            problem               p;
            const muvox_aggregate op = make(&p, &c);

            name_case(&c, simds[v]);
            RUN(muvox_aggregate_forward, &op, simds[v], 1);
            RUN(muvox_aggregate_backward, &op, simds[v], 1);
            assert_gradient("grad_feats", &p.sets, &op.feats, &op.grad_feats, loss, &op, simds[v]);
            assert_gradient("grad_weights", &p.sets, &op.weights, &op.grad_weights, loss, &op, simds[v]);
            problem_free(&p);
        }
}
END_TEST

#define WRONG(run, change, status, argument) REFUSES(aggregate, run, change, status, argument)

START_TEST(forward_refuses_wrong_arguments)
{
    const aggregate_case  c = {STRIDED, MUVOX_F32, MUVOX_F32, 5, 3, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX)};
    problem               p;
    const muvox_aggregate good = make(&p, &c);
    int32_t *const        first = (int32_t *)(uintptr_t)good.neighbours.data;

    WRONG(muvox_aggregate_forward, op.aggregates = 0, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_aggregate_forward, op.aggregates = 5, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_aggregate_forward, op.aggregates = 0x11, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_aggregate_forward, op.aggregates = 0x102, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_aggregate_forward, op.aggregates = 0xffffffffu, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_aggregate_forward, op.aggregates = MUVOX_MEAN, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_aggregate_forward, op.feats.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "feats");
    WRONG(muvox_aggregate_forward, op.feats.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "weights");
    WRONG(muvox_aggregate_forward, op.feats.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_aggregate_forward, op.feats.rows++, MUVOX_BAD_SHAPE, "feats");
    WRONG(muvox_aggregate_forward, op.feats.cols = 0, MUVOX_BAD_SHAPE, "feats");
    WRONG(muvox_aggregate_forward, op.feats.data = NULL, MUVOX_BAD_ARGUMENT, "feats");
    WRONG(muvox_aggregate_forward, op.feats.row_stride = -4, MUVOX_BAD_ARGUMENT, "feats");
    WRONG(muvox_aggregate_forward, op.neighbours.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "neighbours");
    WRONG(muvox_aggregate_forward, op.neighbours.rows--, MUVOX_BAD_SHAPE, "neighbours");
    WRONG(muvox_aggregate_forward, op.neighbours.cols = 0, MUVOX_BAD_ARGUMENT, "k is 0");
    WRONG(muvox_aggregate_forward, op.neighbours.data = NULL, MUVOX_BAD_ARGUMENT, "neighbours");
    if (ON_CPU) WRONG(muvox_aggregate_forward, *first = 5, MUVOX_BAD_ARGUMENT, "neighbours");
    if (ON_CPU) WRONG(muvox_aggregate_forward, *first = -2, MUVOX_BAD_ARGUMENT, "neighbours");
    *first = 0;
    WRONG(muvox_aggregate_forward, op.weights.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "weights");
    WRONG(muvox_aggregate_forward, op.weights.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "weights");
    WRONG(muvox_aggregate_forward, op.weights.cols++, MUVOX_BAD_SHAPE, "weights");
    WRONG(muvox_aggregate_forward, op.weights.data = NULL, MUVOX_BAD_ARGUMENT, "weights");
    WRONG(muvox_aggregate_forward, op.out.cols--, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_aggregate_forward, op.out.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_aggregate_forward, op.out.row_stride = 7, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_aggregate_forward, op.out.set_stride = 0, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_aggregate_forward, op.winners.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "winners");
    WRONG(muvox_aggregate_forward, op.winners.cols++, MUVOX_BAD_SHAPE, "winners");
    problem_free(&p);
}
END_TEST

START_TEST(backward_refuses_wrong_arguments)
{
    const aggregate_case c = {STRIDED, MUVOX_F32, MUVOX_F16, 5, 3, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX)};
    problem              p;
    muvox_aggregate      good = make(&p, &c);

    RUN(muvox_aggregate_forward, &good, MUVOX_SIMD_AUTO, 1);
    freeze(&p);
    good.grad_feats = output(&p, MUVOX_F32, 4);
    good.grad_weights = output(&p, MUVOX_F16, 3);
    WRONG(muvox_aggregate_backward, op.aggregates = 0, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_aggregate_backward, op.winners.data = NULL, MUVOX_BAD_ARGUMENT, "winners");
    WRONG(muvox_aggregate_backward, op.winners.rows--, MUVOX_BAD_SHAPE, "winners");
    WRONG(muvox_aggregate_backward, op.grad_out.data = NULL, MUVOX_BAD_ARGUMENT, "grad_out");
    WRONG(muvox_aggregate_backward, op.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_aggregate_backward, op.grad_out.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "grad_out");
    WRONG(muvox_aggregate_backward, op.grad_feats.cols++, MUVOX_BAD_SHAPE, "grad_feats");
    WRONG(muvox_aggregate_backward, op.grad_feats.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_feats");
    WRONG(muvox_aggregate_backward, op.grad_weights.cols++, MUVOX_BAD_SHAPE, "grad_weights");
    WRONG(muvox_aggregate_backward, op.grad_weights.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "grad_weights");
    WRONG(muvox_aggregate_backward, op.grad_weights.row_stride = 2, MUVOX_BAD_ARGUMENT, "grad_weights");
    problem_free(&p);
}
END_TEST

Suite *aggregate_suite(void)
{
    Suite *const suite = suite_create("aggregate");
    TCase *const tests = tcase_create("aggregate");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    tcase_add_test(tests, known_answers);
    tcase_add_test(tests, known_gradients);
    tcase_add_test(tests, zero_and_empty_take_no_gradient);
    tcase_add_loop_test(tests, gradients_by_finite_differences, 0, 3);
    tcase_add_test(tests, forward_refuses_wrong_arguments);
    tcase_add_test(tests, backward_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
