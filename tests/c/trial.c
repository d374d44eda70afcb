/* What trial.h says. */
#include "trial.h"

#include <string.h>

void forward_result(trial *t, const char *name, const muvox_sets *sets, const muvox_output *m, bool exact,
                    const muvox_matrix *g)
{
    if (m->data) t->results[t->count++] = (result){name, *sets, m, exact, m->dtype, NULL, g};
}

void gradient_result(trial *t, const char *name, const muvox_sets *sets, const muvox_output *m, const muvox_matrix *x)
{
    if (m->data) t->results[t->count++] = (result){name, *sets, m, false, m->dtype, x, NULL};
}

muvox_matrix row_weights(problem *p, const trial_case *c)
{
    const muvox_matrix m = random_input(p, wide(c->dtype), 1, 1);

    for (int64_t s = 0; s < p->sets.count; s++)
        for (int64_t i = 0; i < set_rows(&p->sets, s); i++) {
            const double weight = c->positive || random_below(p, 4) ? random_between(p, 0.2, 2) : 0;

            set_value(&m, &p->sets, s, i, 0, weight);
        }
    return m;
}

static void start(trial *t, trial_maker make, const trial_case *c)
{
    memset(t, 0, sizeof *t);
    make(t, c);
}

static void run_both(const trial *t, muvox_simd simd, int threads)
{
    RUN(t->forward, &t->op, simd, threads);
    RUN(t->backward, &t->op, simd, threads);
}

/* The block of memory that holds a matrix. */
static int block_of(const problem *p, const muvox_output *m)
{
    for (int b = 0; b < p->blocks; b++) {
        const uintptr_t begin = (uintptr_t)p->block[b].data;

        if ((uintptr_t)m->data >= begin && (uintptr_t)m->data < begin + p->block[b].bytes) return b;
    }
    return -1;
}

static void compare_results(const trial *got, const trial *expected, bool gradients)
{
    for (int n = 0; n < got->count; n++) {
        const result *r = &got->results[n];

        if (gradients != (r->x != NULL)) continue;
        if (r->exact)
            assert_same(r->name, &r->sets, r->m, expected->results[n].m);
        else
            assert_close(r->name, &r->sets, r->m, expected->results[n].m, 4 * tolerance_of(r->rounding), 1);
    }
}

/* Backward reads what forward saved: give both the same, or their roundings would add up. */
static void copy_forward(const trial *to, const trial *from)
{
    for (int n = 0; n < to->count; n++) {
        const int b = block_of(&to->p, to->results[n].m);

        if (!to->results[n].x && b >= 0) memcpy(to->p.block[b].data, from->p.block[b].data, to->p.block[b].bytes);
    }
}

static void compare_kernels(trial_maker make, const trial_case *c, const trial *plain, muvox_simd simd)
{
    trial      t, again;
    trial_case clean = *c;

    start(&t, make, c);
    RUN(t.forward, &t.op, simd, 1);
    compare_results(&t, plain, false);
    copy_forward(&t, plain);
    RUN(t.backward, &t.op, simd, 1);
    compare_results(&t, plain, true);
    problem_free(&t.p);

    start(&t, make, c);
    run_both(&t, simd, 1);
    for (int n = 0; n < t.count; n++)
        if (t.results[n].m->rows) assert_gaps_untouched(t.results[n].name, &t.p, &t.results[n].sets, t.results[n].m);
    clean.poison = !c->poison;
    for (int turn = 0; turn < 2; turn++) {
        start(&again, make, turn ? &clean : c);
        run_both(&again, simd, 3);
        assert_same_outputs(&again.p, &t.p);
        problem_free(&again.p);
    }
    problem_free(&t.p);
}

static void name_trial(const char *op, const trial_case *c, muvox_simd simd)
{
    doing("%s simd %d, %s, layout %d, M %d, options 0x%x, poison %d", op, (int)simd, name_of(c->dtype), (int)c->layout,
          (int)c->M, c->options, c->poison);
}

void try_all_kernels(const char *op, trial_maker make, const trial_case *c)
{
    muvox_simd simds[4];
    trial      plain;

    if (!wanted()) return;
    name_trial(op, c, MUVOX_SIMD_REFERENCE);
    start(&plain, make, c);
    run_both(&plain, MUVOX_SIMD_REFERENCE, 1);
    for (int n = all_simds(simds), v = 1; v < n; v++) {
        name_trial(op, c, simds[v]);
        compare_kernels(make, c, &plain, simds[v]);
    }
    problem_free(&plain.p);
}

static double loss(const void *op, muvox_simd simd)
{
    const trial *t = op;
    double       sum = 0;

    RUN(t->forward, &t->op, simd, 1);
    for (int n = 0; n < t->count; n++) {
        const result *r = &t->results[n];

        for (int64_t s = 0; r->g && s < r->sets.count; s++)
            for (int64_t i = 0; i < set_rows(&r->sets, s); i++)
                for (int64_t col = 0; col < r->m->cols; col++) {
                    const double y = result_at(r->m, &r->sets, s, i, col);

                    if (y - y == 0) sum += y * value_at(r->g, &r->sets, s, i, col); /* infinities are constant */
                }
    }
    return sum;
}

void try_gradients(const char *op, trial_maker make, const trial_case *c)
{
    muvox_simd simds[4];

    if (!wanted()) return;
    for (int n = all_simds(simds), v = 0; v < n; v++) {
        trial t;

        name_trial(op, c, simds[v]);
        start(&t, make, c);
        run_both(&t, simds[v], 1);
        for (int r = 0; r < t.count; r++)
            if (t.results[r].x)
                assert_gradient(t.results[r].name, &t.results[r].sets, t.results[r].x, t.results[r].m, loss, &t,
                                simds[v]);
        problem_free(&t.p);
    }
}
