/* neighbour_attention: exact answers, every kernel against the plain one and that against the formula, determinism, masks,
 * gradients, refusals, missing memory. */
#include "neighbour_formula.h"

#define FORWARD  muvox_neighbour_attention_forward
#define BACKWARD muvox_neighbour_attention_backward

typedef struct {
    layout           layout;
    muvox_dtype      coords, feats;
    int64_t          M, k, d, A, F;
    muvox_aggregates aggregates;
    muvox_activation activation;
    int              offset;
} neighbour_case;

/* Outputs for inputs that are set. */
static void add_outputs(problem *p, descriptor *op)
{
    const int64_t F = op->feats.cols;

    op->out = output(p, op->feats.dtype, kinds(op->aggregates) * F);
    op->neighbours = output(p, MUVOX_I32, op->neighbours_k);
    if (winner_kinds(op->aggregates))
        op->winners = output(p, op->neighbours_k <= 254 ? MUVOX_U8 : MUVOX_I32, winner_kinds(op->aggregates) * F);
    for (int g = 0; g < GRADIENTS; g++) {
        const muvox_matrix *const m = input(op, g);

        if (exists(op, g))
            *gradient(op, g) =
                g < ROW_GRADIENTS ? output(p, m->dtype, m->cols) : row_alone(output_per_set(p, m->dtype, m->cols), 0);
    }
}

static muvox_matrix random_bias(problem *p, muvox_dtype dtype, int64_t cols)
{
    return input_row_alone(random_input_per_set(p, wide(dtype), cols, 1), 0);
}

/* The same problem for the same case, each time it is called. */
static descriptor make(problem *p, const neighbour_case *c)
{
    descriptor op = {.struct_size = sizeof op,
                     .neighbours_k = c->k,
                     .scale = 3,
                     .aggregates = c->aggregates,
                     .activation = c->activation,
                     .offset = c->offset};

    *p = problem_make(c->layout, 1 + c->M % 3, c->M, (uint64_t)(c->M * 1000 + c->k));
    op.sets = p->sets;
    op.coords = random_input(p, c->coords, c->d, 0.5);
    op.feats = random_input(p, c->feats, c->F, 2);
    op.q = random_input(p, c->feats, c->A, 1);
    op.k = random_input(p, c->feats, c->A, 1);
    op.v = random_input(p, c->feats, c->F, 2);
    if (c->offset) op.o = random_input(p, c->feats, c->F, 1);
    op.bias_q = random_bias(p, c->feats, c->A);
    op.bias_k = random_bias(p, c->feats, c->A);
    op.bias_v = random_bias(p, c->feats, c->F);
    op.bias_out = random_bias(p, c->feats, c->F);
    op.grad_out = random_input(p, c->feats, kinds(c->aggregates) * c->F, 1);
    add_outputs(p, &op);
    return op;
}

static void assert_all_gaps_untouched(const problem *p, descriptor *op)
{
    assert_gaps_untouched("out", p, &p->sets, &op->out);
    assert_gaps_untouched("neighbours", p, &p->sets, &op->neighbours);
    if (op->winners.data) assert_gaps_untouched("winners", p, &p->sets, &op->winners);
    for (int g = 0; g < GRADIENTS; g++)
        if (exists(op, g)) assert_gaps_untouched(gradient_names[g], p, sets_of(op, g), gradient(op, g));
}

/* Every set gives alone what it gives among others, bit for bit, but for the biases, which belong to all. */
static void assert_sets_independent(const problem *p, descriptor *batch, muvox_simd simd)
{
    for (int64_t s = 0; s < p->sets.count; s++) {
        problem      q = {.sets = sets_alone(&p->sets, s)};
        descriptor   op = *batch;
        muvox_output out = output_alone(batch->out, &p->sets, s);

        if (!q.sets.rows) continue;
        op.sets = q.sets;
        for (int g = 0; g < ROW_GRADIENTS; g++)
            if (exists(&op, g)) *input(&op, g) = matrix_alone(*input(batch, g), &p->sets, s);
        op.grad_out = matrix_alone(batch->grad_out, &p->sets, s);
        add_outputs(&q, &op);
        RUN(FORWARD, &op, simd, 2);
        RUN(BACKWARD, &op, simd, 2);
        assert_same("out of a set alone", &q.sets, &op.out, &out);
        for (int g = 0; g < ROW_GRADIENTS; g++) {
            if (!exists(&op, g)) continue;
            out = output_alone(*gradient(batch, g), &p->sets, s);
            assert_same(gradient_names[g], &q.sets, gradient(&op, g), &out);
        }
        problem_free(&q);
    }
}

