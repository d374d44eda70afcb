/* pool: exact answers, every kernel against the plain one, determinism, gradient, refusals. */
#include "problem.h"

#include <math.h>

typedef struct {
    layout           layout;
    muvox_dtype      dtype;
    int64_t          M, F;
    muvox_aggregates aggregates;
    bool             ties, special; /* special: NaN, infinities and −0 among the values */
} pool_case;

static muvox_pool outputs(problem *p, muvox_matrix x, muvox_aggregates aggregates)
{
    muvox_pool op = {
        .struct_size = sizeof op,
        .sets = p->sets,
        .aggregates = aggregates,
        .x = x,
        .out = output_per_set(p, x.dtype, kinds(aggregates) * x.cols),
        .grad_x = output(p, x.dtype, x.cols),
    };

    if (winner_kinds(aggregates)) op.winners = output_per_set(p, MUVOX_I32, winner_kinds(aggregates) * x.cols);
    return op;
}

static void spoil(problem *p, const muvox_matrix *m)
{
    const double special[] = {NAN, INFINITY, -INFINITY, -0.0};

    for (int64_t s = 0; s < p->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&p->sets, s); i++)
            if (random_below(p, 3) == 0)
                set_value(m, &p->sets, s, i, random_below(p, m->cols), special[random_below(p, COUNT(special))]);
}

/* The same problem for the same case, each time it is called. */
static muvox_pool make(problem *p, const pool_case *c)
{
    muvox_matrix x, g;
    muvox_pool   op;

    *p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 1000 + c->F));
    x = c->ties ? grid_input(p, c->dtype, c->F, 3) : random_input(p, c->dtype, c->F, 2);
    if (c->special) spoil(p, &x);
    g = random_input_per_set(p, c->dtype, kinds(c->aggregates) * c->F, 1);
    op = outputs(p, x, c->aggregates);
    op.grad_out = g;
    return op;
}

static void assert_all_gaps_untouched(const problem *p, const muvox_pool *op)
{
    const muvox_sets rows = per_set(&p->sets);

    assert_gaps_untouched("out", p, &rows, &op->out);
    if (op->winners.data) assert_gaps_untouched("winners", p, &rows, &op->winners);
    assert_gaps_untouched("grad_x", p, &p->sets, &op->grad_x);
}

/* Every set gives alone what it gives among others, bit for bit. */
static void assert_sets_independent(const problem *p, const muvox_pool *batch, muvox_simd simd)
{
    for (int64_t s = 0; s < p->sets.count; s++) {
        problem          q = {.sets = sets_alone(&p->sets, s)};
        const muvox_sets one = per_set(&q.sets);
        muvox_pool       op = outputs(&q, matrix_alone(batch->x, &p->sets, s), batch->aggregates);
        muvox_output     out = row_alone(batch->out, s), winners = row_alone(batch->winners, s);
        muvox_output     grad_x = output_alone(batch->grad_x, &p->sets, s);

        op.grad_out = input_row_alone(batch->grad_out, s);
        RUN(muvox_pool_forward, &op, simd, 2);
        RUN(muvox_pool_backward, &op, simd, 2);
        assert_same("out of a set alone", &one, &op.out, &out);
        if (op.winners.data) assert_same("winners of a set alone", &one, &op.winners, &winners);
        assert_same("grad_x of a set alone", &q.sets, &op.grad_x, &grad_x);
        problem_free(&q);
    }
}

static void compare(const pool_case *c, muvox_simd simd, const muvox_pool *expected)
{
    problem          p, again;
    const muvox_pool op = make(&p, c);
    const muvox_sets rows = per_set(&p.sets);

    RUN(muvox_pool_forward, &op, simd, 1);
    RUN(muvox_pool_backward, &op, simd, 1);
    assert_close("out", &rows, &op.out, &expected->out, tolerance_of(c->dtype), 2);
    if (op.winners.data) assert_same("winners", &rows, &op.winners, &expected->winners);
    assert_close("grad_x", &p.sets, &op.grad_x, &expected->grad_x, tolerance_of(c->dtype), 2);
    assert_all_gaps_untouched(&p, &op);
    assert_sets_independent(&p, &op, simd);
    for (int threads = 1; threads <= 3; threads++) {
        const muvox_pool repeated = make(&again, c);

        RUN(muvox_pool_forward, &repeated, simd, threads);
        RUN(muvox_pool_backward, &repeated, simd, threads);
        assert_same_outputs(&again, &p);
        problem_free(&again);
    }
    problem_free(&p);
}

static void name_case(const pool_case *c, muvox_simd simd)
{
    doing("pool simd %d, %s, layout %d, M %d, F %d, aggregates 0x%x, ties %d, special %d", (int)simd, name_of(c->dtype),
          (int)c->layout, (int)c->M, (int)c->F, c->aggregates, c->ties, c->special);
}

