/* What all operators share: names and version, choice of kernels, contexts, sets, memory, failing allocations. */
#define _POSIX_C_SOURCE 200809L /* setenv, fork */

#include "calls.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Loop tests run once for every call. */
#define CALL_TEST(test)                                                                                                \
    for (int call = 0; call < CALLS; call++)                                                                           \
        if (runs_here(calls[call].op)) tcase_add_loop_test(tests, test, call, call + 1)

static muvox_status run(const operator_call *call, const descriptor *op, muvox_context *ctx)
{
    return call->run(ctx, op);
}

static void run_well(const operator_call *call, const descriptor *op, muvox_context *ctx)
{
    const muvox_status status = run(call, op, ctx);

    ck_assert_msg(status == MUVOX_OK && !ctx->message[0], "%s: %s %s: %s, %s", done(), call->op, call->direction,
                  muvox_status_name(status), ctx->message);
}

START_TEST(statuses_have_names)
{
    ck_assert_str_eq(muvox_status_name(MUVOX_OK), "MUVOX_OK");
    ck_assert_str_eq(muvox_status_name(MUVOX_BAD_ARGUMENT), "MUVOX_BAD_ARGUMENT");
    ck_assert_str_eq(muvox_status_name(MUVOX_BAD_SHAPE), "MUVOX_BAD_SHAPE");
    ck_assert_str_eq(muvox_status_name(MUVOX_BAD_DTYPE), "MUVOX_BAD_DTYPE");
    ck_assert_str_eq(muvox_status_name(MUVOX_OUT_OF_MEMORY), "MUVOX_OUT_OF_MEMORY");
    ck_assert_str_eq(muvox_status_name(MUVOX_DEVICE_ERROR), "MUVOX_DEVICE_ERROR");
    ck_assert_str_eq(muvox_status_name(MUVOX_UNSUPPORTED), "MUVOX_UNSUPPORTED");
    ck_assert_str_eq(muvox_status_name((muvox_status)77), "unknown");
    ck_assert_str_eq(muvox_status_name((muvox_status)-1), "unknown");
}
END_TEST

/* The build passes the project's version to this test. */
START_TEST(the_library_says_what_it_is)
{
    ck_assert_str_eq(muvox_version(), PROJECT_VERSION);
    ck_assert_ptr_nonnull(strstr(muvox_build_info(), "reference"));
    ck_assert_ptr_nonnull(strstr(muvox_build_info(), "portable"));
    ck_assert_ptr_null(strchr(muvox_build_info(), '\n'));
}
END_TEST

static const char *const simd_names[] = {"auto", "reference", "portable", "avx2", "avx512"};

START_TEST(auto_runs_the_best_kernels_there_are)
{
    muvox_simd simds[4];
    const int  n = all_simds(simds);

    unsetenv("MUVOX_SIMD");
    ck_assert_str_eq(muvox_simd_name(), simd_names[simds[n - 1]]);
    setenv("MUVOX_SIMD", "", 1);
    ck_assert_str_eq(muvox_simd_name(), simd_names[simds[n - 1]]);
    setenv("MUVOX_SIMD", "auto", 1);
    ck_assert_str_eq(muvox_simd_name(), simd_names[simds[n - 1]]);
    for (int v = 0; v < n; v++) {
        setenv("MUVOX_SIMD", simd_names[simds[v]], 1);
        ck_assert_str_eq(muvox_simd_name(), simd_names[simds[v]]);
    }
}
END_TEST