/* Each gradient has the same bits when it alone is asked for. */
static void assert_single_gradients(const neighbour_case *c, descriptor *all, muvox_simd simd)
{
    for (int which = 0; which < GRADIENTS; which++) {
        problem    q;
        descriptor op = make(&q, c);

        op.neighbours = all->neighbours;
        op.winners = all->winners;
        for (int g = 0; g < GRADIENTS; g++)
            if (g != which) *gradient(&op, g) = (muvox_output){0};
        RUN(BACKWARD, &op, simd, 1);
        if (exists(&op, which))
            assert_same(gradient_names[which], sets_of(&op, which), gradient(&op, which), gradient(all, which));
        problem_free(&q);
    }
}

static void compare(const neighbour_case *c, muvox_simd simd, descriptor *expected)
{
    problem    p, again;
    descriptor op = make(&p, c);
    double     least = 0;

    RUN(FORWARD, &op, simd, 1);
    assert_same("neighbours", &p.sets, &op.neighbours, &expected->neighbours);
    assert_close("out", &p.sets, &op.out, &expected->out, 4 * tolerance_of(c->feats), 0);
    if (op.winners.data)
        assert_winners(&p.sets, &op.winners, &expected->winners, c->aggregates, c->feats != MUVOX_F64, message, &op);
    op.winners = expected->winners;
    RUN(BACKWARD, &op, simd, 1);
    for (int64_t f = 0; f < c->F; f++) /* what is zero but for rounding is held to the largest of the other gradients */
        least = fmax(least, fabs(result_at(&expected->grad_bias_out, &one_row, 0, 0, f)));
    for (int g = 0; g < GRADIENTS; g++)
        if (exists(&op, g))
            assert_close(gradient_names[g], sets_of(&op, g), gradient(&op, g), gradient(expected, g),
                         4 * tolerance_of(gradient(&op, g)->dtype), least);
    assert_single_gradients(c, &op, simd);
    problem_free(&p);

    op = make(&p, c);
    RUN(FORWARD, &op, simd, 1);
    RUN(BACKWARD, &op, simd, 1);
    assert_all_gaps_untouched(&p, &op);
    if (c->layout != SHARED) assert_sets_independent(&p, &op, simd);
    for (int threads = 1; threads <= 3; threads++) {
        const descriptor repeated = make(&again, c);

        RUN(FORWARD, &repeated, simd, threads);
        RUN(BACKWARD, &repeated, simd, threads);
        assert_same_outputs(&again, &p);
        problem_free(&again);
    }
    problem_free(&p);
}

static void name_case(const neighbour_case *c, muvox_simd simd)
{
    doing("neighbour_attention simd %d, %s coords, %s feats, layout %d, M %d, k %d, d %d, A %d, F %d, aggregates 0x%x, "
          "activation %d, offset %d",
          (int)simd, name_of(c->coords), name_of(c->feats), (int)c->layout, (int)c->M, (int)c->k, (int)c->d, (int)c->A,
          (int)c->F, c->aggregates, (int)c->activation, c->offset);
}

