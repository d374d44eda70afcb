/* gravnet: exact answers, knn and aggregate in one, every kernel against the plain one, determinism, gradients, refusals. */
#include "problem.h"

#include <math.h>

typedef struct {
    layout           layout;
    muvox_dtype      coords, feats;
    int64_t          M, k, d, F;
    muvox_aggregates aggregates;
    bool             coincident; /* coordinates on a grid */
} gravnet_case;

static muvox_gravnet outputs(problem *p, muvox_matrix coords, muvox_matrix feats, int64_t k, double scale,
                             muvox_aggregates aggregates)
{
    muvox_gravnet op = {
        .struct_size = sizeof op,
        .sets = p->sets,
        .k = k,
        .scale = scale,
        .aggregates = aggregates,
        .coords = coords,
        .feats = feats,
        .out = output(p, feats.dtype, kinds(aggregates) * feats.cols),
        .neighbours = output(p, MUVOX_I32, k),
        .grad_coords = output(p, coords.dtype, coords.cols),
        .grad_feats = output(p, feats.dtype, feats.cols),
    };

    if (winner_kinds(aggregates))
        op.winners = output(p, k <= 254 ? MUVOX_U8 : MUVOX_I32, winner_kinds(aggregates) * feats.cols);
    return op;
}

/* The same problem for the same case, each time it is called. No weight underflows in float, for then float would see
 * ties where double sees none. */
static muvox_gravnet make(problem *p, const gravnet_case *c)
{
    muvox_matrix  coords, feats, g;
    muvox_gravnet op;

    *p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 1000 + c->k));
    coords = c->coincident ? grid_input(p, c->coords, c->d, 2) : random_input(p, c->coords, c->d, 0.5);
    feats = random_input(p, c->feats, c->F, 2);
    g = random_input(p, c->feats, kinds(c->aggregates) * c->F, 1);
    op = outputs(p, coords, feats, c->k, c->coincident ? 1 : 5, c->aggregates);
    op.grad_out = g;
    return op;
}

static double weight(const muvox_gravnet *op, int64_t s, int64_t i, int64_t j)
{
    double distance2 = 0;

    for (int64_t c = 0; c < op->coords.cols; c++) {
        const double difference = value_at(&op->coords, &op->sets, s, i, c) - value_at(&op->coords, &op->sets, s, j, c);

        distance2 += difference * difference;
    }
    return exp(-op->scale * distance2);
}

static double message(const void *descriptor, int64_t s, int64_t i, int64_t r, int64_t f)
{
    const muvox_gravnet *op = descriptor;
    const int64_t        j = (int64_t)result_at(&op->neighbours, &op->sets, s, i, r);

    return weight(op, s, i, j) * value_at(&op->feats, &op->sets, s, j, f);
}

static void assert_all_gaps_untouched(const problem *p, const muvox_gravnet *op)
{
    assert_gaps_untouched("out", p, &p->sets, &op->out);
    assert_gaps_untouched("neighbours", p, &p->sets, &op->neighbours);
    if (op->winners.data) assert_gaps_untouched("winners", p, &p->sets, &op->winners);
    assert_gaps_untouched("grad_coords", p, &p->sets, &op->grad_coords);
    assert_gaps_untouched("grad_feats", p, &p->sets, &op->grad_feats);
}

/* Every set gives alone what it gives among others, bit for bit. */
static void assert_sets_independent(const problem *p, const muvox_gravnet *batch, muvox_simd simd)
{
    for (int64_t s = 0; s < p->sets.count; s++) {
        problem       q = {.sets = sets_alone(&p->sets, s)};
        muvox_gravnet op;
        muvox_output  out, grad_coords, grad_feats;

        if (!q.sets.rows) continue;
        op = outputs(&q, matrix_alone(batch->coords, &p->sets, s), matrix_alone(batch->feats, &p->sets, s), batch->k,
                     batch->scale, batch->aggregates);
        op.grad_out = matrix_alone(batch->grad_out, &p->sets, s);
        RUN(muvox_gravnet_forward, &op, simd, 2);
        RUN(muvox_gravnet_backward, &op, simd, 2);
        out = output_alone(batch->out, &p->sets, s);
        grad_coords = output_alone(batch->grad_coords, &p->sets, s);
        grad_feats = output_alone(batch->grad_feats, &p->sets, s);
        assert_same("out of a set alone", &q.sets, &op.out, &out);
        assert_same("grad_coords of a set alone", &q.sets, &op.grad_coords, &grad_coords);
        assert_same("grad_feats of a set alone", &q.sets, &op.grad_feats, &grad_feats);
        problem_free(&q);
    }
}

