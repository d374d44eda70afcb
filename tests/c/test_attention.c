/* attention: exact answers, every kernel against the plain one, determinism, gradients, refusals. */
#include "problem.h"

#include <math.h>

typedef struct {
    layout      layout;
    muvox_dtype dtype;
    int64_t     M, A, C;
    double      scale;
    bool        with_lse; /* lse has a gradient too */
} attention_case;

static muvox_attention outputs(problem *p, muvox_matrix q, muvox_matrix k, muvox_matrix v, double scale)
{
    return (muvox_attention){
        .struct_size = sizeof(muvox_attention),
        .sets = p->sets,
        .scale = scale,
        .q = q,
        .k = k,
        .v = v,
        .out = output(p, q.dtype, v.cols),
        .lse = output(p, wide(q.dtype), 1),
        .grad_q = output(p, q.dtype, q.cols),
        .grad_k = output(p, q.dtype, q.cols),
        .grad_v = output(p, q.dtype, v.cols),
    };
}

/* The same problem for the same case, each time it is called. */
static muvox_attention make(problem *p, const attention_case *c)
{
    muvox_matrix    q, k, v, grad_out, grad_lse;
    muvox_attention op;

    *p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 10000 + c->A * 100 + c->C));
    q = random_input(p, c->dtype, c->A, 2);
    k = random_input(p, c->dtype, c->A, 2);
    v = random_input(p, c->dtype, c->C, 2);
    grad_out = random_input(p, c->dtype, c->C, 1);
    grad_lse = random_input(p, wide(c->dtype), 1, 1);
    op = outputs(p, q, k, v, c->scale);
    op.grad_out = grad_out;
    if (c->with_lse) op.grad_lse = grad_lse;
    return op;
}

static void assert_all_gaps_untouched(const problem *p, const muvox_attention *op)
{
    assert_gaps_untouched("out", p, &p->sets, &op->out);
    assert_gaps_untouched("lse", p, &p->sets, &op->lse);
    assert_gaps_untouched("grad_q", p, &p->sets, &op->grad_q);
    assert_gaps_untouched("grad_k", p, &p->sets, &op->grad_k);
    assert_gaps_untouched("grad_v", p, &p->sets, &op->grad_v);
}

static void assert_same_gradients(const char *name, const muvox_sets *sets, const muvox_attention *got,
                                  const muvox_attention *expected)
{
    if (got->grad_q.data) assert_same(name, sets, &got->grad_q, &expected->grad_q);
    if (got->grad_k.data) assert_same(name, sets, &got->grad_k, &expected->grad_k);
    if (got->grad_v.data) assert_same(name, sets, &got->grad_v, &expected->grad_v);
}

static muvox_attention results_alone(const muvox_attention *batch, const muvox_sets *sets, int64_t s)
{
    muvox_attention op = *batch;

    op.out = output_alone(batch->out, sets, s);
    op.lse = output_alone(batch->lse, sets, s);
    op.grad_q = output_alone(batch->grad_q, sets, s);
    op.grad_k = output_alone(batch->grad_k, sets, s);
    op.grad_v = output_alone(batch->grad_v, sets, s);
    return op;
}

/* Every set gives alone what it gives among others, bit for bit. */
static void assert_sets_independent(const problem *p, const muvox_attention *batch, muvox_simd simd, int threads)
{
    for (int64_t s = 0; s < p->sets.count; s++) {
        problem         q = {.sets = sets_alone(&p->sets, s)};
        muvox_attention op, expected;

        if (!q.sets.rows) continue;
        expected = results_alone(batch, &p->sets, s);
        op = outputs(&q, matrix_alone(batch->q, &p->sets, s), matrix_alone(batch->k, &p->sets, s),
                     matrix_alone(batch->v, &p->sets, s), batch->scale);
        op.grad_out = matrix_alone(batch->grad_out, &p->sets, s);
        if (batch->grad_lse.data) op.grad_lse = matrix_alone(batch->grad_lse, &p->sets, s);
        RUN(muvox_attention_forward, &op, simd, threads);
        RUN(muvox_attention_backward, &op, simd, threads);
        assert_same("out of a set alone", &q.sets, &op.out, &expected.out);
        assert_same("lse of a set alone", &q.sets, &op.lse, &expected.lse);
        assert_same_gradients("gradient of a set alone", &q.sets, &op, &expected);
        problem_free(&q);
    }
}