static void try_case(const neighbour_case *c)
{
    muvox_simd simds[4];
    problem    p;
    descriptor op = make(&p, c);

    name_case(c, MUVOX_SIMD_REFERENCE);
    RUN(FORWARD, &op, MUVOX_SIMD_REFERENCE, 1);
    RUN(BACKWARD, &op, MUVOX_SIMD_REFERENCE, 1);
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
    const int64_t     sizes[] = {0, 1, 2, 7, 16, 17, 33}, widths[] = {1, 5, 8, 12, 22, 17}, keys[] = {1, 5, 3, 16, 9};
    const muvox_dtype feats = floating_dtypes[_i % 4];

    for (int m = 0; m < COUNT(sizes); m++) {
        const int64_t M = sizes[m], ks[] = {1, 8, 5, M ? M : 2, M + 3, 300};

        for (int turn = 0; turn < 2; turn++) {
            neighbour_case c = {.layout = (layout)(_i / 4),
                                .coords = feats == MUVOX_F64 ? feats : floating_dtypes[(_i + m + turn) % 3],
                                .feats = feats,
                                .M = M,
                                .k = ks[(_i + 3 * m + 4 * turn) % COUNT(ks)],
                                .d = 1 + (_i + m + 5 * turn) % 4,
                                .A = keys[(_i + 2 * m + turn) % COUNT(keys)],
                                .F = widths[(_i + m + 3 * turn) % COUNT(widths)],
                                .aggregates = aggregate_choices[(_i + 2 * m + turn) % AGGREGATE_CHOICES],
                                .activation = (muvox_activation)((_i + m + 2 * turn) % 6),
                                .offset = (_i / 4 + m + turn) % 2};

            if (M > 17 && c.F > 8) c.F = 6; /* the plain one takes its time */
            try_case(&c);
        }
    }
}
END_TEST

/* The plain kernel against the formula of the header, aggregated by sum. */
START_TEST(reference_is_the_formula)
{
    const neighbour_case c = {UNIFORM, MUVOX_F64, MUVOX_F64, 6, 4, 2, 3, 2, MUVOX_SUM, (muvox_activation)(_i % 6),
                              _i / 6};
    problem              p;
    descriptor           op = make(&p, &c);

    name_case(&c, MUVOX_SIMD_REFERENCE);
    RUN(FORWARD, &op, MUVOX_SIMD_REFERENCE, 1);
    for (int64_t i = 0; i < 6; i++)
        for (int64_t f = 0; f < 2; f++) {
            double sum = 0;

            for (int64_t r = 0; r < 4; r++) sum += message(&op, 0, i, r, f);
            ck_assert_double_eq_tol(result_at(&op.out, &p.sets, 0, i, f), sum, 1e-13);
        }
    problem_free(&p);
}
END_TEST

/* Two coincident rows of one feature, queries and keys that differ: P of row 0 is softmax over keys of (0, 0), over queries
 * (1/2, 1/(1 + 2)) and then normalised to (3/5, 2/5); of row 1 (1/3, 2/3) over keys and (1/2, 2/3) to (3/7, 4/7). */
START_TEST(known_answers)
{
    const double x[] = {1, 1}, feats[] = {10, 20}, q[] = {0, 1}, k[] = {0, log(2)}, v[] = {1, 2}, o[] = {4, 8};
    const double keys[] = {10 + 1.5 + .5, 20 + 5 / 3. + .5};
    const double queries[] = {10 + 4 - 7 / 5. + .5, 20 + 8 - 11 / 7. + .5}, zero[] = {0, 0}, half[] = {.5, .5};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), variant = 0; variant < 2 * n; variant++) {
        const int           offset = variant % 2;
        const muvox_simd    simd = simds[variant / 2];
        problem             p = problem_make(UNIFORM, 1, 2, 1);
        descriptor          op = {.struct_size = sizeof op,
                                  .sets = p.sets,
                                  .neighbours_k = 3,
                                  .scale = 10,
                                  .aggregates = MUVOX_MAX,
                                  .activation = MUVOX_RELU,
                                  .offset = offset};
        const double *const expected = offset ? queries : keys;

        doing("neighbour_attention, simd %d, offset %d", (int)simd, offset);
        op.coords = given_input(&p, MUVOX_F64, 1, x);
        op.feats = given_input(&p, MUVOX_F64, 1, feats);
        op.q = given_input(&p, MUVOX_F64, 1, q);
        op.k = given_input(&p, MUVOX_F64, 1, k);
        op.v = given_input(&p, MUVOX_F64, 1, v);
        if (offset) op.o = given_input(&p, MUVOX_F64, 1, o);
        op.bias_q = op.bias_k = op.bias_v = given_input_per_set(&p, MUVOX_F64, 1, zero);
        op.bias_out = given_input_per_set(&p, MUVOX_F64, 1, half);
        op.grad_out = given_input(&p, MUVOX_F64, 1, half);
        add_outputs(&p, &op);
        RUN(FORWARD, &op, simd, 1);
        for (int i = 0; i < 2; i++) {
            ck_assert_double_eq_tol(result_at(&op.out, &p.sets, 0, i, 0), fmax(expected[0], expected[1]), 1e-13);
            ck_assert_int_eq((int)result_at(&op.winners, &p.sets, 0, i, 0), expected[1] > expected[0]);
        }
        RUN(BACKWARD, &op, simd, 1);
        assert_values("grad_coords", &p.sets, &op.grad_coords, zero);
        problem_free(&p);
    }
}
END_TEST