/* MUVOX_SIMD=reference gives the bits of the plain kernels, unless the context names others. */
START_TEST(environment_chooses_the_kernels)
{
    const operator_call *const call = &calls[_i];
    problem                    plain, forced, named, portable;
    muvox_context              ctx = context(MUVOX_SIMD_REFERENCE, 1), automatic = context(MUVOX_SIMD_AUTO, 1);
    descriptor                 op = call->make(&plain, UNIFORM, 40);

    doing("MUVOX_SIMD=reference, %s %s", call->op, call->direction);
    run_well(call, &op, &ctx);
    setenv("MUVOX_SIMD", "reference", 1);
    op = call->make(&forced, UNIFORM, 40);
    run_well(call, &op, &automatic);
    assert_same_outputs(&forced, &plain);
    ctx.simd = MUVOX_SIMD_PORTABLE;
    op = call->make(&portable, UNIFORM, 40);
    run_well(call, &op, &ctx);
    setenv("MUVOX_SIMD", "portable", 1);
    op = call->make(&named, UNIFORM, 40);
    run_well(call, &op, &automatic);
    assert_same_outputs(&named, &portable);
    problem_free(&plain);
    problem_free(&forced);
    problem_free(&named);
    problem_free(&portable);
}
END_TEST

START_TEST(an_unknown_simd_is_refused)
{
    const operator_call *const call = &calls[_i];
    problem                    p;
    const descriptor           op = call->make(&p, UNIFORM, 6);
    muvox_context              ctx = context(MUVOX_SIMD_AUTO, 1);

    setenv("MUVOX_SIMD", "sse9", 1);
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "MUVOX_SIMD is \"sse9\"");
    setenv("MUVOX_SIMD", "AVX2", 1); /* names are in small letters */
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "AVX2");
    ctx.simd = (muvox_simd)5;
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "simd");
    ctx.simd = (muvox_simd)-1;
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "simd");
    ctx.simd = MUVOX_SIMD_PORTABLE; /* named by the context: the environment is not asked */
    run_well(call, &op, &ctx);
    problem_free(&p);
}
END_TEST

START_TEST(contexts_and_descriptors_of_wrong_size_are_refused)
{
    const operator_call *const call = &calls[_i];
    problem                    p;
    const descriptor           good = call->make(&p, UNIFORM, 6);
    descriptor                 op = good;
    muvox_context              ctx = context(MUVOX_SIMD_AUTO, 1);

    doing("%s %s", call->op, call->direction);
    ck_assert_int_eq(run(call, &good, NULL), MUVOX_BAD_ARGUMENT);
    ctx.struct_size = 0;
    memset(ctx.message, '?', sizeof ctx.message); /* too small to hold a message: it is left alone */
    ck_assert_int_eq(run(call, &good, &ctx), MUVOX_BAD_ARGUMENT);
    ctx.struct_size = sizeof ctx - 1;
    ck_assert_int_eq(run(call, &good, &ctx), MUVOX_BAD_ARGUMENT);
    for (size_t at = 0; at < sizeof ctx.message; at++) ck_assert(ctx.message[at] == '?');
    ctx.struct_size = sizeof ctx;
    op.any.struct_size--;
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "struct_size");
    op.any.struct_size = 0;
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "struct_size");
    ctx.struct_size = sizeof ctx + 64; /* a newer caller */
    op.any.struct_size = good.any.struct_size + 64;
    run_well(call, &op, &ctx);
    problem_free(&p);
}
END_TEST

static void *never_alloc(void *user, size_t bytes)
{
    (void)user;
    (void)bytes;
    return NULL;
}

static void never_free(void *user, void *block)
{
    (void)user;
    (void)block;
    abort();
}

START_TEST(wrong_contexts_are_refused)
{
    const operator_call *const call = &calls[_i];
    problem                    p;
    const descriptor           op = call->make(&p, UNIFORM, 6);
    muvox_context              ctx = context(MUVOX_SIMD_AUTO, -1);

    doing("%s %s", call->op, call->direction);
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "threads");
    ctx.threads = 1;
    ctx.alloc = never_alloc;
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "alloc and free");
    ctx.alloc = NULL;
    ctx.free = never_free;
    assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, "alloc and free");
    ctx.free = NULL;
    run_well(call, &op, &ctx); /* the message of the error before is gone */
    problem_free(&p);
}
END_TEST