/* Each gradient has the same bits when some are not asked for: `wanted` has a bit for each of q, k and v. */
static void assert_some_gradients(const attention_case *c, const muvox_attention *all, muvox_simd simd, int threads)
{
    for (unsigned wanted = 0; wanted < 7; wanted++) {
        problem         q;
        muvox_attention op = make(&q, c);

        op.out = all->out;
        op.lse = all->lse;
        if (!(wanted & 1)) op.grad_q.data = NULL;
        if (!(wanted & 2)) op.grad_k.data = NULL;
        if (!(wanted & 4)) op.grad_v.data = NULL;
        RUN(muvox_attention_backward, &op, simd, threads);
        assert_same_gradients("gradient without the others", &q.sets, &op, all);
        problem_free(&q);
    }
}

static void compare(const attention_case *c, muvox_simd simd, const muvox_attention *expected)
{
    problem         p, again;
    muvox_attention op = make(&p, c);
    const double    tolerance = 2 * tolerance_of(c->dtype);

    RUN(muvox_attention_forward, &op, simd, 1);
    assert_close("out", &p.sets, &op.out, &expected->out, tolerance, 1);
    assert_close("lse", &p.sets, &op.lse, &expected->lse, 2 * tolerance_of(wide(c->dtype)), 1);
    op.out = expected->out;
    op.lse = expected->lse;
    RUN(muvox_attention_backward, &op, simd, 1);
    assert_close("grad_q", &p.sets, &op.grad_q, &expected->grad_q, tolerance, 1);
    assert_close("grad_k", &p.sets, &op.grad_k, &expected->grad_k, tolerance, 1);
    assert_close("grad_v", &p.sets, &op.grad_v, &expected->grad_v, tolerance, 1);
    problem_free(&p);

    op = make(&p, c);
    RUN(muvox_attention_forward, &op, simd, 1);
    RUN(muvox_attention_backward, &op, simd, 1);
    assert_all_gaps_untouched(&p, &op);
    assert_some_gradients(c, &op, simd, 1);
    if (c->M <= 17) assert_some_gradients(c, &op, simd, 3);
    if (c->layout != SHARED) assert_sets_independent(&p, &op, simd, 1 + (int)(c->M % 2));
    for (int threads = 1; threads <= 3; threads++) {
        const muvox_attention repeated = make(&again, c);

        RUN(muvox_attention_forward, &repeated, simd, threads);
        RUN(muvox_attention_backward, &repeated, simd, threads);
        assert_same_outputs(&again, &p);
        problem_free(&again);
    }
    problem_free(&p);
}

static void name_case(const attention_case *c, muvox_simd simd)
{
    doing("attention simd %d, %s, layout %d, M %d, A %d, C %d, scale %g, with lse %d", (int)simd, name_of(c->dtype),
          (int)c->layout, (int)c->M, (int)c->A, (int)c->C, c->scale, c->with_lse);
}

static void try_case(const attention_case *c)
{
    muvox_simd            simds[4];
    problem               p;
    const muvox_attention op = make(&p, c);

    name_case(c, MUVOX_SIMD_REFERENCE);
    RUN(muvox_attention_forward, &op, MUVOX_SIMD_REFERENCE, 1);
    RUN(muvox_attention_backward, &op, MUVOX_SIMD_REFERENCE, 1);
    assert_all_gaps_untouched(&p, &op);
    for (int n = all_simds(simds), v = 1; v < n; v++) {
        name_case(c, simds[v]);
        compare(c, simds[v], &op);
    }
    problem_free(&p);
}

/* Round the edges of tiles; the test's number gives dtype and layout, the rest goes round so that all pairs meet. */
START_TEST(every_kernel_equals_the_reference)
{
    const int64_t sizes[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130}, widths[] = {1, 5, 8, 12, 22, 48, 64};

    for (int m = 0; m < COUNT(sizes); m++)
        for (int turn = 0; turn < 2; turn++) {
            attention_case c = {(layout)(_i / 4),
                                floating_dtypes[_i % 4],
                                sizes[m],
                                widths[(_i + m + 3 * turn) % COUNT(widths)],
                                widths[(_i + 3 * m + turn) % COUNT(widths)],
                                turn ? NAN : 0.3,
                                (_i + m + turn) % 2};

            while (c.A > 1 && c.M * c.M * c.A * (c.A + c.C) > 60000) c.A /= 2; /* the plain one takes its time */
            if (c.M * c.M * c.A * (c.A + c.C) > 60000) c.C = 1 + c.C % 22;
            try_case(&c);
        }
}
END_TEST

