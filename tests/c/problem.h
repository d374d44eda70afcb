/* What the tests of all operators share: random problems in every memory layout, calls, comparisons and finite
 * differences. Each element outside the rows of a matrix is poison: NaN where it is read, a fixed byte where it is written. */
#ifndef MUVOX_TESTS_PROBLEM_H
#define MUVOX_TESTS_PROBLEM_H

#include "muvox/muvox.h"

#include "ops/convert.h"
#include "ops/sets.h"
#include "target.h"

#include <check.h>
#include <stdbool.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* How the matrices of a problem lie in memory. */
typedef enum {
    UNIFORM,        /* sets of one size, no gaps */
    RAGGED,         /* splits, with empty sets */
    STRIDED,        /* UNIFORM with gaps between rows and sets, and an odd address */
    RAGGED_STRIDED, /* RAGGED with gaps between rows */
    SHARED,         /* UNIFORM, but every input has a set stride of 0 */
    LAYOUTS         /* how many there are */
} layout;

/* The sets, and every block of memory that was made for them. */
typedef struct {
    layout     layout;
    muvox_sets sets;
    uint64_t   random;
    int        blocks;
    struct {
        unsigned char *data;
        size_t         bytes;
        bool           output;
    } block[64];
} problem;

/* UNIFORM and its like: count sets of size rows; ragged: sets of 0, size, 0, (size + 1) / 2 and 0 rows. */
problem problem_make(layout layout, int64_t count, int64_t size, uint64_t seed);
problem problem_of(const int64_t *splits, int64_t count); /* these sets, without gaps */
void    problem_free(problem *p);