/* Masked rows, full of NaN, change nothing for the others and give zeros. */
START_TEST(masked_rows_take_no_part)
{
    const neighbour_case c = {
        UNIFORM, MUVOX_F64, MUVOX_F64, 8, 5, 2, 3, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX), MUVOX_SWISH, _i};
    const double mask[] = {1, 1, 1, 1, 1, 1, 0, 0};
    muvox_simd   simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem    p, q;
        descriptor op = make(&p, &c), alone = make(&q, &c);

        name_case(&c, simds[v]);
        p.sets.count = op.sets.count = 1; /* the first set, with the mask and without its last rows */
        p.sets.rows = op.sets.rows = 8;
        q.sets = (muvox_sets){NULL, 1, 6, 6};
        alone.sets = q.sets;
        for (int g = 0; g < ROW_GRADIENTS; g++) {
            input(&op, g)->rows = gradient(&op, g)->rows = 8;
            input(&alone, g)->rows = gradient(&alone, g)->rows = 6;
            for (int64_t at = 0; at < 2 * input(&op, g)->cols && exists(&op, g); at++)
                set_value(input(&op, g), &p.sets, 0, 6 + at % 2, at / 2, NAN);
        }
        op.grad_out.rows = op.out.rows = op.neighbours.rows = op.winners.rows = 8;
        alone.grad_out.rows = alone.out.rows = alone.neighbours.rows = alone.winners.rows = 6;
        op.mask = given_input(&p, MUVOX_U8, 1, mask);
        RUN(FORWARD, &op, simds[v], 1);
        RUN(BACKWARD, &op, simds[v], 1);
        RUN(FORWARD, &alone, simds[v], 1);
        RUN(BACKWARD, &alone, simds[v], 1);
        assert_same("out", &q.sets, &op.out, &alone.out);
        for (int g = 0; g < GRADIENTS; g++) {
            const muvox_output *const got = gradient(&op, g);

            if (!exists(&op, g)) continue;
            assert_same(gradient_names[g], sets_of(&alone, g), got, gradient(&alone, g));
            for (int64_t at = 0; at < 2 * got->cols && g < ROW_GRADIENTS; at++)
                ck_assert(result_at(got, &p.sets, 0, 6 + at % 2, at / 2) == 0);
        }
        for (int64_t at = 0; at < 2 * op.out.cols; at++)
            ck_assert(result_at(&op.out, &p.sets, 0, 6 + at % 2, at / 2) == 0);
        problem_free(&p);
        problem_free(&q);
    }
}
END_TEST

static double loss(const void *any, muvox_simd simd)
{
    const descriptor *op = any;

    RUN(FORWARD, op, simd, 1);
    return dot(&op->sets, &op->out, &op->grad_out);
}

START_TEST(gradients_by_finite_differences)
{
    muvox_simd simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++)
        for (int a = 0; a < AGGREGATE_CHOICES; a++) {
            const neighbour_case c = {
                a % 2 ? RAGGED : STRIDED,   MUVOX_F64, MUVOX_F64, 6, 4, 2, 3, 4, aggregate_choices[a],
                (muvox_activation)(_i % 6), _i / 6};
            problem    p;
            descriptor op = make(&p, &c);

            name_case(&c, simds[v]);
            RUN(FORWARD, &op, simds[v], 1);
            RUN(BACKWARD, &op, simds[v], 1);
            for (int g = 0; g < GRADIENTS; g++) {
                const muvox_output *const got = gradient(&op, g);

                if (g == (op.offset ? 6 : 7)) /* the softmax cancels bias_q, or bias_k */
                    for (int64_t a = 0; a < c.A; a++) ck_assert(fabs(result_at(got, &one_row, 0, 0, a)) < 1e-14);
                else if (exists(&op, g))
                    assert_gradient(gradient_names[g], sets_of(&op, g), input(&op, g), got, loss, &op, simds[v]);
            }
            problem_free(&p);
        }
}
END_TEST

