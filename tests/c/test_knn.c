/* knn: exact answers, order, every kernel against the plain one, determinism, gradient, refusals. */
#include "problem.h"

#include <math.h>
#include <stdlib.h>

typedef enum { RANDOM, TIES, SPECIAL } values; /* SPECIAL: NaN, infinities, overflow and denormals among ties */

typedef struct {
    layout      layout;
    muvox_dtype dtype;
    int64_t     M, k, d;
    values      values;
} knn_case;

static void spoil(problem *p, const muvox_matrix *m)
{
    const double special[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, 1e-300, -0.0};

    for (int64_t s = 0; s < p->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&p->sets, s); i++)
            if (random_below(p, 4) == 0)
                set_value(m, &p->sets, s, i, random_below(p, m->cols), special[random_below(p, COUNT(special))]);
}

static muvox_knn outputs(problem *p, muvox_matrix coords, int64_t k)
{
    return (muvox_knn){
        .struct_size = sizeof(muvox_knn),
        .sets = p->sets,
        .k = k,
        .coords = coords,
        .neighbours = output(p, MUVOX_I32, k),
        .distance2 = output(p, wide(coords.dtype), k),
        .counts = output(p, MUVOX_I32, 1),
        .grad_coords = output(p, coords.dtype, coords.cols),
    };
}

/* The same problem for the same case, each time it is called. */
static muvox_knn make(problem *p, const knn_case *c)
{
    muvox_matrix coords, g;
    muvox_knn    op;

    *p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 1000 + c->k));
    coords = c->values == RANDOM ? random_input(p, c->dtype, c->d, 2) : grid_input(p, c->dtype, c->d, 3);
    if (c->values == SPECIAL) spoil(p, &coords);
    g = random_input(p, wide(c->dtype), c->k, 1);
    for (int64_t s = 0; s < p->sets.count; s++) /* nothing may come through unfilled places */
        for (int64_t i = 0; i < set_rows(&p->sets, s); i++)
            for (int64_t r = set_rows(&p->sets, s); r < c->k; r++) set_value(&g, &p->sets, s, i, r, NAN);
    op = outputs(p, coords, c->k);
    op.grad_distance2 = g;
    return op;
}

static double direct_distance2(const muvox_knn *op, int64_t s, int64_t i, int64_t j)
{
    double in_double = 0;
    float  in_float = 0;

    for (int64_t c = 0; c < op->coords.cols; c++) {
        const double a = value_at(&op->coords, &op->sets, s, i, c), b = value_at(&op->coords, &op->sets, s, j, c);
        const float  difference = (float)a - (float)b;

        in_double = fma(a - b, a - b, in_double);
        in_float = fmaf(difference, difference, in_float);
    }
    return op->coords.dtype == MUVOX_F64 ? in_double : in_float;
}

static bool before(double a, int64_t i, double b, int64_t j)
{
    if (isnan(a) != isnan(b)) return isnan(b);
    return a < b || ((a == b || isnan(a)) && i < j);
}

/* Row i of set s as knn.h defines it, by a count of who ranks before whom. */
static void verify_row(const muvox_knn *op, int64_t s, int64_t i, double *distance)
{
    const int64_t M = set_rows(&op->sets, s), valid = op->k < M ? op->k : M;

    for (int64_t j = 0; j < M; j++) distance[j] = direct_distance2(op, s, i, j);
    if ((int64_t)result_at(&op->counts, &op->sets, s, i, 0) != valid)
        ck_abort_msg("%s: count of row %d", done(), (int)i);
    for (int64_t r = 0; r < op->k; r++) {
        const int64_t j = (int64_t)result_at(&op->neighbours, &op->sets, s, i, r);
        const double  got = result_at(&op->distance2, &op->sets, s, i, r);
        int64_t       rank = 0;

        if (r >= valid ? j != -1 || got != INFINITY : j < 0 || j >= M)
            ck_abort_msg("%s: place %d of row %d holds %d at %g", done(), (int)r, (int)i, (int)j, got);
        if (r >= valid) continue;
        if (got != distance[j] && !(isnan(got) && isnan(distance[j])))
            ck_abort_msg("%s: distance² %.17g of rows %d and %d, not %.17g", done(), got, (int)i, (int)j, distance[j]);
        for (int64_t other = 0; other < M; other++) rank += before(distance[other], other, got, j);
        if (rank != r)
            ck_abort_msg("%s: row %d has rank %d among the neighbours of %d, got place %d", done(), (int)j, (int)rank,
                         (int)i, (int)r);
    }
}

