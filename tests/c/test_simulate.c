/* simulate: the generator's known answers, results that no thread changes, and what is refused. */
#include "problem.h"

#include "muvox/simulate.h"
#include "simulation/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define VOLUMES 3
#define MUONS   90

/* Small volumes of 2 × 3 × 2 voxels, the second one empty of muons. */
typedef struct {
    int64_t        splits[VOLUMES + 1];
    float          x0[VOLUMES][12];
    double         momentum[3], zenith[3][2], panels[4];
    double         out[MUONS][20];
    int64_t        aimed[VOLUMES];
    muvox_simulate op;
} scene;

static scene make(void)
{
    scene s = {.splits = {0, 40, 40, MUONS}, .momentum = {0.5, 2, 50}, .panels = {0.9, 0.8, -0.2, -0.1}};

    for (int i = 0; i < VOLUMES * 12; i++) s.x0[i / 12][i % 12] = i % 5 ? 0.2f : 0.01f;
    for (int i = 0; i < 3; i++) s.zenith[i][1] = 0.8;
    s.op = (muvox_simulate){
        .struct_size = sizeof s.op,
        .sets = {.count = VOLUMES, .rows = MUONS},
        .shape = {2, 3, 2},
        .voxel_size = {0.3, 0.2, 0.3},
        .x0 = {NULL, MUVOX_F32, VOLUMES, 12, 12, 0},
        .seed = 5,
        .step = 0.05,
        .momentum = {NULL, MUVOX_F64, 3, 1, 1, 0},
        .zenith = {NULL, MUVOX_F64, 3, 2, 2, 0},
        .panels = {NULL, MUVOX_F64, 4, 1, 1, 0},
        .panel_x = {-0.3, 0.9},
        .panel_y = {-0.3, 0.9},
        .resolution = 1e-4,
        .efficiency = 0.9,
        .out = {NULL, MUVOX_F64, MUONS, 18, 20, 0},
        .aimed = {NULL, MUVOX_I64, VOLUMES, 1, 1, 0},
    };
    return s;
}

/* Pointers into a scene that stays where it is. */
static muvox_simulate *settle(scene *s)
{
    s->op.sets.splits = s->splits;
    s->op.x0.data = s->x0;
    s->op.momentum.data = s->momentum;
    s->op.zenith.data = s->zenith;
    s->op.panels.data = s->panels;
    s->op.out.data = s->out;
    s->op.aimed.data = s->aimed;
    return &s->op;
}

static void run(scene *s, int threads)
{
    muvox_context      ctx = context(MUVOX_SIMD_AUTO, threads);
    const muvox_status status = muvox_simulate_scans(&ctx, settle(s));

    ck_assert_msg(status == MUVOX_OK && !ctx.message[0], "%s", ctx.message);
}