/* Both widths large with more than one tile. */
START_TEST(wide_and_long)
{
    const attention_case c = {UNIFORM, floating_dtypes[_i], 67, 24, 48, NAN, true};

    try_case(&c);
}
END_TEST

/* One row sees itself alone; equal keys share alike; scores of ln 3 and 0 make weights of 3/4 and 1/4. */
START_TEST(known_answers)
{
    const int64_t splits[] = {0, 1, 1, 3, 5};
    const double  q[] = {3, 1, 2, 1, 0}, k[] = {2, 5, 5, log(3), 0}, v[] = {7, 8, 1, 2, 3, 4, 4, 0, 8, 4};
    const double  out[] = {7, 8, 2, 3, 2, 3, 5, 1, 6, 2}, lse[] = {6, 5 + log(2), 10 + log(2), log(4), log(2)};
    muvox_simd    simds[4];

    for (int n = all_simds(simds), a = 0; a < n; a++)
        for (int t = 2; t < 4; t++) {
            const muvox_dtype     dtype = floating_dtypes[t];
            problem               p = {.sets = {splits, 4, 5, 0}};
            const muvox_attention op = outputs(&p, given_input(&p, dtype, 1, q), given_input(&p, dtype, 1, k),
                                               given_input(&p, dtype, 2, v), 1);

            doing("attention, simd %d, %s", (int)simds[a], name_of(dtype));
            RUN(muvox_attention_forward, &op, simds[a], 1);
            for (int i = 0, at = 0; i < 5; i++) {
                const double error = t == 2 ? 2e-6 : 1e-14, got = element(op.lse.data, op.lse.dtype, i);

                ck_assert_msg(fabs(got - lse[i]) <= error * 11, "%s: lse of row %d is %.17g", done(), i, got);
                for (int c = 0; c < 2; c++, at++) {
                    const double result = element(op.out.data, dtype, at);

                    ck_assert_msg(fabs(result - out[at]) <= error * 8, "%s: out of row %d is %.17g", done(), i, result);
                }
            }
            problem_free(&p);
        }
}
END_TEST

/* The default scale is 1/√A, and a scale of 0 makes the mean. */
START_TEST(scale)
{
    muvox_simd simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        const attention_case c = {UNIFORM, MUVOX_F64, 17, 16, 3, NAN, false};
        attention_case       given = c, zero = c;
        problem              p, q, r;
        muvox_attention      a, b, m;

        given.scale = 0.25;
        zero.scale = 0;
        a = make(&p, &c);
        b = make(&q, &given);
        m = make(&r, &zero);
        name_case(&c, simds[v]);
        RUN(muvox_attention_forward, &a, simds[v], 1);
        RUN(muvox_attention_forward, &b, simds[v], 1);
        RUN(muvox_attention_forward, &m, simds[v], 1);
        assert_same_outputs(&p, &q);
        for (int64_t i = 0; i < 17; i++) {
            double mean = 0;

            for (int64_t j = 0; j < 17; j++) mean += value_at(&m.v, &r.sets, 0, j, 0) / 17;
            ck_assert_double_eq_tol(result_at(&m.out, &r.sets, 0, i, 0), mean, 1e-14);
            ck_assert_double_eq_tol(result_at(&m.lse, &r.sets, 0, i, 0), log(17), 1e-14);
        }
        problem_free(&p);
        problem_free(&q);
        problem_free(&r);
    }
}
END_TEST