/* Names what is tried now: every message of a failure begins with it. */
void        doing(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *done(void);

extern const muvox_dtype floating_dtypes[4];
const char              *name_of(muvox_dtype dtype);
muvox_dtype              wide(muvox_dtype dtype); /* of statistics: double for double, else float */

/* Inputs: (N, cols) or, with _per_set, (S, cols). Values are rounded to dtype once. */
double       random_between(problem *p, double low, double high);
int64_t      random_below(problem *p, int64_t n);
muvox_matrix random_input(problem *p, muvox_dtype dtype, int64_t cols, double spread); /* from −spread to spread */
muvox_matrix grid_input(problem *p, muvox_dtype dtype, int64_t cols, int levels); /* 0, 1, … levels − 1: full of ties */
muvox_matrix random_input_per_set(problem *p, muvox_dtype dtype, int64_t cols, double spread);
muvox_matrix given_input(problem *p, muvox_dtype dtype, int64_t cols, const double *values); /* row after row */
muvox_matrix given_input_per_set(problem *p, muvox_dtype dtype, int64_t cols, const double *values);
/* The same with the rows of other sets than the problem's, which a layout shares never. */
muvox_sets other_sets(problem *p, int64_t size); /* as many as the problem's; ragged: of 1, 0, size, size and 2 rows */
muvox_sets one_set(int64_t rows);
muvox_matrix random_input_of(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols, double spread);
muvox_matrix integer_input_of(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols, int64_t least,
                              int64_t most);
muvox_matrix row_mask(problem *p); /* uint8, about a third of the rows 0 */
void poison_masked(problem *p, const muvox_matrix *m, const muvox_matrix *mask); /* NaN in rows that are masked */
void set_value(const muvox_matrix *m, const muvox_sets *sets, int64_t s, int64_t i, int64_t c, double value);

/* Outputs, filled with the sentinel. */
muvox_output output(problem *p, muvox_dtype dtype, int64_t cols);
muvox_output output_per_set(problem *p, muvox_dtype dtype, int64_t cols);
muvox_output output_of(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols);

/* What was written so far is an input from now on: it may be anything, and must not change. */
void         freeze(problem *p);
muvox_matrix as_matrix(muvox_output m);

/* One set of a problem, and its part of a matrix. */
muvox_sets   sets_alone(const muvox_sets *sets, int64_t s);
muvox_matrix matrix_alone(muvox_matrix m, const muvox_sets *sets, int64_t s);
muvox_output output_alone(muvox_output m, const muvox_sets *sets, int64_t s);
muvox_output row_alone(muvox_output m, int64_t s); /* of a matrix with one row per set */
muvox_matrix input_row_alone(muvox_matrix m, int64_t s);

/* Sets that walk over a matrix with one row per set. */
muvox_sets per_set(const muvox_sets *sets);

double value_at(const muvox_matrix *m, const muvox_sets *sets, int64_t s, int64_t i, int64_t c);
double result_at(const muvox_output *m, const muvox_sets *sets, int64_t s, int64_t i, int64_t c);

/* A context, and a call that must succeed. */
muvox_context context(muvox_simd simd, int threads);
#define RUN(function, op, simd, threads)                                                                               \
    do {                                                                                                               \
        muvox_context      ctx_ = context(simd, threads);                                                              \
        const muvox_status status_ = function(&ctx_, op);                                                              \
        if (status_ != MUVOX_OK)                                                                                       \
            ck_abort_msg("%s: %s: %s, %s", done(), #function, muvox_status_name(status_), ctx_.message);               \
    } while (0)

/* Same bits in every element (any NaN equals any other). */
void assert_same(const char *name, const muvox_sets *sets, const muvox_output *got, const muvox_output *expected);

/* |got − expected| ≤ tolerance · largest |expected|, or · least where that is larger: the size of terms that may cancel.
 * NaN and infinities stand at the same places. */
void assert_close(const char *name, const muvox_sets *sets, const muvox_output *got, const muvox_output *expected,
                  double tolerance, double least);

/* Rounding of results in dtype, relative to the largest. */
double tolerance_of(muvox_dtype dtype);

/* Same winners; in float alone another rank may win if its message, as double sees it, is within the rounding. */
void assert_winners(const muvox_sets *sets, const muvox_output *got, const muvox_output *expected,
                    muvox_aggregates aggregates, bool                                                          in_float,
                    double (*message)(const void *op, int64_t s, int64_t i, int64_t r, int64_t f), const void *op);

/* Exactly these values, row after row. */
void assert_values(const char *name, const muvox_sets *sets, const muvox_output *got, const double *values);

/* Nothing was written beside the elements of m; nothing at all into any output of p. */
void assert_gaps_untouched(const char *name, const problem *p, const muvox_sets *sets, const muvox_output *m);
void assert_untouched(const problem *p);

/* Outputs of two problems made alike hold the same bytes. */
void assert_same_outputs(const problem *got, const problem *expected);

/* A refused call: its status, a message that names operator and argument, outputs as before. */
void assert_refused(const problem *p, const muvox_context *ctx, muvox_status got, muvox_status expected, const char *op,
                    const char *argument);

/* The operator refuses `good` of problem p after one change. */
#define REFUSES(op_name, run, change, status, argument)                                                                \
    do {                                                                                                               \
        muvox_##op_name op = good;                                                                                     \
        muvox_context   ctx = context(MUVOX_SIMD_AUTO, 1);                                                             \
        change;                                                                                                        \
        doing("%s", #change);                                                                                          \
        assert_refused(&p, &ctx, run(&ctx, &op), status, #op_name, argument);                                          \
    } while (0)

/* grad against central differences of loss(op, simd), which reads x (all in double). */
void assert_gradient(const char *name, const muvox_sets *sets, const muvox_matrix *x, const muvox_output *grad,
                     double (*loss)(const void *op, muvox_simd simd), const void *op, muvox_simd simd);

/* Σ out g: what the finite differences differentiate. */
double dot(const muvox_sets *sets, const muvox_output *out, const muvox_matrix *g);

/* Aggregates in turn, and how many blocks of columns they and their winners have. */
#define AGGREGATE_CHOICES 7
extern const muvox_aggregates aggregate_choices[AGGREGATE_CHOICES];
int                           kinds(muvox_aggregates aggregates);
int                           winner_kinds(muvox_aggregates aggregates);

/* Whether to try the next case: all of them, or with MUVOX_TEST_EVERY=n in the environment each n-th, for tools under
 * which a program takes long. */
bool wanted(void);

/* Runs the suite as the program's main; the result is main's. */
int run_suite(Suite *suite);

#endif