static void try_case(const pool_case *c)
{
    muvox_simd       simds[4];
    problem          p;
    const muvox_pool op = make(&p, c);

    name_case(c, MUVOX_SIMD_REFERENCE);
    RUN(muvox_pool_forward, &op, MUVOX_SIMD_REFERENCE, 1);
    RUN(muvox_pool_backward, &op, MUVOX_SIMD_REFERENCE, 1);
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
    const int64_t sizes[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 1000}, widths[] = {1, 5, 8, 12, 22, 48, 64};

    for (int m = 0; m < COUNT(sizes); m++)
        for (int turn = 0; turn < 3; turn++) {
            const pool_case c = {(layout)(_i / 4),
                                 floating_dtypes[_i % 4],
                                 sizes[m],
                                 widths[(_i + m + 3 * turn) % COUNT(widths)],
                                 aggregate_choices[(_i + 2 * m + turn) % AGGREGATE_CHOICES],
                                 turn == 1,
                                 turn == 2};

            if (wanted()) try_case(&c);
        }
}
END_TEST

/* Sets of 3, 0 and 2 rows: a tie for the largest, absmax of opposite signs, NaN in one column, no rows at all. */
START_TEST(known_answers)
{
    const int64_t splits[] = {0, 3, 3, 5};
    const double  x[] = {2, -4, 1, 2, 4, NAN, -1, 0, 9, -1, -5, -0.0, -2, 5, 0};
    const double  out[] = {1, 0, NAN, 2, 4, NAN, 2,    4, NAN, 3,  0, NAN, 0, 0, 0, 0,  0, 0,
                           0, 0, 0,   0, 0, 0,   -1.5, 0, 0,   -1, 5, 0,   2, 5, 0, -3, 0, 0};
    const double  rows[] = {0, 1, 1, 0, 0, 1, -1, -1, -1, -1, -1, -1, 0, 1, 0, 1, 0, 0};
    muvox_simd    simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int t = 0; t < 4; t++) {
            problem          p = problem_of(splits, 3);
            const muvox_sets sets = per_set(&p.sets);
            const muvox_pool op = outputs(&p, given_input(&p, floating_dtypes[t], 3, x),
                                          MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX) |
                                              (muvox_aggregates)MUVOX_AGGREGATES_2(MUVOX_ABSMAX, MUVOX_SUM) << 8);

            doing("pool, simd %d, %s", (int)simds[v], name_of(floating_dtypes[t]));
            RUN(muvox_pool_forward, &op, simds[v], 1);
            assert_values("out", &sets, &op.out, out);
            assert_values("winners", &sets, &op.winners, rows);
            problem_free(&p);
        }
}
END_TEST

/* Column of 1, −3, 0 and −3 with gradients mean 4, max 10, absmax 100, sum 1000; and a set of one zero, whose sign is 0. */
START_TEST(known_gradient)
{
    const int64_t splits[] = {0, 4, 4, 5};
    const double  x[] = {1, -3, 0, -3, 0}, g[] = {4, 10, 100, 1000, NAN, NAN, NAN, NAN, 4, 10, 100, 1000};
    const double  grad_x[] = {1011, 901, 1001, 1001, 1014};
    muvox_simd    simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem    p = problem_of(splits, 3);
        muvox_pool op = outputs(&p, given_input(&p, MUVOX_F16, 1, x),
                                MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX) |
                                    (muvox_aggregates)MUVOX_AGGREGATES_2(MUVOX_ABSMAX, MUVOX_SUM) << 8);

        doing("pool, simd %d", (int)simds[v]);
        op.grad_out = given_input_per_set(&p, MUVOX_F16, 4, g);
        RUN(muvox_pool_forward, &op, simds[v], 1);
        RUN(muvox_pool_backward, &op, simds[v], 1);
        assert_values("grad_x", &p.sets, &op.grad_x, grad_x);
        problem_free(&p);
    }
}
END_TEST

/* Half sums are made in float: 4096 ones do not stick at 2048, and 40000 + 40000 − 40000 does not overflow. */
START_TEST(half_is_summed_in_float)
{
    problem      p = problem_make(UNIFORM, 1, 4096, 1), q = problem_make(UNIFORM, 1, 3, 1);
    const double big[] = {40000, 40000, -40000}, sum[] = {4096}, big_sum[] = {40000};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        const muvox_matrix ones = grid_input(&p, MUVOX_F16, 1, 1);
        muvox_pool         op = outputs(&p, ones, MUVOX_SUM);
        const muvox_sets   one = per_set(&p.sets);

        doing("pool, simd %d", (int)simds[v]);
        for (int64_t i = 0; i < 4096; i++) set_value(&ones, &p.sets, 0, i, 0, 1);
        RUN(muvox_pool_forward, &op, simds[v], 1);
        assert_values("sum", &one, &op.out, sum);
        op = outputs(&q, given_input(&q, MUVOX_F16, 1, big), MUVOX_SUM);
        RUN(muvox_pool_forward, &op, simds[v], 1);
        assert_values("sum", &one, &op.out, big_sum);
    }
    problem_free(&p);
    problem_free(&q);
}
END_TEST