/* The gradients have the same bits when only one is asked for. */
static void assert_single_gradients(const gravnet_case *c, const muvox_gravnet *both, muvox_simd simd)
{
    for (int which = 0; which < 2; which++) {
        problem       q;
        muvox_gravnet op = make(&q, c);

        op.neighbours = both->neighbours;
        op.winners = both->winners;
        *(which ? &op.grad_feats : &op.grad_coords) = (muvox_output){0};
        RUN(muvox_gravnet_backward, &op, simd, 1);
        if (which)
            assert_same("grad_coords alone", &q.sets, &op.grad_coords, &both->grad_coords);
        else
            assert_same("grad_feats alone", &q.sets, &op.grad_feats, &both->grad_feats);
        problem_free(&q);
    }
}

static double largest_gradient(const muvox_gravnet *op)
{
    double largest = 0;

    for (int64_t s = 0; s < op->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&op->sets, s); i++)
            for (int64_t col = 0; col < op->coords.cols; col++)
                largest = fmax(largest, fabs(result_at(&op->grad_coords, &op->sets, s, i, col)));
    return largest;
}

/* Rounding of grad_coords, relative to the largest. Two rows pull each other twice, once as i and once as j. In small sets
 * these pulls may cancel in every number: in one case here, of two rows and one feature, to a fiftieth. Each pull was
 * rounded for itself, by 2^-24 of it in each of the three products −2 scale w · dw · (x_i − x_j); that is added, and the parts
 * of grad_coords that even and that odd rows i give tell how large the pulls are. (The rounding of d² is no such matter:
 * it is the same in both pulls.) */
static double rounding_of_pulls(const gravnet_case *c, const muvox_gravnet *plain)
{
    const double largest = largest_gradient(plain);
    double       part = 0;

    for (int odd = 0; odd < 2 && c->coords == MUVOX_F32; odd++) {
        problem       p;
        muvox_gravnet op = make(&p, c);

        op.neighbours = plain->neighbours;
        op.winners = plain->winners;
        for (int64_t s = 0; s < p.sets.count; s++)
            for (int64_t i = !odd; i < set_rows(&p.sets, s); i += 2)
                for (int64_t col = 0; col < op.grad_out.cols; col++) set_value(&op.grad_out, &p.sets, s, i, col, 0);
        RUN(muvox_gravnet_backward, &op, MUVOX_SIMD_REFERENCE, 1);
        part = fmax(part, largest_gradient(&op));
        problem_free(&p);
    }
    return tolerance_of(c->coords) + (largest > 0 ? 3 * 0x1p-24 * part / largest : 0);
}

static void compare(const gravnet_case *c, muvox_simd simd, const muvox_gravnet *expected, double rounding)
{
    problem       p, again;
    muvox_gravnet op = make(&p, c);

    RUN(muvox_gravnet_forward, &op, simd, 1);
    assert_same("neighbours", &p.sets, &op.neighbours, &expected->neighbours);
    assert_close("out", &p.sets, &op.out, &expected->out, tolerance_of(c->feats), 0);
    if (op.winners.data)
        assert_winners(&p.sets, &op.winners, &expected->winners, c->aggregates, c->feats != MUVOX_F64, message, &op);
    op.winners = expected->winners;
    RUN(muvox_gravnet_backward, &op, simd, 1);
    assert_close("grad_coords", &p.sets, &op.grad_coords, &expected->grad_coords, rounding, 0);
    assert_close("grad_feats", &p.sets, &op.grad_feats, &expected->grad_feats, tolerance_of(c->feats), 0);
    assert_single_gradients(c, &op, simd);
    problem_free(&p);

    op = make(&p, c);
    RUN(muvox_gravnet_forward, &op, simd, 1);
    RUN(muvox_gravnet_backward, &op, simd, 1);
    assert_all_gaps_untouched(&p, &op);
    if (c->layout != SHARED) assert_sets_independent(&p, &op, simd);
    for (int threads = 1; threads <= 3; threads++) {
        const muvox_gravnet repeated = make(&again, c);

        RUN(muvox_gravnet_forward, &repeated, simd, threads);
        RUN(muvox_gravnet_backward, &repeated, simd, threads);
        assert_same_outputs(&again, &p);
        problem_free(&again);
    }
    problem_free(&p);
}