static void verify(const muvox_knn *op)
{
    double *const distance = malloc((size_t)(op->sets.rows + 1) * sizeof *distance);

    ck_assert_ptr_nonnull(distance);
    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++) verify_row(op, s, i, distance);
    free(distance);
}

static void assert_knn_gaps(const problem *p, const muvox_knn *op)
{
    assert_gaps_untouched("neighbours", p, &p->sets, &op->neighbours);
    assert_gaps_untouched("distance2", p, &p->sets, &op->distance2);
    assert_gaps_untouched("counts", p, &p->sets, &op->counts);
    assert_gaps_untouched("grad_coords", p, &p->sets, &op->grad_coords);
}

/* Every set gives alone what it gives among others, bit for bit. */
static void assert_sets_independent(problem *p, const muvox_knn *batch, muvox_simd simd)
{
    for (int64_t s = 0; s < p->sets.count; s++) {
        const muvox_sets alone = sets_alone(&p->sets, s);
        muvox_knn        op = *batch;
        problem          q = {.sets = alone};
        muvox_output     expected[3];

        if (!alone.rows) continue;
        expected[0] = output_alone(batch->neighbours, &p->sets, s);
        expected[1] = output_alone(batch->distance2, &p->sets, s);
        expected[2] = output_alone(batch->grad_coords, &p->sets, s);
        op = outputs(&q, matrix_alone(batch->coords, &p->sets, s), batch->k);
        op.grad_distance2 = matrix_alone(batch->grad_distance2, &p->sets, s);
        RUN(muvox_knn_forward, &op, simd, 2);
        RUN(muvox_knn_backward, &op, simd, 2);
        assert_same("neighbours of a set alone", &alone, &op.neighbours, &expected[0]);
        assert_same("distance2 of a set alone", &alone, &op.distance2, &expected[1]);
        assert_same("grad_coords of a set alone", &alone, &op.grad_coords, &expected[2]);
        problem_free(&q);
    }
}

static void compare(const knn_case *c, muvox_simd simd, const muvox_knn *expected)
{
    problem   p, again;
    muvox_knn op = make(&p, c);

    RUN(muvox_knn_forward, &op, simd, 1);
    RUN(muvox_knn_backward, &op, simd, 1);
    assert_same("neighbours", &p.sets, &op.neighbours, &expected->neighbours);
    assert_same("distance2", &p.sets, &op.distance2, &expected->distance2);
    assert_same("counts", &p.sets, &op.counts, &expected->counts);
    if (c->values != SPECIAL)
        assert_close("grad_coords", &p.sets, &op.grad_coords, &expected->grad_coords, tolerance_of(c->dtype), 0);
    assert_knn_gaps(&p, &op);
    for (int threads = 1; threads <= 3; threads++) {
        const muvox_knn repeated = make(&again, c);

        RUN(muvox_knn_forward, &repeated, simd, threads);
        RUN(muvox_knn_backward, &repeated, simd, threads);
        assert_same_outputs(&again, &p);
        problem_free(&again);
    }
    if (c->layout != SHARED) assert_sets_independent(&p, &op, simd);
    problem_free(&p);
}

static void try_case(const knn_case *c)
{
    muvox_simd simds[4];
    problem    p;
    muvox_knn  op = make(&p, c);

    doing("knn reference, %s, layout %d, M %d, k %d, d %d, values %d", name_of(c->dtype), (int)c->layout, (int)c->M,
          (int)c->k, (int)c->d, (int)c->values);
    RUN(muvox_knn_forward, &op, MUVOX_SIMD_REFERENCE, 1);
    RUN(muvox_knn_backward, &op, MUVOX_SIMD_REFERENCE, 1);
    verify(&op);
    assert_knn_gaps(&p, &op);
    for (int n = all_simds(simds), v = 1; v < n; v++) {
        doing("knn simd %d, %s, layout %d, M %d, k %d, d %d, values %d", (int)simds[v], name_of(c->dtype),
              (int)c->layout, (int)c->M, (int)c->k, (int)c->d, (int)c->values);
        compare(c, simds[v], &op);
    }
    problem_free(&p);
}