#define WRONG_SETS(change, argument)                                                                                   \
    do {                                                                                                               \
        descriptor op = good;                                                                                          \
        change;                                                                                                        \
        doing("%s %s, %s", call->op, call->direction, #change);                                                        \
        assert_refused(&p, &ctx, run(call, &op, &ctx), MUVOX_BAD_ARGUMENT, call->op, argument);                        \
    } while (0)

START_TEST(wrong_splits_are_refused)
{
    const operator_call *const call = &calls[_i];
    problem                    p;
    const descriptor           good = call->make(&p, RAGGED, 6); /* 0 0 6 6 9 9 */
    int64_t *const             splits = (int64_t *)(uintptr_t)good.any.sets.splits;
    muvox_context              ctx = context(MUVOX_SIMD_AUTO, 1);

    setenv("MUVOX_CHECK", "1", 1); /* read on a device only */
    WRONG_SETS(splits[0] = 1, "splits begin");
    WRONG_SETS(splits[0] = -1, "splits begin");
    splits[0] = 0;
    WRONG_SETS(splits[5] = 8, "splits");
    WRONG_SETS(splits[5] = INT64_MAX, "splits");
    splits[5] = 9;
    WRONG_SETS(splits[1] = 7, "splits decrease");
    WRONG_SETS(splits[1] = INT64_MIN, "splits decrease");
    splits[1] = 0;
    WRONG_SETS(splits[3] = 100, "splits reach 100");
    splits[3] = 6;
    WRONG_SETS(splits[1] = INT64_MAX, "splits reach");
    splits[1] = 0;
    doing("%s %s after wrong splits", call->op, call->direction);
    run_well(call, &good, &ctx);
    unsetenv("MUVOX_CHECK");
    problem_free(&p);
}
END_TEST

START_TEST(wrong_uniform_sets_are_refused)
{
    const operator_call *const call = &calls[_i];
    problem                    p;
    const descriptor           good = call->make(&p, UNIFORM, 6);
    muvox_context              ctx = context(MUVOX_SIMD_AUTO, 1);

    WRONG_SETS(op.any.sets.size = 5, "sets");
    WRONG_SETS(op.any.sets.size = -6, "sets");
    if (strcmp(call->op, "pool") != 0) { /* whose outputs have one row per set, and are looked at before */
        WRONG_SETS(op.any.sets.count = 4, "sets");
        WRONG_SETS(op.any.sets.count = -3, "sets");
        WRONG_SETS((op.any.sets.count = 0, op.any.sets.size = 18), "sets");
        WRONG_SETS((op.any.sets.count = INT64_MAX / 2, op.any.sets.size = INT64_MAX / 2), "sets");
    }
    problem_free(&p);
}
END_TEST

/* No sets, and sets without rows: nothing to do, and nothing is needed for it. */
START_TEST(nothing_to_do_is_no_error)
{
    const operator_call *const call = &calls[_i];
    muvox_simd                 simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int layout = UNIFORM; layout <= RAGGED; layout++) {
            problem       p;
            descriptor    op = call->make(&p, layout, 0);
            muvox_context ctx = context(simds[v], 2);

            doing("simd %d, layout %d, no rows", (int)simds[v], layout);
            run_well(call, &op, &ctx);
            problem_free(&p);
        }
}
END_TEST

/* Every row belongs to one work item, whatever the sets and the size of a block. */
static void assert_items_cover(const muvox_sets *sets, int64_t block)
{
    int64_t row, items = 0, covered = 0, s = 0, next = 0; /* items come in order: of sets, and of rows within one */

    for (int64_t item = 0; item < block_items(sets, block); item++, items++) {
        const int64_t set = block_set(sets, block, item, &row);

        if (set != s) next = 0;
        if (set < s || set >= sets->count || row != next)
            ck_abort_msg("%s: item %d is row %d of set %d", done(), (int)item, (int)row, (int)set);
        s = set;
        next = row + block;
        if (row < set_rows(sets, set)) covered += set_rows(sets, set) - row < block ? set_rows(sets, set) - row : block;
    }
    ck_assert_msg(covered == sets->rows, "%s: %d of %d rows", done(), (int)covered, (int)sets->rows);
    ck_assert_int_le(items, sets->rows / block + sets->count);
}