static void name_case(const gravnet_case *c, muvox_simd simd)
{
    doing("gravnet simd %d, %s coords, %s feats, layout %d, M %d, k %d, d %d, F %d, aggregates 0x%x, coincident %d",
          (int)simd, name_of(c->coords), name_of(c->feats), (int)c->layout, (int)c->M, (int)c->k, (int)c->d, (int)c->F,
          c->aggregates, c->coincident);
}

static void try_case(const gravnet_case *c)
{
    muvox_simd          simds[4];
    problem             p;
    const muvox_gravnet op = make(&p, c);
    double              rounding;

    name_case(c, MUVOX_SIMD_REFERENCE);
    RUN(muvox_gravnet_forward, &op, MUVOX_SIMD_REFERENCE, 1);
    RUN(muvox_gravnet_backward, &op, MUVOX_SIMD_REFERENCE, 1);
    assert_all_gaps_untouched(&p, &op);
    rounding = rounding_of_pulls(c, &op);
    for (int n = all_simds(simds), v = 1; v < n; v++) {
        name_case(c, simds[v]);
        compare(c, simds[v], &op, rounding);
    }
    problem_free(&p);
}

/* Round the edges of tiles; the test's number gives dtype and layout, the rest goes round so that all pairs meet. */
START_TEST(every_kernel_equals_the_reference)
{
    const int64_t     sizes[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130}, widths[] = {1, 5, 8, 12, 22, 48, 64};
    const muvox_dtype feats = floating_dtypes[_i % 4];

    for (int m = 0; m < COUNT(sizes); m++) {
        const int64_t M = sizes[m], ks[] = {1, 8, 25, 33, M ? M : 2, M + 3, 300};

        for (int turn = 0; turn < 2; turn++) {
            gravnet_case c = {(layout)(_i / 4),
                              feats == MUVOX_F64 ? feats : floating_dtypes[(_i + m + turn) % 3],
                              feats,
                              M,
                              ks[(_i + 3 * m + 4 * turn) % COUNT(ks)],
                              1 + (_i + m + 5 * turn) % 9,
                              widths[(_i + m + 3 * turn) % COUNT(widths)],
                              aggregate_choices[(_i + 2 * m + turn) % AGGREGATE_CHOICES],
                              turn && m % 2};

            while (c.F > 1 && M * c.k * c.k * c.F > 250000) c.F /= 2; /* the plain one takes its time */
            if (M * c.k > 4000) c.d = 1;
            if (wanted()) try_case(&c);
        }
    }
}
END_TEST

/* Weights of distances 0, 1 and 4 at scale ln 2: 1, 1/2 and 1/16. */
START_TEST(known_answers)
{
    const double x[] = {0, 1, 2}, f[] = {4, -32, 16};
    const double neighbours[] = {0, 1, 2, -1, 1, 0, 2, -1, 2, 1, 0, -1};
    const double max[] = {4, 8, 16}, absmax[] = {16, 32, 16},
                 mean[] = {(4 - 16 + 1) / 3., (-32 + 2 + 8) / 3., (16 - 16 + .25) / 3};
    const double ranks[] = {0, 1, 2, 0, 0, 0};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem             p = problem_make(UNIFORM, 1, 3, 1);
        const muvox_gravnet op = outputs(&p, given_input(&p, MUVOX_F64, 1, x), given_input(&p, MUVOX_F64, 1, f), 4,
                                         log(2), MUVOX_AGGREGATES_2(MUVOX_MAX, MUVOX_ABSMAX) | MUVOX_MEAN << 8);

        doing("gravnet, simd %d", (int)simds[v]);
        RUN(muvox_gravnet_forward, &op, simds[v], 1);
        assert_values("neighbours", &p.sets, &op.neighbours, neighbours);
        assert_values("winners", &p.sets, &op.winners, ranks);
        for (int i = 0; i < 3; i++) {
            ck_assert_double_eq_tol(result_at(&op.out, &p.sets, 0, i, 0), max[i], 1e-13);
            ck_assert_double_eq_tol(result_at(&op.out, &p.sets, 0, i, 1), absmax[i], 1e-13);
            ck_assert_double_eq_tol(result_at(&op.out, &p.sets, 0, i, 2), mean[i], 1e-13);
        }
        problem_free(&p);
    }
}
END_TEST