/* Round the edges of tiles; the test's number gives dtype and layout, the rest goes round so that all pairs meet. */
START_TEST(every_kernel_equals_the_reference)
{
    const int64_t sizes[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130};

    for (int m = 0; m < COUNT(sizes); m++) {
        const int64_t M = sizes[m], ks[] = {1, 8, 25, 33, M ? M : 2, M + 3, 300};

        for (int turn = 0; turn < 2; turn++) {
            knn_case c = {(layout)(_i / 4),
                          floating_dtypes[_i % 4],
                          M,
                          ks[(_i + 3 * m + 4 * turn) % COUNT(ks)],
                          1 + (_i + m + 5 * turn) % 9,
                          turn ? TIES : RANDOM};

            if (M * c.k > 4000) c.d = 1; /* the plain one takes its time */
            if (wanted()) try_case(&c);
        }
    }
}
END_TEST

START_TEST(nan_infinity_overflow_and_denormals_rank_as_promised)
{
    const int64_t sizes[] = {2, 17, 66};

    for (int m = 0; m < COUNT(sizes); m++)
        for (int64_t d = 1; d <= 3; d++) {
            const knn_case c = {(layout)(_i / 4), floating_dtypes[_i % 4], sizes[m], d == 2 ? sizes[m] + 1 : 8, d,
                                SPECIAL};

            if (wanted()) try_case(&c);
        }
}
END_TEST

/* Three sets by hand: ties and k > M; a NaN row; an infinite row and a distance that overflows. */
START_TEST(known_answers)
{
    const double x[] = {0, 3, 1, 3, 0, NAN, 2, 2, 0, INFINITY, 1, 2e38};
    const double neighbours[] = {0, 2, 1, 3, -1, 1, 3, 2, 0, -1, 2, 0, 1, 3, -1, 1, 3, 2, 0, -1,
                                 0, 2, 3, 1, -1, 0, 1, 2, 3, -1, 2, 3, 0, 1, -1, 2, 3, 0, 1, -1,
                                 0, 2, 1, 3, -1, 0, 2, 3, 1, -1, 2, 0, 1, 3, -1, 3, 0, 1, 2, -1};
    const double inf = INFINITY;
    const double distance2[] = {0,   1,   9,   9,   inf, 0, 0, 4,   9,   inf, 0,   1,   4,   4,   inf,
                                0,   0,   4,   9,   inf, 0, 4, 4,   NAN, inf, NAN, NAN, NAN, NAN, inf,
                                0,   0,   4,   NAN, inf, 0, 0, 4,   NAN, inf, 0,   1,   inf, inf, inf,
                                inf, inf, inf, NAN, inf, 0, 1, inf, inf, inf, 0,   inf, inf, inf, inf};
    const double counts[] = {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem         p = problem_make(UNIFORM, 3, 4, 1);
        const muvox_knn op = outputs(&p, given_input(&p, MUVOX_F32, 1, x), 5);

        doing("knn, simd %d", (int)simds[v]);
        RUN(muvox_knn_forward, &op, simds[v], 1);
        assert_values("neighbours", &p.sets, &op.neighbours, neighbours);
        assert_values("distance2", &p.sets, &op.distance2, distance2);
        assert_values("counts", &p.sets, &op.counts, counts);
        problem_free(&p);
    }
}
END_TEST