/* Scores of ±10⁴ overflow exp: the running maximum takes them. One of −inf is no key at all; with none left, out is 0. */
START_TEST(extreme_scores)
{
    const int64_t splits[] = {0, 2, 4, 6};
    const double  q[] = {100, -100, 1, 1, 1, 1}, k[] = {100, 99, 0, -INFINITY, -INFINITY, -INFINITY};
    const double  v[] = {2, 6, 3, 9, 5, 7}, g[] = {1, 1, 1, 1, 1, 1};
    const double  out[] = {2, 6, 3, 3, 0, 0}, lse[] = {10000, -9900, 0, 0, -INFINITY, -INFINITY},
                 grad_v[] = {1, 1, 2, 0, 0, 0};
    muvox_simd simds[4];

    for (int n = all_simds(simds), a = 0; a < n; a++)
        for (int t = 2; t < 4; t++) {
            const muvox_dtype dtype = floating_dtypes[t];
            problem           p = {.sets = {splits, 3, 6, 0}};
            muvox_attention   op = outputs(&p, given_input(&p, dtype, 1, q), given_input(&p, dtype, 1, k),
                                           given_input(&p, dtype, 1, v), 1);

            doing("attention, simd %d, %s", (int)simds[a], name_of(dtype));
            op.grad_out = given_input(&p, dtype, 1, g);
            RUN(muvox_attention_forward, &op, simds[a], 1);
            RUN(muvox_attention_backward, &op, simds[a], 1);
            assert_values("out", &p.sets, &op.out, out);
            assert_values("lse", &p.sets, &op.lse, lse);
            assert_values("grad_v", &p.sets, &op.grad_v, grad_v);
            problem_free(&p);
        }
}
END_TEST

/* NaN in a value reaches its column of its own set, in a key all of its set, in a query its own row. */
START_TEST(nan_stays_where_it_is)
{
    const double k[] = {1, 2, 3, NAN, 1, 2}, q[] = {1, 2, 1, 2, NAN, 2};
    const double v[] = {1, NAN, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2};
    const bool   nan[] = {false, true, false, true, true, true, true, true, true, true, false, false};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), a = 0; a < n; a++) {
        problem               p = problem_make(UNIFORM, 3, 2, 1);
        const muvox_attention op = outputs(&p, given_input(&p, MUVOX_F32, 1, q), given_input(&p, MUVOX_F32, 1, k),
                                           given_input(&p, MUVOX_F32, 2, v), 1);

        doing("attention, simd %d", (int)simds[a]);
        RUN(muvox_attention_forward, &op, simds[a], 1);
        for (int at = 0; at < COUNT(nan); at++) {
            const double out = result_at(&op.out, &p.sets, at / 4, at / 2 % 2, at % 2);

            ck_assert_msg(isnan(out) == nan[at], "%s: out of row %d, column %d is %g", done(), at / 2, at % 2, out);
        }
        problem_free(&p);
    }
}
END_TEST

static double loss(const void *descriptor, muvox_simd simd)
{
    const muvox_attention *op = descriptor;

    RUN(muvox_attention_forward, op, simd, 1);
    return dot(&op->sets, &op->out, &op->grad_out) + (op->grad_lse.data ? dot(&op->sets, &op->lse, &op->grad_lse) : 0);
}

/* With and without the gradient of lse; q and k are unlike, so that a transposed gradient fails. */
START_TEST(gradients_by_finite_differences)
{
    const layout layouts[] = {UNIFORM, RAGGED, STRIDED};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int with_lse = 0; with_lse < 2; with_lse++) {
            const attention_case  c = {layouts[_i], MUVOX_F64, 8, 3, 5, 0.7, with_lse};
            problem               p;
            const muvox_attention op = make(&p, &c);

            name_case(&c, simds[v]);
            RUN(muvox_attention_forward, &op, simds[v], 1);
            RUN(muvox_attention_backward, &op, simds[v], 1);
            assert_gradient("grad_q", &p.sets, &op.q, &op.grad_q, loss, &op, simds[v]);
            assert_gradient("grad_k", &p.sets, &op.k, &op.grad_k, loss, &op, simds[v]);
            assert_gradient("grad_v", &p.sets, &op.v, &op.grad_v, loss, &op, simds[v]);
            problem_free(&p);
        }
}
END_TEST

#define WRONG(run, change, status, argument) REFUSES(attention, run, change, status, argument)

