/* What is asked of a device alone: sets round the edges of its tiles and sorts, wrong splits and neighbours that nobody
 * looked at, allocations that fail, devices that are not there. The other suites run on it, too: see target.h. */
#define _POSIX_C_SOURCE 200809L /* setenv */

#include "calls.h"
#include "trial.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

static const size_t guards[] = {0, 1 << 16};

static void start(trial *t, const subject *of, const trial_case *c)
{
    memset(t, 0, sizeof *t);
    of->make(t, c);
}

static void succeed(muvox_status status, const muvox_context *ctx)
{
    ck_assert_msg(status == MUVOX_OK && !ctx->message[0], "%s: %s, %s", done(), muvox_status_name(status),
                  ctx->message);
}

/* Tiles have 32 rows; from 257 rows on sets are sorted, from 4097 on in another way. The number gives the dtype. */
START_TEST(sets_of_every_size)
{
    const int64_t sizes[] = {0, 1, 31, 32, 33, 255, 256, 257, 300, 513, 4097};
    const layout  layouts[] = {UNIFORM, RAGGED};

    for (int o = 0; o < OPTION_SUBJECTS; o++)
        for (int l = 0; runs_here(option_subjects[o].name) && l < COUNT(layouts); l++)
            for (int m = 0; m < COUNT(sizes) && (!o || sizes[m] < 300); m++) { /* the plain ones take their time */
                const trial_case c = {layouts[l], floating_dtypes[_i], sizes[m], 0, false, false};

                try_all_kernels(option_subjects[o].name, option_subjects[o].make, &c);
            }
}
END_TEST

START_TEST(many_small_sets)
{
    problem         p = problem_make(UNIFORM, 5000, 7, 1);
    const muvox_knn op = {.struct_size = sizeof op,
                          .sets = p.sets,
                          .k = 9,
                          .coords = random_input(&p, floating_dtypes[_i], 3, 1),
                          .neighbours = output(&p, MUVOX_I32, 9),
                          .distance2 = output(&p, wide(floating_dtypes[_i]), 9)};
    muvox_knn       expected = op;

    doing("5000 sets of 7 rows, %s", name_of(floating_dtypes[_i]));
    expected.neighbours = output(&p, MUVOX_I32, 9);
    expected.distance2 = output(&p, wide(floating_dtypes[_i]), 9);
    RUN(muvox_knn_forward, &op, MUVOX_SIMD_AUTO, 1);
    RUN(muvox_knn_forward, &expected, MUVOX_SIMD_REFERENCE, 1);
    assert_same("neighbours", &p.sets, &op.neighbours, &expected.neighbours);
    assert_same("distance2", &p.sets, &op.distance2, &expected.distance2);
    problem_free(&p);
}
END_TEST

typedef struct {
    int calls, fail_at, live;
} counter;

static void *counted_alloc(void *user, size_t bytes)
{
    counter *const c = user;

    if (++c->calls == c->fail_at) return NULL;
    c->live++;
    return workspace_make(bytes);
}

static void counted_free(void *user, void *block)
{
    ((counter *)user)->live--;
    workspace_drop(block);
}

/* The n-th allocation fails, for every n until there are no more; the call after that is right. */
static void fail_every_allocation(const subject *of, const trial_case *c, bool backward)
{
    trial         t, expected;
    counter       count = {0};
    muvox_context ctx = context(MUVOX_SIMD_AUTO, 1);

    ctx.alloc = counted_alloc;
    ctx.free = counted_free;
    ctx.user = &count;
    start(&t, of, c);
    start(&expected, of, c);
    RUN(expected.forward, &expected.op, MUVOX_SIMD_AUTO, 0);
    if (backward) {
        RUN(t.forward, &t.op, MUVOX_SIMD_AUTO, 0);
        RUN(expected.backward, &expected.op, MUVOX_SIMD_AUTO, 0);
    }
    for (int fail_at = 1;; fail_at++) {
        muvox_status status;

        count = (counter){.fail_at = fail_at};
        status = (backward ? t.backward : t.forward)(&ctx, &t.op);
        doing("%s %s, options 0x%x, allocation %d fails", of->name, backward ? "backward" : "forward", c->options,
              fail_at);
        ck_assert_msg(!count.live, "%s: %d blocks leaked", done(), count.live);
        if (count.calls < fail_at) {
            succeed(status, &ctx);
            break;
        }
        ck_assert_msg(status == MUVOX_OUT_OF_MEMORY && strstr(ctx.message, "out of memory"), "%s: %s, %s", done(),
                      muvox_status_name(status), ctx.message);
        if (!backward) assert_untouched(&t.p);
        ck_assert_int_lt(fail_at, 100);
    }
    assert_same_outputs(&t.p, &expected.p);
    problem_free(&t.p);
    problem_free(&expected.p);
}