/* x = 0, 3; k = 2: L = Σ g d², d² = 9 for both: grad = 2 g (x_i − x_j) once from each side. */
START_TEST(known_gradient)
{
    const double x[] = {0, 3}, g[] = {100, 2, 100, 5}, grad[] = {-42, 42};
    problem      p = problem_make(UNIFORM, 1, 2, 1);
    muvox_knn    op = outputs(&p, given_input(&p, floating_dtypes[_i], 1, x), 2);

    doing("knn, %s", name_of(floating_dtypes[_i]));
    op.grad_distance2 = given_input(&p, wide(floating_dtypes[_i]), 2, g);
    RUN(muvox_knn_forward, &op, MUVOX_SIMD_AUTO, 1);
    RUN(muvox_knn_backward, &op, MUVOX_SIMD_AUTO, 1);
    assert_values("grad_coords", &p.sets, &op.grad_coords, grad);
    problem_free(&p);
}
END_TEST

START_TEST(outputs_that_are_not_wanted_are_not_needed)
{
    const knn_case  c = {UNIFORM, MUVOX_F32, 17, 5, 3, RANDOM};
    problem         p, q, r;
    const muvox_knn all = make(&p, &c);
    muvox_knn       some = make(&q, &c), none = make(&r, &c);

    doing("knn with neighbours only");
    RUN(muvox_knn_forward, &all, MUVOX_SIMD_AUTO, 1);
    some.distance2 = some.counts = (muvox_output){0};
    RUN(muvox_knn_forward, &some, MUVOX_SIMD_AUTO, 1);
    assert_same("neighbours", &p.sets, &some.neighbours, &all.neighbours);
    none.neighbours = none.counts = (muvox_output){0};
    RUN(muvox_knn_forward, &none, MUVOX_SIMD_AUTO, 1);
    assert_same("distance2", &p.sets, &none.distance2, &all.distance2);
    problem_free(&p);
    problem_free(&q);
    problem_free(&r);
}
END_TEST

static double loss(const void *descriptor, muvox_simd simd)
{
    const muvox_knn *op = descriptor;

    RUN(muvox_knn_forward, op, simd, 1);
    return dot(&op->sets, &op->distance2, &op->grad_distance2);
}

/* k below the size of the larger sets only; elsewhere g is finite and the unfilled distances do not move. */
START_TEST(gradient_by_finite_differences)
{
    const layout layouts[] = {UNIFORM, RAGGED, STRIDED};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem   p = problem_make(layouts[_i], 2, 9, 5);
        muvox_knn op = outputs(&p, random_input(&p, MUVOX_F64, 3, 1), 5);

        doing("knn gradient, simd %d, layout %d", (int)simds[v], (int)layouts[_i]);
        op.grad_distance2 = random_input(&p, MUVOX_F64, 5, 1);
        RUN(muvox_knn_forward, &op, simds[v], 1);
        RUN(muvox_knn_backward, &op, simds[v], 1);
        assert_gradient("grad_coords", &p.sets, &op.coords, &op.grad_coords, loss, &op, simds[v]);
        problem_free(&p);
    }
}
END_TEST

#define WRONG(run, change, status, argument) REFUSES(knn, run, change, status, argument)

