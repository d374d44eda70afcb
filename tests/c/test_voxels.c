/* voxelize, devoxelize and trilinear_weights: exact answers, every kernel against the plain one, gradients, refusals. */
#include "trial.h"

#include <math.h>

TRIAL(voxelize)
TRIAL(devoxelize)
TRIAL(trilinear_weights)

/* Indices from −2 to past the last voxel, counts from −1: what is to be skipped is among them. */
static void make_voxelize(trial *t, const trial_case *c)
{
    muvox_voxelize   *op = &t->op.voxelize;
    const muvox_sets  voxels = one_set(c->M / 3 + 1);
    const muvox_dtype integer = c->options & INT64 ? MUVOX_I64 : MUVOX_I32;
    const int64_t     width = 1 + c->M % 23;

    t->p = problem_make(c->layout, 1, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_voxelize){.struct_size = sizeof *op,
                           .feats = random_input(&t->p, c->dtype, width, 2),
                           .index = integer_input_of(&t->p, &t->p.sets, integer, 1, -2, voxels.rows + 1),
                           .counts = integer_input_of(&t->p, &voxels, integer, 1, -1, 9),
                           .grad_out = random_input_of(&t->p, &voxels, c->dtype, width, 1),
                           .out = output_of(&t->p, &voxels, c->dtype, width),
                           .grad_feats = output(&t->p, c->dtype, width)};
    t->forward = forward_voxelize;
    t->backward = backward_voxelize;
    forward_result(t, "out", &voxels, &op->out, false, &op->grad_out);
    gradient_result(t, "grad_feats", &t->p.sets, &op->grad_feats, &op->feats);
}

static void make_devoxelize(trial *t, const trial_case *c)
{
    muvox_devoxelize *op = &t->op.devoxelize;
    const muvox_sets  voxels = one_set(c->M / 3 + 1);
    const int64_t     width = 1 + c->M % 23, K = c->M % 2 ? 8 : 3;
    const muvox_dtype weights = c->options & WEIGHTS && c->dtype != MUVOX_F64 ? MUVOX_F32 : c->dtype;

    t->p = problem_make(c->layout, 1, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_devoxelize){.struct_size = sizeof *op,
                             .feats = random_input_of(&t->p, &voxels, c->dtype, width, 2),
                             .index = integer_input_of(&t->p, &t->p.sets, c->options & INT64 ? MUVOX_I64 : MUVOX_I32, K,
                                                       -2, voxels.rows + 1),
                             .weights = random_input(&t->p, weights, K, 1),
                             .grad_out = random_input(&t->p, c->dtype, width, 1),
                             .out = output(&t->p, c->dtype, width),
                             .grad_feats = output_of(&t->p, &voxels, c->dtype, width),
                             .grad_weights = output(&t->p, weights, K)};
    t->forward = forward_devoxelize;
    t->backward = backward_devoxelize;
    forward_result(t, "out", &t->p.sets, &op->out, false, &op->grad_out);
    gradient_result(t, "grad_feats", &voxels, &op->grad_feats, &op->feats);
    gradient_result(t, "grad_weights", &t->p.sets, &op->grad_weights, &op->weights);
}

/* Points in and around the grid, and with `poison` some that are nowhere. */
static void make_trilinear_weights(trial *t, const trial_case *c)
{
    const double             nowhere[] = {NAN, INFINITY, -INFINITY, 1e30};
    muvox_trilinear_weights *op = &t->op.trilinear_weights;

    t->p = problem_make(c->layout, 1, c->M, (uint64_t)(c->M * 100 + c->options));
    *op = (muvox_trilinear_weights){.struct_size = sizeof *op,
                                    .origin = {-1, 0.25, -0.5},
                                    .voxel_size = {0.5, 0.3, 1.25},
                                    .shape = {4, 3, 1},
                                    .points = random_input(&t->p, c->dtype, 3, 2),
                                    .grad_weights = random_input(&t->p, wide(c->dtype), 8, 1),
                                    .index = output(&t->p, MUVOX_I32, 8),
                                    .weights = output(&t->p, wide(c->dtype), 8),
                                    .grad_points = output(&t->p, c->dtype, 3)};
    for (int64_t i = 5; c->options & MASK && i < c->M; i += 7)
        set_value(&op->points, &t->p.sets, 0, i, i % 3, nowhere[i % 4]);
    t->forward = forward_trilinear_weights;
    t->backward = backward_trilinear_weights;
    forward_result(t, "index", &t->p.sets, &op->index, true, NULL);
    forward_result(t, "weights", &t->p.sets, &op->weights, false, &op->grad_weights);
    gradient_result(t, "grad_points", &t->p.sets, &op->grad_points, &op->points);
}

const subject voxel_subjects[VOXEL_SUBJECTS] = {
    {"voxelize", make_voxelize, 3, {0, INT64, 0}},
    {"devoxelize", make_devoxelize, 3, {0, INT64 | WEIGHTS, WEIGHTS}},
    {"trilinear_weights", make_trilinear_weights, 3, {0, MASK, MASK}},
};