static void *no_alloc(void *user, size_t bytes)
{
    (void)user;
    return bytes ? NULL : user;
}

static void no_free(void *user, void *block)
{
    (void)user;
    (void)block;
}

START_TEST(memory_may_be_missing)
{
    const neighbour_case c = {STRIDED, MUVOX_F32, MUVOX_F32, 5, 3, 2, 2, 4, MUVOX_MEAN, MUVOX_RELU, _i};
    muvox_simd           simds[4];

    for (int n = all_simds(simds), v = 0; v < n; v++) {
        problem       p;
        descriptor    op = make(&p, &c);
        muvox_context ctx = context(simds[v], 2);

        doing("neighbour_attention, simd %d", (int)simds[v]);
        ctx.alloc = no_alloc;
        ctx.free = no_free;
        assert_refused(&p, &ctx, FORWARD(&ctx, &op), MUVOX_OUT_OF_MEMORY, "neighbour_attention", "memory");
        RUN(FORWARD, &op, simds[v], 1);
        freeze(&p);
        for (int g = 0; g < GRADIENTS; g++)
            if (exists(&op, g) && g < ROW_GRADIENTS) *gradient(&op, g) = output(&p, MUVOX_F32, input(&op, g)->cols);
        assert_refused(&p, &ctx, BACKWARD(&ctx, &op), MUVOX_OUT_OF_MEMORY, "neighbour_attention", "memory");
        problem_free(&p);
    }
}
END_TEST