/* All rows at one place: ties go to the lower row, every weight is 1, the mean is plain, coordinates take exactly 0. */
START_TEST(coincident_rows)
{
    const double x[] = {.1, .2, .1, .2, .1, .2, .1, .2}, f[] = {1, 5, 3, 3}, zeros[8] = {0};
    const double neighbours[] = {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2}, out[] = {3, 5, 3, 5, 3, 5, 3, 5};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int t = 0; t < 4; t++) {
            problem       p = problem_make(UNIFORM, 1, 4, 1);
            muvox_gravnet op =
                outputs(&p, given_input(&p, floating_dtypes[t], 2, x), given_input(&p, floating_dtypes[t], 1, f), 3, 10,
                        MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX));

            doing("gravnet, simd %d, %s", (int)simds[v], name_of(floating_dtypes[t]));
            op.grad_out = random_input(&p, floating_dtypes[t], 2, 1);
            RUN(muvox_gravnet_forward, &op, simds[v], 1);
            RUN(muvox_gravnet_backward, &op, simds[v], 1);
            assert_values("neighbours", &p.sets, &op.neighbours, neighbours);
            assert_values("out", &p.sets, &op.out, out);
            assert_values("grad_coords", &p.sets, &op.grad_coords, zeros);
            problem_free(&p);
        }
}
END_TEST

/* A NaN coordinate makes every weight of its row NaN, and reaches other rows only as their last neighbour; a NaN feature
 * reaches those that picked it. Other features and sets stay clean. */
START_TEST(nan_stays_where_it_is)
{
    const double x[] = {0, NAN, 1, 0, 1, 2}, f[] = {1, 2, 1, 2, 1, 2, NAN, 2, 4, 4, 4, 4};
    const double neighbours[] = {0, 2, 0, 1, 2, 0, 0, 1, 1, 0, 2, 1};
    const bool   nan[] = {false, false, true, true, false, false, true, false, true, false, false, false};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem             p = problem_make(UNIFORM, 2, 3, 1);
        const muvox_gravnet op = outputs(&p, given_input(&p, MUVOX_F32, 1, x), given_input(&p, MUVOX_F32, 2, f), 2, 10,
                                         MUVOX_AGGREGATES_2(MUVOX_MAX, MUVOX_MEAN));

        doing("gravnet, simd %d", (int)simds[v]);
        RUN(muvox_gravnet_forward, &op, simds[v], 1);
        assert_values("neighbours", &p.sets, &op.neighbours, neighbours);
        for (int at = 0; at < COUNT(nan); at++)
            for (int a = 0; a < 2; a++) {
                const double out = result_at(&op.out, &p.sets, at / 6, at / 2 % 3, 2 * a + at % 2);

                ck_assert_msg(isnan(out) == nan[at], "%s: aggregate %d of row %d, feature %d is %g", done(), a, at / 2,
                              at % 2, out);
            }
        problem_free(&p);
    }
}
END_TEST