START_TEST(forward_refuses_wrong_arguments)
{
    const attention_case  c = {STRIDED, MUVOX_F32, 5, 3, 4, NAN, true};
    problem               p;
    const muvox_attention good = make(&p, &c);

    WRONG(muvox_attention_forward, op.scale = INFINITY, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(muvox_attention_forward, op.scale = -INFINITY, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(muvox_attention_forward, op.q.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "q is int32");
    WRONG(muvox_attention_forward, op.k.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "k is half and q is float");
    WRONG(muvox_attention_forward, op.v.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "v is double and q is float");
    WRONG(muvox_attention_forward, op.q.dtype = op.k.dtype = op.v.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_attention_forward, op.q.rows++, MUVOX_BAD_SHAPE, "q has");
    WRONG(muvox_attention_forward, op.q.cols = 0, MUVOX_BAD_SHAPE, "q has");
    WRONG(muvox_attention_forward, op.q.data = NULL, MUVOX_BAD_ARGUMENT, "q is missing");
    WRONG(muvox_attention_forward, op.q.row_stride = -1, MUVOX_BAD_ARGUMENT, "q has");
    WRONG(muvox_attention_forward, op.k.rows--, MUVOX_BAD_SHAPE, "k has");
    WRONG(muvox_attention_forward, op.k.cols++, MUVOX_BAD_SHAPE, "k has");
    WRONG(muvox_attention_forward, op.k.data = NULL, MUVOX_BAD_ARGUMENT, "k is missing");
    WRONG(muvox_attention_forward, op.k.set_stride = -1, MUVOX_BAD_ARGUMENT, "k has");
    WRONG(muvox_attention_forward, op.v.rows--, MUVOX_BAD_SHAPE, "v has");
    WRONG(muvox_attention_forward, op.v.cols = 0, MUVOX_BAD_SHAPE, "v has");
    WRONG(muvox_attention_forward, op.v.data = NULL, MUVOX_BAD_ARGUMENT, "v is missing");
    WRONG(muvox_attention_forward, op.out.cols++, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_attention_forward, op.out.rows--, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_attention_forward, op.out.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_attention_forward, op.out.row_stride = 3, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_attention_forward, op.out.set_stride = 0, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_attention_forward, op.lse.cols++, MUVOX_BAD_SHAPE, "lse");
    WRONG(muvox_attention_forward, op.lse.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "lse");
    problem_free(&p);
}
END_TEST

START_TEST(backward_refuses_wrong_arguments)
{
    const attention_case c = {STRIDED, MUVOX_F32, 5, 3, 4, NAN, true};
    problem              p;
    muvox_attention      good = make(&p, &c);

    RUN(muvox_attention_forward, &good, MUVOX_SIMD_AUTO, 1);
    freeze(&p);
    good.grad_q = output(&p, MUVOX_F32, 3);
    good.grad_k = output(&p, MUVOX_F32, 3);
    good.grad_v = output(&p, MUVOX_F32, 4);
    WRONG(muvox_attention_backward, op.scale = INFINITY, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(muvox_attention_backward, op.out.data = NULL, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_attention_backward, op.lse.data = NULL, MUVOX_BAD_ARGUMENT, "lse");
    WRONG(muvox_attention_backward, op.lse.rows++, MUVOX_BAD_SHAPE, "lse");
    WRONG(muvox_attention_backward, op.grad_out.data = NULL, MUVOX_BAD_ARGUMENT, "grad_out");
    WRONG(muvox_attention_backward, op.grad_out.rows++, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_attention_backward, op.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_attention_backward, op.grad_out.dtype = MUVOX_BF16, MUVOX_BAD_DTYPE, "grad_out");
    WRONG(muvox_attention_backward, op.grad_lse.cols++, MUVOX_BAD_SHAPE, "grad_lse");
    WRONG(muvox_attention_backward, op.grad_lse.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "grad_lse");
    WRONG(muvox_attention_backward, op.grad_q.cols++, MUVOX_BAD_SHAPE, "grad_q");
    WRONG(muvox_attention_backward, op.grad_q.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_q");
    WRONG(muvox_attention_backward, op.grad_k.rows--, MUVOX_BAD_SHAPE, "grad_k");
    WRONG(muvox_attention_backward, op.grad_k.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "grad_k");
    WRONG(muvox_attention_backward, op.grad_v.cols++, MUVOX_BAD_SHAPE, "grad_v");
    WRONG(muvox_attention_backward, op.grad_v.row_stride = 3, MUVOX_BAD_ARGUMENT, "grad_v");
    problem_free(&p);
}
END_TEST

Suite *attention_suite(void)
{
    Suite *const suite = suite_create("attention");
    TCase *const tests = tcase_create("attention");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    tcase_add_loop_test(tests, wide_and_long, 0, 4);
    tcase_add_test(tests, known_answers);
    tcase_add_test(tests, scale);
    tcase_add_test(tests, extreme_scores);
    tcase_add_test(tests, nan_stays_where_it_is);
    tcase_add_loop_test(tests, gradients_by_finite_differences, 0, 3);
    tcase_add_test(tests, forward_refuses_wrong_arguments);
    tcase_add_test(tests, backward_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