/* The answers that the authors of the generator publish. */
START_TEST(philox_gives_its_known_answers)
{
    static const uint32_t expected[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                            {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                            {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    random_stream         streams[3] = {{{0, 0}, {0, 0, 0, 0}},
                                        {{~0U, ~0U}, {~0U, ~0U, ~0U, ~0U}},
                                        {{0xa4093822, 0x299f31d0}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}};

    for (int i = 0; i < 3; i++) {
        uint32_t word[4];

        random_words(&streams[i], word);
        for (int w = 0; w < 4; w++) ck_assert_uint_eq(word[w], expected[i][w]);
    }
}
END_TEST

START_TEST(gaussian_numbers_are_independent_and_of_unit_width)
{
    random_stream stream = random_open(1, 2, 3);
    const int     n = 200000;
    double        sum[4] = {0}, product[4][4] = {{0}}, fourth = 0;

    for (int i = 0; i < n; i++) {
        double z[4];

        random_gauss(&stream, z);
        for (int a = 0; a < 4; a++) {
            sum[a] += z[a];
            for (int b = 0; b < 4; b++) product[a][b] += z[a] * z[b];
            fourth += z[a] * z[a] * z[a] * z[a] / 4;
        }
    }
    for (int a = 0; a < 4; a++) {
        ck_assert_double_lt(fabs(sum[a]) / n, 4.5 / sqrt(n));
        for (int b = 0; b < 4; b++)
            ck_assert_double_lt(fabs(product[a][b] / n - (a == b)), 4.5 * (a == b ? sqrt(2) : 1) / sqrt(n));
    }
    ck_assert_double_lt(fabs(fourth / n - 3), 4.5 * sqrt(96.0 / 4 / n));
}
END_TEST

START_TEST(threads_change_nothing)
{
    scene one = make(), many;

    run(&one, 1);
    for (int threads = 2; threads <= 7; threads++) {
        many = make();
        run(&many, threads);
        ck_assert_mem_eq(one.out, many.out, sizeof one.out);
        ck_assert_mem_eq(one.aimed, many.aimed, sizeof one.aimed);
    }
    for (int i = 0; i < MUONS; i++) {
        for (int c = 0; c < 18; c++) ck_assert_msg(isfinite(one.out[i][c]), "muon %d, column %d", i, c);
        ck_assert(one.out[i][18] == 0 && one.out[i][19] == 0); /* between the rows */
    }
    ck_assert(one.aimed[0] > 40 && one.aimed[1] == 0 && one.aimed[2] > 50);
}
END_TEST

/* A volume's muons are the same alone, with its number, in float, and with a map that volumes share. */
START_TEST(a_volume_is_the_same_alone)
{
    scene         all = make(), alone = make();
    const int64_t id = 2;
    float         out[50][18];

    run(&all, 1);
    alone.splits[1] = 50;
    alone.op.sets = (muvox_sets){.count = 1, .rows = 50};
    settle(&alone);
    alone.op.x0 = (muvox_matrix){all.x0[2], MUVOX_F32, 1, 12, 0, 0};
    alone.op.ids = &id;
    alone.op.out = (muvox_output){out, MUVOX_F32, 50, 18, 18, 0};
    alone.op.aimed = (muvox_output){NULL, MUVOX_I64, 0, 0, 0, 0};
    {
        muvox_context ctx = context(MUVOX_SIMD_AUTO, 2);

        ck_assert_msg(muvox_simulate_scans(&ctx, &alone.op) == MUVOX_OK, "%s", ctx.message);
    }
    for (int i = 0; i < 50; i++)
        for (int c = 0; c < 18; c++) ck_assert(out[i][c] == (float)all.out[40 + i][c]);
}
END_TEST

#define REFUSED(change, status, words)                                                                                 \
    do {                                                                                                               \
        scene         s = make();                                                                                      \
        muvox_context ctx = context(MUVOX_SIMD_AUTO, 2);                                                               \
        muvox_status  got;                                                                                             \
                                                                                                                       \
        settle(&s);                                                                                                    \
        change;                                                                                                        \
        got = muvox_simulate_scans(&ctx, &s.op);                                                                       \
        ck_assert_msg(got == (status) && strstr(ctx.message, words) && !strncmp(ctx.message, "simulate: ", 10),        \
                      "%s: %s, %s", #change, muvox_status_name(got), ctx.message);                                     \
        for (int i = 0; i < MUONS; i++)                                                                                \
            for (int c = 0; c < 20; c++) ck_assert(s.out[i][c] == 0);                                                  \
    } while (0)

START_TEST(wrong_descriptors_are_refused)
{
    REFUSED(s.op.struct_size = 8, MUVOX_BAD_ARGUMENT, "struct_size");
    REFUSED(s.splits[1] = 95, MUVOX_BAD_ARGUMENT, "splits");
    REFUSED(s.op.options = 2, MUVOX_BAD_ARGUMENT, "options is 0x2");
    REFUSED(s.op.step = 0, MUVOX_BAD_ARGUMENT, "step is 0");
    REFUSED(s.op.step = NAN, MUVOX_BAD_ARGUMENT, "step is nan");
    REFUSED(s.op.shape[1] = 0, MUVOX_BAD_ARGUMENT, "0 voxels along y");
    REFUSED((s.op.shape[0] = INT32_MAX, s.op.shape[1] = INT32_MAX, s.op.shape[2] = INT32_MAX), MUVOX_BAD_ARGUMENT,
            "voxels along y, expected 1 or more that can be addressed");
    REFUSED(s.op.origin[0] = INFINITY, MUVOX_BAD_ARGUMENT, "origin is inf along x");
    REFUSED(s.op.voxel_size[2] = -1, MUVOX_BAD_ARGUMENT, "voxel_size is -1 along z");
    REFUSED(s.op.x0.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "x0 is double");
    REFUSED(s.op.x0.cols = 11, MUVOX_BAD_SHAPE, "x0 has width 11, expected 12");
    REFUSED(s.x0[2][7] = 0, MUVOX_BAD_ARGUMENT, "x0 is 0 in voxel 7 of volume 2");
    REFUSED(s.x0[0][0] = NAN, MUVOX_BAD_ARGUMENT, "x0 is nan");
    REFUSED(s.op.momentum.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "momentum is float");
    REFUSED(s.op.momentum.rows = s.op.zenith.rows = 0, MUVOX_BAD_SHAPE, "no rows");
    REFUSED(s.momentum[0] = 0, MUVOX_BAD_ARGUMENT, "momentum has 0 in row 0");
    REFUSED(s.momentum[1] = 60, MUVOX_BAD_ARGUMENT, "momentum has 50 in row 2, expected rising");
    REFUSED(s.op.zenith.rows = 2, MUVOX_BAD_SHAPE, "zenith has 2 rows, expected 3");
    REFUSED(s.zenith[1][1] = 1.6, MUVOX_BAD_ARGUMENT, "zenith has 1.6 in row 1");
    REFUSED(s.zenith[2][0] = 0.9, MUVOX_BAD_ARGUMENT, "zenith has 0.8 in row 2");
    REFUSED(s.panels[2] = 0.3, MUVOX_BAD_ARGUMENT, "panel 2 is at z = 0.3");
    REFUSED(s.panels[1] = 0.9, MUVOX_BAD_ARGUMENT, "panels 0 and 1 are both at z = 0.9");
    REFUSED(s.op.panels.rows = 3, MUVOX_BAD_ARGUMENT, "2 panels above and 1 below");
    REFUSED(s.op.panel_y[1] = -0.3, MUVOX_BAD_ARGUMENT, "expected a rectangle");
    REFUSED(s.op.resolution = -1, MUVOX_BAD_ARGUMENT, "resolution is -1");
    REFUSED(s.op.efficiency = 0, MUVOX_BAD_ARGUMENT, "efficiency is 0");
    REFUSED(s.op.efficiency = 1.1, MUVOX_BAD_ARGUMENT, "efficiency is 1.1");
    REFUSED(s.op.out.data = NULL, MUVOX_BAD_ARGUMENT, "out is missing");
    REFUSED(s.op.out.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "out is half, expected float");
    REFUSED(s.op.out.cols = 17, MUVOX_BAD_SHAPE, "out has width 17");
    REFUSED(s.op.aimed.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "aimed is int32");
}
END_TEST

/* Panels far away from the volume: not for ever. */
START_TEST(a_detector_that_records_nothing_is_refused)
{
    REFUSED((s.op.panel_x[0] = 50, s.op.panel_x[1] = 51), MUVOX_BAD_ARGUMENT, "aimed at volume 0 none is recorded");
}
END_TEST

START_TEST(no_muons_are_no_error)
{
    scene s = make();

    s.op.sets = (muvox_sets){.count = VOLUMES};
    s.op.out = (muvox_output){NULL, MUVOX_F64, 0, 18, 18, 0};
    memset(s.splits, 0, sizeof s.splits);
    memset(s.aimed, 1, sizeof s.aimed);
    run(&s, 2);
    for (int v = 0; v < VOLUMES; v++) ck_assert_int_eq(s.aimed[v], 0);
}
END_TEST

Suite *simulate_suite(void)
{
    Suite *const suite = suite_create("simulate");
    TCase *const tests = tcase_create("simulate");

    tcase_add_test(tests, philox_gives_its_known_answers);
    tcase_add_test(tests, gaussian_numbers_are_independent_and_of_unit_width);
    tcase_add_test(tests, threads_change_nothing);
    tcase_add_test(tests, a_volume_is_the_same_alone);
    tcase_add_test(tests, wrong_descriptors_are_refused);
    tcase_add_test(tests, a_detector_that_records_nothing_is_refused);
    tcase_add_test(tests, no_muons_are_no_error);
    suite_add_tcase(suite, tests);
    return suite;
}