START_TEST(work_items_cover_every_row_once)
{
    for (int64_t block = 1; block <= 64; block *= 2)
        for (uint64_t seed = 0; seed < 200; seed++) {
            problem    p = {.random = seed};
            int64_t    splits[21] = {0}, size = random_below(&p, 100), most = 0;
            muvox_sets uniform = {NULL, random_below(&p, 20), 0, size}, ragged = {splits, random_below(&p, 21), 0, 0};

            for (int64_t s = 0; s < ragged.count; s++) {
                const int64_t M = random_below(&p, 2) ? random_below(&p, 3 * block) : 0;

                splits[s + 1] = splits[s] + M;
                if (M > most) most = M;
            }
            ragged.rows = splits[ragged.count];
            uniform.rows = uniform.count * size;
            doing("blocks of %d, seed %d", (int)block, (int)seed);
            assert_items_cover(&ragged, block);
            assert_items_cover(&uniform, block);
            ck_assert_int_eq(largest_set(&ragged), most);
            ck_assert_int_eq(largest_set(&uniform), uniform.count ? size : 0);
        }
}
END_TEST

/* An allocator that counts, and fails when it is told to. */
typedef struct {
    int    calls, fail_at; /* fail_at 1: the first call fails; 0: none */
    int    live;
    size_t bytes, peak;
    struct {
        void  *data;
        size_t bytes;
    } block[16];
} counter;

static void *counted_alloc(void *user, size_t bytes)
{
    counter *const c = user;
    void          *data;

    if (++c->calls == c->fail_at) return NULL;
    ck_assert_int_lt(c->live, COUNT(c->block));
    data = workspace_make(bytes);
    if (!data) return NULL;
    c->block[c->live].data = data;
    c->block[c->live++].bytes = bytes;
    c->bytes += bytes;
    if (c->bytes > c->peak) c->peak = c->bytes;
    return data;
}

static void counted_free(void *user, void *data)
{
    counter *const c = user;
    int            b = c->live - 1;

    while (b >= 0 && c->block[b].data != data) b--;
    ck_assert_msg(b >= 0, "%s: gives back what was never given, or twice", done());
    workspace_drop(data);
    c->bytes -= c->block[b].bytes;
    c->block[b] = c->block[--c->live];
}

static muvox_context counted_context(muvox_simd simd, int threads, counter *c)
{
    muvox_context ctx = context(simd, threads);

    ctx.alloc = counted_alloc;
    ctx.free = counted_free;
    ctx.user = c;
    return ctx;
}

/* The n-th allocation fails, for every n until there are no more. */
static void fail_every_allocation(const operator_call *call, muvox_simd simd, layout layout)
{
    problem       p, q;
    descriptor    op = call->make(&p, layout, 20), expected = call->make(&q, layout, 20);
    counter       c = {0};
    muvox_context ctx = context(simd, 2);

    doing("%s %s, simd %d", call->op, call->direction, (int)simd);
    run_well(call, &expected, &ctx);
    ctx = counted_context(simd, 2, &c);
    for (int fail_at = 1;; fail_at++) {
        muvox_status status;

        c = (counter){.fail_at = fail_at};
        status = run(call, &op, &ctx);
        ck_assert_msg(c.live == 0, "%s: %d blocks leaked", done(), c.live);
        if (c.calls < fail_at) {
            ck_assert_msg(status == MUVOX_OK, "%s: %s", done(), ctx.message);
            break;
        }
        assert_refused(&p, &ctx, status, MUVOX_OUT_OF_MEMORY, call->op, "out of memory");
        ck_assert_int_lt(fail_at, 100);
    }
    assert_same_outputs(&p, &q);
    problem_free(&p);
    problem_free(&q);
}