START_TEST(forward_refuses_wrong_arguments)
{
    const knn_case  c = {STRIDED, MUVOX_F32, 5, 3, 2, RANDOM};
    problem         p;
    const muvox_knn good = make(&p, &c);

    WRONG(muvox_knn_forward, op.k = 0, MUVOX_BAD_ARGUMENT, "k is 0");
    WRONG(muvox_knn_forward, op.k = -1, MUVOX_BAD_ARGUMENT, "k is -1");
    WRONG(muvox_knn_forward, op.k = INT64_MAX, MUVOX_BAD_ARGUMENT, "k is 9");
    WRONG(muvox_knn_forward, op.k = 4, MUVOX_BAD_SHAPE, "neighbours");
    WRONG(muvox_knn_forward, op.coords.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "coords");
    WRONG(muvox_knn_forward, op.coords.dtype = (muvox_dtype)77, MUVOX_BAD_DTYPE, "coords");
    WRONG(muvox_knn_forward, op.coords.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "distance2");
    WRONG(muvox_knn_forward, op.coords.rows--, MUVOX_BAD_SHAPE, "coords");
    WRONG(muvox_knn_forward, op.coords.cols = 0, MUVOX_BAD_SHAPE, "coords");
    WRONG(muvox_knn_forward, op.coords.data = NULL, MUVOX_BAD_ARGUMENT, "coords");
    WRONG(muvox_knn_forward, op.coords.row_stride = -1, MUVOX_BAD_ARGUMENT, "coords");
    WRONG(muvox_knn_forward, op.coords.set_stride = -1, MUVOX_BAD_ARGUMENT, "coords");
    WRONG(muvox_knn_forward, op.neighbours.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "neighbours");
    WRONG(muvox_knn_forward, op.neighbours.rows++, MUVOX_BAD_SHAPE, "neighbours");
    WRONG(muvox_knn_forward, op.neighbours.row_stride = 2, MUVOX_BAD_ARGUMENT, "neighbours");
    WRONG(muvox_knn_forward, op.distance2.cols++, MUVOX_BAD_SHAPE, "distance2");
    WRONG(muvox_knn_forward, op.distance2.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "distance2");
    WRONG(muvox_knn_forward, op.counts.cols++, MUVOX_BAD_SHAPE, "counts");
    WRONG(muvox_knn_forward, op.counts.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "counts");
    WRONG(muvox_knn_forward, op.neighbours.set_stride = 0, MUVOX_BAD_ARGUMENT, "neighbours");
    problem_free(&p);
}
END_TEST

START_TEST(backward_refuses_wrong_arguments)
{
    const knn_case c = {STRIDED, MUVOX_F32, 5, 3, 2, RANDOM};
    problem        p;
    muvox_knn      good = make(&p, &c);
    int32_t *const first = good.neighbours.data;

    RUN(muvox_knn_forward, &good, MUVOX_SIMD_AUTO, 1);
    freeze(&p);
    good.grad_coords = output(&p, MUVOX_F32, 2);
    WRONG(muvox_knn_backward, op.k = 0, MUVOX_BAD_ARGUMENT, "k is 0");
    WRONG(muvox_knn_backward, op.neighbours.data = NULL, MUVOX_BAD_ARGUMENT, "neighbours");
    if (ON_CPU) WRONG(muvox_knn_backward, *first = 5, MUVOX_BAD_ARGUMENT, "neighbours");
    if (ON_CPU) WRONG(muvox_knn_backward, *first = -2, MUVOX_BAD_ARGUMENT, "neighbours");
    *first = 0;
    WRONG(muvox_knn_backward, op.grad_distance2.data = NULL, MUVOX_BAD_ARGUMENT, "grad_distance2");
    WRONG(muvox_knn_backward, op.grad_distance2.cols++, MUVOX_BAD_SHAPE, "grad_distance2");
    WRONG(muvox_knn_backward, op.grad_distance2.rows--, MUVOX_BAD_SHAPE, "grad_distance2");
    WRONG(muvox_knn_backward, op.grad_distance2.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "grad_distance2");
    WRONG(muvox_knn_backward, op.grad_coords.cols++, MUVOX_BAD_SHAPE, "grad_coords");
    WRONG(muvox_knn_backward, op.grad_coords.rows--, MUVOX_BAD_SHAPE, "grad_coords");
    WRONG(muvox_knn_backward, op.grad_coords.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_coords");
    WRONG(muvox_knn_backward, op.grad_coords.row_stride = 1, MUVOX_BAD_ARGUMENT, "grad_coords");
    problem_free(&p);
}
END_TEST

Suite *knn_suite(void)
{
    Suite *const suite = suite_create("knn");
    TCase *const tests = tcase_create("knn");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    tcase_add_loop_test(tests, nan_infinity_overflow_and_denormals_rank_as_promised, 0, 4 * LAYOUTS);
    tcase_add_test(tests, known_answers);
    tcase_add_loop_test(tests, known_gradient, 0, 4);
    tcase_add_test(tests, outputs_that_are_not_wanted_are_not_needed);
    tcase_add_loop_test(tests, gradient_by_finite_differences, 0, 3);
    tcase_add_test(tests, forward_refuses_wrong_arguments);
    tcase_add_test(tests, backward_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