static double loss(const void *descriptor, muvox_simd simd)
{
    const muvox_pool *op = descriptor;
    const muvox_sets  rows = per_set(&op->sets);

    RUN(muvox_pool_forward, op, simd, 1);
    return dot(&rows, &op->out, &op->grad_out);
}

START_TEST(gradient_by_finite_differences)
{
    const layout layouts[] = {UNIFORM, RAGGED, STRIDED};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int a = 0; a < AGGREGATE_CHOICES; a++) {
            if (!wanted()) continue;
            const pool_case  c = {layouts[_i], MUVOX_F64, 8, 5, aggregate_choices[a], false, false};
            problem          p;
            const muvox_pool op = make(&p, &c);

            name_case(&c, simds[v]);
            RUN(muvox_pool_forward, &op, simds[v], 1);
            RUN(muvox_pool_backward, &op, simds[v], 1);
            assert_gradient("grad_x", &p.sets, &op.x, &op.grad_x, loss, &op, simds[v]);
            problem_free(&p);
        }
}
END_TEST

#define WRONG(run, change, status, argument) REFUSES(pool, run, change, status, argument)

START_TEST(forward_refuses_wrong_arguments)
{
    const pool_case  c = {STRIDED, MUVOX_F32, 5, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX), false, false};
    problem          p;
    const muvox_pool good = make(&p, &c);

    WRONG(muvox_pool_forward, op.aggregates = 0, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_pool_forward, op.aggregates = 6, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_pool_forward, op.aggregates = 0x33, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_pool_forward, op.aggregates = 0x10, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_pool_forward, op.aggregates = MUVOX_MAX, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_pool_forward, op.x.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "x is int32");
    WRONG(muvox_pool_forward, op.x.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_pool_forward, op.x.rows++, MUVOX_BAD_SHAPE, "x has");
    WRONG(muvox_pool_forward, op.x.cols = 0, MUVOX_BAD_SHAPE, "x has");
    WRONG(muvox_pool_forward, op.x.data = NULL, MUVOX_BAD_ARGUMENT, "x is missing");
    WRONG(muvox_pool_forward, op.x.set_stride = -1, MUVOX_BAD_ARGUMENT, "x has");
    WRONG(muvox_pool_forward, op.out.rows--, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_pool_forward, op.out.cols++, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_pool_forward, op.out.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_pool_forward, op.out.row_stride = 7, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_pool_forward, op.winners.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "winners");
    WRONG(muvox_pool_forward, op.winners.cols--, MUVOX_BAD_SHAPE, "winners");
    problem_free(&p);
}
END_TEST

START_TEST(backward_refuses_wrong_arguments)
{
    const pool_case c = {STRIDED, MUVOX_F32, 5, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX), false, false};
    problem         p;
    muvox_pool      good = make(&p, &c);

    RUN(muvox_pool_forward, &good, MUVOX_SIMD_AUTO, 1);
    freeze(&p);
    good.grad_x = output(&p, MUVOX_F32, 4);
    WRONG(muvox_pool_backward, op.aggregates = 0, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_pool_backward, op.winners.data = NULL, MUVOX_BAD_ARGUMENT, "winners");
    WRONG(muvox_pool_backward, op.grad_out.data = NULL, MUVOX_BAD_ARGUMENT, "grad_out");
    WRONG(muvox_pool_backward, op.grad_out.rows--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_pool_backward, op.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_pool_backward, op.grad_out.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "grad_out");
    WRONG(muvox_pool_backward, op.grad_x.cols++, MUVOX_BAD_SHAPE, "grad_x");
    WRONG(muvox_pool_backward, op.grad_x.rows--, MUVOX_BAD_SHAPE, "grad_x");
    WRONG(muvox_pool_backward, op.grad_x.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_x");
    WRONG(muvox_pool_backward, op.grad_x.row_stride = 3, MUVOX_BAD_ARGUMENT, "grad_x");
    WRONG(muvox_pool_backward, op.grad_x.set_stride = 0, MUVOX_BAD_ARGUMENT, "grad_x");
    problem_free(&p);
}
END_TEST

Suite *pool_suite(void)
{
    Suite *const suite = suite_create("pool");
    TCase *const tests = tcase_create("pool");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    tcase_add_test(tests, known_answers);
    tcase_add_test(tests, known_gradient);
    tcase_add_test(tests, half_is_summed_in_float);
    tcase_add_loop_test(tests, gradient_by_finite_differences, 0, 3);
    tcase_add_test(tests, forward_refuses_wrong_arguments);
    tcase_add_test(tests, backward_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