START_TEST(every_allocation_may_fail)
{
    muvox_simd simds[4];

    for (int n = all_simds(simds), v = ON_CPU ? 0 : 1; v < n; v++) { /* the plain kernel runs on the CPU */
        fail_every_allocation(&calls[_i], simds[v], STRIDED);
        fail_every_allocation(&calls[_i], simds[v], RAGGED);
    }
}
END_TEST

static size_t peak_of(const operator_call *call, int64_t rows, int threads)
{
    problem          p;
    const descriptor op = call->make(&p, UNIFORM, rows);
    counter          c = {0};
    muvox_context    ctx = counted_context(MUVOX_SIMD_AUTO, threads, &c);

    run_well(call, &op, &ctx);
    problem_free(&p);
    return c.peak;
}

static bool is(const operator_call *call, const char *op, const char *direction)
{
    return !strcmp(call->op, op) && !strcmp(call->direction, direction);
}

/* Workspace as the headers say: O(threads · M · width), far from the pair tensor (rows × rows); the forward calls of
 * attention and aggregate need the same for any set, pool nothing at all. */
START_TEST(workspace_is_as_small_as_the_headers_say)
{
    const operator_call *const call = &calls[_i];
    const int64_t              rows = 400;
    const bool                 constant = is(call, "attention", "forward") || is(call, "aggregate", "forward");
    const size_t half = peak_of(call, rows / 2, 1), one = peak_of(call, rows, 1), two = peak_of(call, rows, 2);

    doing("%s %s: %zu bytes for half the rows, %zu for all, %zu with two threads", call->op, call->direction, half, one,
          two);
    ck_assert_msg(one <= (constant ? half : 2 * half), "%s", done());
    ck_assert_msg(two <= 2 * one, "%s", done());
    ck_assert_msg(one < (size_t)(rows * rows) * sizeof(float) / 4, "%s", done());
    ck_assert_msg(strcmp(call->op, "pool") != 0 || two == 0, "%s", done());
}
END_TEST

/* As in a data loader: the parent has run threads, its forked child runs one. */
START_TEST(a_forked_child_can_call)
{
    const operator_call *const call = &calls[_i];
    problem                    p, q;
    const descriptor           op = call->make(&p, UNIFORM, 40), again = call->make(&q, UNIFORM, 40);
    muvox_context              ctx = context(MUVOX_SIMD_AUTO, 2);
    int                        status;
    pid_t                      child;

    doing("%s %s in a forked child", call->op, call->direction);
    run_well(call, &op, &ctx);
    child = fork();
    ck_assert_int_ge(child, 0);
    if (!child) {
        alarm(20);
        ctx.threads = 1;
        status = run(call, &again, &ctx);
        for (int b = 0; b < p.blocks; b++)
            if (memcmp(p.block[b].data, q.block[b].data, p.block[b].output ? p.block[b].bytes : 0) != 0) _exit(2);
        _exit(status != MUVOX_OK);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status 0x%x", done(), (unsigned)status);
    problem_free(&p);
    problem_free(&q);
}
END_TEST

Suite *context_suite(void)
{
    Suite *const suite = suite_create("context");
    TCase *const tests = tcase_create("context");

    tcase_add_test(tests, statuses_have_names);
    tcase_add_test(tests, the_library_says_what_it_is);
    if (ON_CPU) {
        tcase_add_test(tests, auto_runs_the_best_kernels_there_are);
        tcase_add_test(tests, work_items_cover_every_row_once);
        CALL_TEST(environment_chooses_the_kernels);
        CALL_TEST(an_unknown_simd_is_refused);
        CALL_TEST(workspace_is_as_small_as_the_headers_say);
        CALL_TEST(a_forked_child_can_call);
    }
    CALL_TEST(contexts_and_descriptors_of_wrong_size_are_refused);
    CALL_TEST(wrong_contexts_are_refused);
    CALL_TEST(wrong_splits_are_refused);
    CALL_TEST(wrong_uniform_sets_are_refused);
    CALL_TEST(nothing_to_do_is_no_error);
    CALL_TEST(every_allocation_may_fail);
    suite_add_tcase(suite, tests);
    return suite;
}