static void fail_every_allocation_of(const subject *of, layout layout)
{
    for (int o = 0; runs_here(of->name) && o < of->count; o++)
        for (int backward = 0; backward < 2; backward++) {
            const trial_case c = {layout, MUVOX_F32, 300, of->options[o], false, false};

            if (wanted()) fail_every_allocation(of, &c, backward);
        }
}

START_TEST(every_allocation_may_fail)
{
    for (int o = 0; o < OPTION_SUBJECTS; o++) fail_every_allocation_of(&option_subjects[o], RAGGED);
    for (int o = 0; o < VOXEL_SUBJECTS; o++) fail_every_allocation_of(&voxel_subjects[o], STRIDED);
}
END_TEST

/* The right splits are 0 0 40 40 60 60, those of queries 0 1 1 6 11 13. */
static const struct {
    int     at;
    int64_t value;
} wrong[] = {{0, 1},         {0, -1},        {5, 5},         {5, 61},   {5, INT64_MAX}, {1, 70},
             {1, INT64_MIN}, {3, INT64_MAX}, {2, INT64_MIN}, {3, 1000}, {4, -7}};

static void try_wrong_splits(const subject *of, trial *t, const muvox_sets *sets)
{
    int64_t *const splits = (int64_t *)(uintptr_t)sets->splits;

    for (int w = 0; w < COUNT(wrong); w++) {
        const int64_t right = splits[wrong[w].at];

        doing("%s, split %d is %lld", of->name, wrong[w].at, (long long)wrong[w].value);
        splits[wrong[w].at] = wrong[w].value;
        RUN(t->forward, &t->op, MUVOX_SIMD_AUTO, 1);
        RUN(t->backward, &t->op, MUVOX_SIMD_AUTO, 1);
        splits[wrong[w].at] = right;
        for (int r = 0; r < t->count; r++)
            assert_gaps_untouched(t->results[r].name, &t->p, &t->results[r].sets, t->results[r].m);
    }
}

/* Nobody reads splits on a device before the kernels do: wrong ones give wrong results, nothing beside is touched. */
START_TEST(wrong_splits_harm_nothing)
{
    unsetenv("MUVOX_CHECK");
    for (int g = 0; g < COUNT(guards); g++)
        for (int o = 0; o < OPTION_SUBJECTS; o++)
            for (int n = 0; runs_here(option_subjects[o].name) && n < option_subjects[o].count; n++) {
                const subject *of = &option_subjects[o];
                trial_case     c = {RAGGED_STRIDED, MUVOX_F32, 40, of->options[n], false, false};
                trial          t;

                if (!wanted()) continue;
                guard_blocks(guards[g]);
                start(&t, of, &c);
                try_wrong_splits(of, &t, &t.p.sets);
                if (c.options & QUERIES) try_wrong_splits(of, &t, &t.op.knn.query_sets);
                problem_free(&t.p);
                try_all_kernels(of->name, of->make, &c);
            }
}
END_TEST

START_TEST(wrong_splits_of_queries_are_refused)
{
    const trial_case c = {RAGGED, MUVOX_F32, 40, QUERIES, false, false};
    muvox_context    ctx = context(MUVOX_SIMD_AUTO, 0);
    trial            t;
    int64_t         *splits;

    setenv("MUVOX_CHECK", "1", 1);
    start(&t, &option_subjects[0], &c);
    splits = (int64_t *)(uintptr_t)t.op.knn.query_sets.splits;
    for (int w = 0; w < COUNT(wrong); w++) {
        const int64_t right = splits[wrong[w].at];

        doing("split %d of the queries is %lld", wrong[w].at, (long long)wrong[w].value);
        splits[wrong[w].at] = wrong[w].value;
        assert_refused(&t.p, &ctx, t.forward(&ctx, &t.op), MUVOX_BAD_ARGUMENT, "knn", "query_splits");
        assert_refused(&t.p, &ctx, t.backward(&ctx, &t.op), MUVOX_BAD_ARGUMENT, "knn", "query_splits");
        splits[wrong[w].at] = right;
    }
    succeed(t.forward(&ctx, &t.op), &ctx);
    unsetenv("MUVOX_CHECK");
    problem_free(&t.p);
}
END_TEST