START_TEST(every_kernel_equals_the_reference)
{
    const int64_t sizes[] = {0, 1, 2, 15, 17, 66, 200};
    const layout  layouts[] = {UNIFORM, STRIDED};

    for (int o = 0; o < VOXEL_SUBJECTS; o++)
        for (int m = 0; m < COUNT(sizes); m++)
            for (int l = 0; l < COUNT(layouts); l++) {
                const trial_case c = {
                    layouts[l], floating_dtypes[_i], sizes[m], voxel_subjects[o].options[(m + l) % 3], false, false};

                try_all_kernels(voxel_subjects[o].name, voxel_subjects[o].make, &c);
            }
}
END_TEST

START_TEST(gradients_by_finite_differences)
{
    const layout layouts[] = {UNIFORM, STRIDED};

    for (int l = 0; l < COUNT(layouts); l++)
        for (int64_t M = 8; M <= 15; M += 7) {
            const trial_case c = {layouts[l], MUVOX_F64, M, 0, false, false};

            try_gradients(voxel_subjects[_i].name, voxel_subjects[_i].make, &c);
        }
}
END_TEST

/* Points 2, 1, 3 and 4 in voxels 1, 0, 1 and nowhere, voxel 2 empty: sums over counts. */
START_TEST(known_means)
{
    const double feats[] = {2, 1, 3, 4}, index[] = {1, 0, 1, 3}, counts[] = {1, 2, 0}, g[] = {10, 20, 30};
    const double out[] = {1, 2.5, 0}, grad[] = {10, 10, 10, 0};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int t = 0; t < 4; t++) {
            problem        p = problem_make(UNIFORM, 1, 4, 1), q = problem_make(UNIFORM, 1, 3, 1);
            muvox_voxelize op = {.struct_size = sizeof op,
                                 .feats = given_input(&p, floating_dtypes[t], 1, feats),
                                 .index = given_input(&p, MUVOX_I64, 1, index),
                                 .counts = given_input(&q, MUVOX_I32, 1, counts),
                                 .grad_out = given_input(&q, floating_dtypes[t], 1, g),
                                 .out = output(&q, floating_dtypes[t], 1),
                                 .grad_feats = output(&p, floating_dtypes[t], 1)};

            doing("voxelize simd %d, %s", (int)simds[v], name_of(floating_dtypes[t]));
            RUN(muvox_voxelize_forward, &op, simds[v], 1);
            RUN(muvox_voxelize_backward, &op, simds[v], 1);
            assert_values("out", &q.sets, &op.out, out);
            for (int i = 0; i < 4; i++) ck_assert_double_eq(result_at(&op.grad_feats, &p.sets, 0, i, 0), grad[i]);
            /* The counts given are those of index. */
            op.out = output(&q, floating_dtypes[t], 1);
            op.histogram = output(&q, MUVOX_I64, 1);
            op.counts = (muvox_matrix){.rows = 3};
            RUN(muvox_voxelize_forward, &op, simds[v], 1);
            assert_values("out", &q.sets, &op.out, out);
            assert_values("histogram", &q.sets, &op.histogram, counts);
            problem_free(&p);
            problem_free(&q);
        }
}
END_TEST

/* A grid of 2 × 1 × 1: a quarter of the way between the centres, at a centre, on the outer border, and nowhere. */
START_TEST(known_corners)
{
    const double points[] = {0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 2, 0.5, 0.5, NAN, 0.5, 0.5};
    const double index[] = {0, -1, -1, -1, 1,  -1, -1, -1, 0,  -1, -1, -1, 1,  -1, -1, -1,
                            1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const double weights[32] = {0.75, 0, 0, 0, 0.25, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0.5};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int t = 0; t < 4; t++) {
            problem                 p = problem_make(UNIFORM, 1, 4, 1);
            muvox_trilinear_weights op = {.struct_size = sizeof op,
                                          .voxel_size = {1, 1, 1},
                                          .shape = {2, 1, 1},
                                          .points = given_input(&p, floating_dtypes[t], 3, points),
                                          .index = output(&p, MUVOX_I32, 8),
                                          .weights = output(&p, wide(floating_dtypes[t]), 8)};

            doing("trilinear_weights simd %d, %s", (int)simds[v], name_of(floating_dtypes[t]));
            RUN(muvox_trilinear_weights_forward, &op, simds[v], 1);
            assert_values("index", &p.sets, &op.index, index);
            assert_values("weights", &p.sets, &op.weights, weights);
            problem_free(&p);
        }
}
END_TEST