/* knn, then aggregate with exp(−scale d²). */
START_TEST(is_knn_and_aggregate_in_one)
{
    const gravnet_case c = {(layout)_i, MUVOX_F64, MUVOX_F64, 33, 9, 3, 6, MUVOX_AGGREGATES_2(MUVOX_MAX, MUVOX_SUM),
                            false};
    muvox_simd         simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem             p;
        const muvox_gravnet op = make(&p, &c);
        const muvox_knn     search = {.struct_size = sizeof search,
                                      .sets = p.sets,
                                      .k = c.k,
                                      .coords = op.coords,
                                      .neighbours = output(&p, MUVOX_I32, c.k),
                                      .distance2 = output(&p, MUVOX_F64, c.k)};
        muvox_output        weights = output(&p, MUVOX_F64, c.k);
        muvox_aggregate     sum = {.struct_size = sizeof sum,
                                   .sets = p.sets,
                                   .aggregates = c.aggregates,
                                   .feats = op.feats,
                                   .neighbours = as_matrix(search.neighbours),
                                   .weights = as_matrix(weights),
                                   .out = output(&p, MUVOX_F64, 2 * c.F),
                                   .winners = output(&p, MUVOX_U8, c.F)};

        name_case(&c, simds[v]);
        RUN(muvox_gravnet_forward, &op, simds[v], 1);
        RUN(muvox_knn_forward, &search, simds[v], 1);
        for (int64_t s = 0; s < p.sets.count; s++)
            for (int64_t i = 0; i < set_rows(&p.sets, s); i++)
                for (int64_t r = 0; r < c.k; r++)
                    set_value(&sum.weights, &p.sets, s, i, r,
                              exp(-op.scale * result_at(&search.distance2, &p.sets, s, i, r)));
        RUN(muvox_aggregate_forward, &sum, simds[v], 1);
        assert_same("neighbours", &p.sets, &op.neighbours, &search.neighbours);
        assert_same("winners", &p.sets, &op.winners, &sum.winners);
        assert_close("out", &p.sets, &op.out, &sum.out, 1e-14, 0);
        problem_free(&p);
    }
}
END_TEST

static double loss(const void *descriptor, muvox_simd simd)
{
    const muvox_gravnet *op = descriptor;

    RUN(muvox_gravnet_forward, op, simd, 1);
    return dot(&op->sets, &op->out, &op->grad_out);
}

START_TEST(gradients_by_finite_differences)
{
    const layout layouts[] = {UNIFORM, RAGGED, STRIDED};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int a = 0; a < AGGREGATE_CHOICES; a++) {
            if (!wanted()) continue;
            const gravnet_case  c = {layouts[_i], MUVOX_F64, MUVOX_F64, 8, 5, 3, 4, aggregate_choices[a], false};
            problem             p;
            const muvox_gravnet op = make(&p, &c);

            name_case(&c, simds[v]);
            RUN(muvox_gravnet_forward, &op, simds[v], 1);
            RUN(muvox_gravnet_backward, &op, simds[v], 1);
            assert_gradient("grad_coords", &p.sets, &op.coords, &op.grad_coords, loss, &op, simds[v]);
            assert_gradient("grad_feats", &p.sets, &op.feats, &op.grad_feats, loss, &op, simds[v]);
            problem_free(&p);
        }
}
END_TEST

#define WRONG(run, change, status, argument) REFUSES(gravnet, run, change, status, argument)