/* The neighbours that a call reads, if it does. */
static muvox_matrix neighbours_of(const operator_call *call, const descriptor *op)
{
    if (!strcmp(call->op, "aggregate")) return op->aggregate.neighbours;
    if (!strcmp(call->direction, "forward")) return (muvox_matrix){0};
    if (!strcmp(call->op, "knn")) return as_matrix(op->knn.neighbours);
    return strcmp(call->op, "gravnet") != 0 ? (muvox_matrix){0} : as_matrix(op->gravnet.neighbours);
}

/* Neighbours outside their set count as none. */
START_TEST(wrong_neighbours_are_passed_over)
{
    const int32_t outside[] = {9, 20, -2, INT32_MIN, INT32_MAX, 1 << 30};

    for (int n = 0; n < CALLS; n++)
        for (int g = 0; runs_here(calls[n].op) && g < COUNT(guards); g++) {
            const operator_call *const call = &calls[n];
            problem                    p, q;
            descriptor                 op, none;
            muvox_matrix               neighbours, empty;
            muvox_context              ctx = context(MUVOX_SIMD_AUTO, 1);

            guard_blocks(guards[g]);
            op = call->make(&p, STRIDED, 9);
            none = call->make(&q, STRIDED, 9);
            neighbours = neighbours_of(call, &op);
            empty = neighbours_of(call, &none);
            doing("%s %s with wrong neighbours", call->op, call->direction);
            for (int64_t s = 0; neighbours.data && s < p.sets.count; s++)
                for (int64_t i = 0; i < set_rows(&p.sets, s); i++) {
                    set_value(&neighbours, &p.sets, s, i, i % neighbours.cols, outside[(s + i) % COUNT(outside)]);
                    set_value(&empty, &q.sets, s, i, i % neighbours.cols, -1);
                }
            succeed(call->run(&ctx, &op), &ctx);
            succeed(call->run(&ctx, &none), &ctx);
            assert_same_outputs(&p, &q);
            problem_free(&p);
            problem_free(&q);
        }
}
END_TEST

START_TEST(devices_that_are_not_there_are_refused)
{
    int devices, missing[3] = {-1, 0, INT32_MAX};

    ck_assert_int_eq(cudaGetDeviceCount(&devices), cudaSuccess);
    missing[1] = devices;
    for (int n = 0; n < CALLS; n++)
        for (int m = 0; runs_here(calls[n].op) && m < COUNT(missing); m++) {
            problem          p;
            const descriptor op = calls[n].make(&p, RAGGED, 20);
            muvox_context    ctx = context(MUVOX_SIMD_AUTO, 0);

            doing("%s %s on device %d", calls[n].op, calls[n].direction, missing[m]);
            ctx.device = missing[m];
            assert_refused(&p, &ctx, calls[n].run(&ctx, &op), MUVOX_DEVICE_ERROR, calls[n].op, "device");
            ctx.device = 0;
            succeed(calls[n].run(&ctx, &op), &ctx);
            problem_free(&p);
        }
}
END_TEST

static void no_guards(void)
{
    guard_blocks(0);
}

Suite *cuda_suite(void)
{
    Suite *const suite = suite_create("cuda");
    TCase *const tests = tcase_create("cuda");

    tcase_add_checked_fixture(tests, NULL, no_guards);
    tcase_add_loop_test(tests, sets_of_every_size, 0, 4);
    tcase_add_loop_test(tests, many_small_sets, 0, 4);
    tcase_add_test(tests, every_allocation_may_fail);
    tcase_add_test(tests, wrong_splits_harm_nothing);
    tcase_add_test(tests, wrong_splits_of_queries_are_refused);
    tcase_add_test(tests, wrong_neighbours_are_passed_over);
    tcase_add_test(tests, devices_that_are_not_there_are_refused);
    suite_add_tcase(suite, tests);
    return suite;
}