#define REFUSED(run, operator_, change, status, argument)                                                              \
    do {                                                                                                               \
        any_descriptor op = t.op;                                                                                      \
        muvox_context  ctx = context(MUVOX_SIMD_AUTO, 1);                                                              \
        change;                                                                                                        \
        doing("%s", #change);                                                                                          \
        assert_refused(&t.p, &ctx, t.run(&ctx, &op), status, operator_, argument);                                     \
    } while (0)

static const trial_case strided = {STRIDED, MUVOX_F32, 6, 0, false, false};

START_TEST(voxelize_refuses_wrong_arguments)
{
    trial t = {.count = 0};

    make_voxelize(&t, &strided);
    REFUSED(forward, "voxelize", op.voxelize.feats.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "feats");
    REFUSED(forward, "voxelize", op.voxelize.feats.data = NULL, MUVOX_BAD_ARGUMENT, "feats");
    REFUSED(forward, "voxelize", op.voxelize.index.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "index");
    REFUSED(forward, "voxelize", op.voxelize.index.rows--, MUVOX_BAD_SHAPE, "index");
    REFUSED(forward, "voxelize", op.voxelize.index.cols = 2, MUVOX_BAD_SHAPE, "index");
    REFUSED(forward, "voxelize", op.voxelize.counts.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "counts");
    REFUSED(forward, "voxelize", op.voxelize.histogram = op.voxelize.out, MUVOX_BAD_SHAPE, "histogram");
    REFUSED(forward, "voxelize", op.voxelize.out.rows++, MUVOX_BAD_SHAPE, "out");
    REFUSED(forward, "voxelize", op.voxelize.out.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "out");
    REFUSED(forward, "voxelize", op.voxelize.out.row_stride = 1, MUVOX_BAD_ARGUMENT, "out");
    REFUSED(backward, "voxelize", op.voxelize.grad_out.rows--, MUVOX_BAD_SHAPE, "grad_out");
    REFUSED(backward, "voxelize", op.voxelize.grad_out.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_out");
    REFUSED(backward, "voxelize", op.voxelize.grad_feats.cols++, MUVOX_BAD_SHAPE, "grad_feats");
    problem_free(&t.p);
}
END_TEST

START_TEST(devoxelize_refuses_wrong_arguments)
{
    trial t = {.count = 0};

    make_devoxelize(&t, &strided);
    REFUSED(forward, "devoxelize", op.devoxelize.feats.cols = 0, MUVOX_BAD_SHAPE, "feats");
    REFUSED(forward, "devoxelize", op.devoxelize.index.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "index");
    REFUSED(forward, "devoxelize", op.devoxelize.index.cols = 0, MUVOX_BAD_SHAPE, "index");
    REFUSED(forward, "devoxelize", op.devoxelize.weights.cols++, MUVOX_BAD_SHAPE, "weights");
    REFUSED(forward, "devoxelize", op.devoxelize.weights.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "weights");
    REFUSED(forward, "devoxelize", op.devoxelize.out.rows--, MUVOX_BAD_SHAPE, "out");
    REFUSED(backward, "devoxelize", op.devoxelize.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    REFUSED(backward, "devoxelize", op.devoxelize.grad_feats.rows--, MUVOX_BAD_SHAPE, "grad_feats");
    REFUSED(backward, "devoxelize", op.devoxelize.grad_weights.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_weights");
    problem_free(&t.p);
}
END_TEST

START_TEST(trilinear_weights_refuses_wrong_arguments)
{
    trial t = {.count = 0};

    make_trilinear_weights(&t, &strided);
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.points.cols = 2, MUVOX_BAD_SHAPE, "points");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.points.dtype = MUVOX_I64, MUVOX_BAD_DTYPE, "points");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.origin[1] = NAN, MUVOX_BAD_ARGUMENT, "origin");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.voxel_size[2] = 0, MUVOX_BAD_ARGUMENT, "voxel_size");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.shape[0] = -1, MUVOX_BAD_ARGUMENT, "shape");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.shape[2] = INT32_MAX, MUVOX_BAD_ARGUMENT, "shape");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.index.dtype = MUVOX_I64, MUVOX_BAD_DTYPE, "index");
    REFUSED(forward, "trilinear_weights", op.trilinear_weights.weights.cols = 7, MUVOX_BAD_SHAPE, "weights");
    REFUSED(backward, "trilinear_weights", op.trilinear_weights.grad_weights.dtype = MUVOX_F64, MUVOX_BAD_DTYPE,
            "grad_weights");
    REFUSED(backward, "trilinear_weights", op.trilinear_weights.grad_points.cols = 2, MUVOX_BAD_SHAPE, "grad_points");
    problem_free(&t.p);
}
END_TEST

Suite *voxels_suite(void)
{
    Suite *const suite = suite_create("voxels");
    TCase *const tests = tcase_create("voxels");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4);
    tcase_add_loop_test(tests, gradients_by_finite_differences, 0, VOXEL_SUBJECTS);
    tcase_add_test(tests, known_means);
    tcase_add_test(tests, known_corners);
    tcase_add_test(tests, voxelize_refuses_wrong_arguments);
    tcase_add_test(tests, devoxelize_refuses_wrong_arguments);
    tcase_add_test(tests, trilinear_weights_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