START_TEST(forward_refuses_wrong_arguments)
{
    const gravnet_case  c = {STRIDED, MUVOX_F32, MUVOX_F16, 5, 3, 2, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX),
                             false};
    problem             p;
    const muvox_gravnet good = make(&p, &c);

    WRONG(muvox_gravnet_forward, op.k = 0, MUVOX_BAD_ARGUMENT, "k is 0");
    WRONG(muvox_gravnet_forward, op.k = 2, MUVOX_BAD_SHAPE, "neighbours");
    WRONG(muvox_gravnet_forward, op.scale = NAN, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(muvox_gravnet_forward, op.scale = -INFINITY, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(muvox_gravnet_forward, op.aggregates = 0, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_gravnet_forward, op.aggregates = 0x71, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_gravnet_forward, op.aggregates = 0x22, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(muvox_gravnet_forward, op.coords.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "coords");
    WRONG(muvox_gravnet_forward, op.coords.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "coords");
    WRONG(muvox_gravnet_forward, op.coords.rows++, MUVOX_BAD_SHAPE, "coords");
    WRONG(muvox_gravnet_forward, op.coords.cols = 0, MUVOX_BAD_SHAPE, "coords");
    WRONG(muvox_gravnet_forward, op.coords.data = NULL, MUVOX_BAD_ARGUMENT, "coords");
    WRONG(muvox_gravnet_forward, op.coords.row_stride = -1, MUVOX_BAD_ARGUMENT, "coords");
    WRONG(muvox_gravnet_forward, op.feats.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "feats");
    WRONG(muvox_gravnet_forward, op.feats.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "feats");
    WRONG(muvox_gravnet_forward, op.feats.rows--, MUVOX_BAD_SHAPE, "feats");
    WRONG(muvox_gravnet_forward, op.feats.cols = 0, MUVOX_BAD_SHAPE, "feats");
    WRONG(muvox_gravnet_forward, op.feats.data = NULL, MUVOX_BAD_ARGUMENT, "feats");
    WRONG(muvox_gravnet_forward, op.feats.set_stride = -1, MUVOX_BAD_ARGUMENT, "feats");
    WRONG(muvox_gravnet_forward, op.out.cols--, MUVOX_BAD_SHAPE, "out");
    WRONG(muvox_gravnet_forward, op.out.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "out");
    WRONG(muvox_gravnet_forward, op.out.row_stride = 7, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_gravnet_forward, op.out.set_stride = 0, MUVOX_BAD_ARGUMENT, "out");
    WRONG(muvox_gravnet_forward, op.neighbours.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "neighbours");
    WRONG(muvox_gravnet_forward, op.winners.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "winners");
    WRONG(muvox_gravnet_forward, op.winners.cols++, MUVOX_BAD_SHAPE, "winners");
    problem_free(&p);
}
END_TEST

START_TEST(backward_refuses_wrong_arguments)
{
    const gravnet_case c = {STRIDED, MUVOX_F32, MUVOX_F16, 5, 3, 2, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX),
                            false};
    problem            p;
    muvox_gravnet      good = make(&p, &c);
    int32_t *const     first = good.neighbours.data;

    RUN(muvox_gravnet_forward, &good, MUVOX_SIMD_AUTO, 1);
    freeze(&p);
    good.grad_coords = output(&p, MUVOX_F32, 2);
    good.grad_feats = output(&p, MUVOX_F16, 4);
    WRONG(muvox_gravnet_backward, op.k = 0, MUVOX_BAD_ARGUMENT, "k is 0");
    WRONG(muvox_gravnet_backward, op.scale = INFINITY, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(muvox_gravnet_backward, op.neighbours.data = NULL, MUVOX_BAD_ARGUMENT, "neighbours");
    if (ON_CPU) WRONG(muvox_gravnet_backward, *first = 5, MUVOX_BAD_ARGUMENT, "neighbours");
    if (ON_CPU) WRONG(muvox_gravnet_backward, *first = INT32_MIN, MUVOX_BAD_ARGUMENT, "neighbours");
    *first = 0;
    WRONG(muvox_gravnet_backward, op.winners.data = NULL, MUVOX_BAD_ARGUMENT, "winners");
    WRONG(muvox_gravnet_backward, op.grad_out.data = NULL, MUVOX_BAD_ARGUMENT, "grad_out");
    WRONG(muvox_gravnet_backward, op.grad_out.rows--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_gravnet_backward, op.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(muvox_gravnet_backward, op.grad_out.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "grad_out");
    WRONG(muvox_gravnet_backward, op.grad_coords.cols++, MUVOX_BAD_SHAPE, "grad_coords");
    WRONG(muvox_gravnet_backward, op.grad_coords.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_coords");
    WRONG(muvox_gravnet_backward, op.grad_feats.rows--, MUVOX_BAD_SHAPE, "grad_feats");
    WRONG(muvox_gravnet_backward, op.grad_feats.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "grad_feats");
    WRONG(muvox_gravnet_backward, op.grad_feats.row_stride = 3, MUVOX_BAD_ARGUMENT, "grad_feats");
    problem_free(&p);
}
END_TEST

Suite *gravnet_suite(void)
{
    Suite *const suite = suite_create("gravnet");
    TCase *const tests = tcase_create("gravnet");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    tcase_add_test(tests, known_answers);
    tcase_add_test(tests, coincident_rows);
    tcase_add_test(tests, nan_stays_where_it_is);
    tcase_add_loop_test(tests, is_knn_and_aggregate_in_one, 0, LAYOUTS);
    tcase_add_loop_test(tests, gradients_by_finite_differences, 0, 3);
    tcase_add_test(tests, forward_refuses_wrong_arguments);
    tcase_add_test(tests, backward_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