#define WRONG(run, change, status, argument)                                                                           \
    do {                                                                                                               \
        descriptor    op = good;                                                                                       \
        muvox_context ctx = context(MUVOX_SIMD_AUTO, 1);                                                               \
        change;                                                                                                        \
        doing("%s", #change);                                                                                          \
        assert_refused(&p, &ctx, run(&ctx, &op), status, "neighbour_attention", argument);                             \
    } while (0)

START_TEST(forward_refuses_wrong_arguments)
{
    const neighbour_case c = {
        STRIDED, MUVOX_F32, MUVOX_F16, 5, 3, 2, 2, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX), MUVOX_RELU, 1};
    problem          p;
    const descriptor good = make(&p, &c);

    WRONG(FORWARD, op.neighbours_k = 0, MUVOX_BAD_ARGUMENT, "k is 0");
    WRONG(FORWARD, op.scale = NAN, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(FORWARD, op.aggregates = 0x22, MUVOX_BAD_ARGUMENT, "aggregates");
    WRONG(FORWARD, op.activation = (muvox_activation)6, MUVOX_BAD_ARGUMENT, "activation");
    WRONG(FORWARD, op.offset = 2, MUVOX_BAD_ARGUMENT, "offset is 2");
    WRONG(FORWARD, op.offset = 0, MUVOX_BAD_ARGUMENT, "o is given");
    WRONG(FORWARD, op.o.data = NULL, MUVOX_BAD_ARGUMENT, "o is missing");
    WRONG(FORWARD, op.coords.dtype = MUVOX_F64, MUVOX_BAD_DTYPE, "coords");
    WRONG(FORWARD, op.coords.cols = 0, MUVOX_BAD_SHAPE, "coords");
    WRONG(FORWARD, op.feats.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "feats");
    WRONG(FORWARD, op.feats.rows--, MUVOX_BAD_SHAPE, "feats");
    WRONG(FORWARD, op.q.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "q is float");
    WRONG(FORWARD, op.q.cols = 0, MUVOX_BAD_SHAPE, "q has width 0");
    WRONG(FORWARD, op.k.cols++, MUVOX_BAD_SHAPE, "k has width 3");
    WRONG(FORWARD, op.v.cols--, MUVOX_BAD_SHAPE, "v has width 3");
    WRONG(FORWARD, op.v.row_stride = -1, MUVOX_BAD_ARGUMENT, "v has strides");
    WRONG(FORWARD, op.bias_q.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "bias_q is half");
    WRONG(FORWARD, op.bias_k.data = NULL, MUVOX_BAD_ARGUMENT, "bias_k");
    WRONG(FORWARD, op.bias_v.cols++, MUVOX_BAD_SHAPE, "bias_v");
    WRONG(FORWARD, op.bias_out.rows++, MUVOX_BAD_SHAPE, "bias_out");
    WRONG(FORWARD, op.out.cols--, MUVOX_BAD_SHAPE, "out");
    WRONG(FORWARD, op.neighbours.dtype = MUVOX_U8, MUVOX_BAD_DTYPE, "neighbours");
    WRONG(FORWARD, op.winners.dtype = MUVOX_I32, MUVOX_BAD_DTYPE, "winners");
    WRONG(FORWARD, op.mask = op.coords, MUVOX_BAD_DTYPE, "mask");
    problem_free(&p);
}
END_TEST

START_TEST(backward_refuses_wrong_arguments)
{
    const neighbour_case c = {
        STRIDED, MUVOX_F32, MUVOX_F16, 5, 3, 2, 2, 4, MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX), MUVOX_RELU, 0};
    problem        p;
    descriptor     good = make(&p, &c);
    int32_t *const first = good.neighbours.data;

    RUN(FORWARD, &good, MUVOX_SIMD_AUTO, 1);
    freeze(&p);
    good.grad_coords = output(&p, MUVOX_F32, 2);
    for (int g = 1; g < GRADIENTS; g++) *gradient(&good, g) = (muvox_output){0};
    good.grad_v = output(&p, MUVOX_F16, 4);
    good.grad_bias_q = row_alone(output_per_set(&p, MUVOX_F32, 2), 0);
    WRONG(BACKWARD, op.scale = INFINITY, MUVOX_BAD_ARGUMENT, "scale");
    WRONG(BACKWARD, op.neighbours.data = NULL, MUVOX_BAD_ARGUMENT, "neighbours");
    WRONG(BACKWARD, *first = 5, MUVOX_BAD_ARGUMENT, "neighbours");
    *first = 0;
    WRONG(BACKWARD, op.winners.data = NULL, MUVOX_BAD_ARGUMENT, "winners");
    WRONG(BACKWARD, op.grad_out.cols--, MUVOX_BAD_SHAPE, "grad_out");
    WRONG(BACKWARD, op.grad_out.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "grad_out");
    WRONG(BACKWARD, op.grad_coords.cols++, MUVOX_BAD_SHAPE, "grad_coords");
    WRONG(BACKWARD, op.grad_v.dtype = MUVOX_F32, MUVOX_BAD_DTYPE, "grad_v");
    WRONG(BACKWARD, op.grad_o = op.grad_v, MUVOX_BAD_ARGUMENT, "grad_o");
    WRONG(BACKWARD, op.grad_bias_q.cols++, MUVOX_BAD_SHAPE, "grad_bias_q");
    WRONG(BACKWARD, op.grad_bias_q.dtype = MUVOX_F16, MUVOX_BAD_DTYPE, "grad_bias_q");
    problem_free(&p);
}
END_TEST

Suite *neighbour_attention_suite(void)
{
    Suite *const suite = suite_create("neighbour_attention");
    TCase *const tests = tcase_create("neighbour_attention");

    tcase_add_loop_test(tests, every_kernel_equals_the_reference, 0, 4 * LAYOUTS);
    tcase_add_loop_test(tests, reference_is_the_formula, 0, 12);
    tcase_add_test(tests, known_answers);
    tcase_add_loop_test(tests, masked_rows_take_no_part, 0, 2);
    tcase_add_loop_test(tests, gradients_by_finite_differences, 0, 12);
    tcase_add_loop_test(tests, memory_may_be_missing, 0, 2);
    tcase_add_test(tests, forward_refuses_wrong_arguments);
    tcase_add_test(tests, backward_refuses_wrong_arguments);
    suite_add_tcase(suite, tests);
    return suite;
}
