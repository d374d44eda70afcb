#include "problem.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SENTINEL = 0xa5, POISON = 0xff }; /* POISON is NaN in every floating dtype and −1 in int32 */

const muvox_dtype floating_dtypes[4] = {MUVOX_F16, MUVOX_BF16, MUVOX_F32, MUVOX_F64};

const muvox_aggregates aggregate_choices[AGGREGATE_CHOICES] = {
    MUVOX_AGGREGATES_2(MUVOX_MEAN, MUVOX_MAX),
    MUVOX_AGGREGATES_2(MUVOX_ABSMAX, MUVOX_SUM),
    MUVOX_MAX,
    MUVOX_MEAN,
    MUVOX_AGGREGATES_2(MUVOX_SUM, MUVOX_ABSMAX) | (muvox_aggregates)MUVOX_AGGREGATES_2(MUVOX_MAX, MUVOX_MEAN) << 8,
    MUVOX_ABSMAX,
    MUVOX_SUM,
};

static char current[200];

void doing(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(current, sizeof current, format, arguments);
    va_end(arguments);
}

const char *done(void)
{
    return current;
}

const char *name_of(muvox_dtype dtype)
{
    static const char *const names[] = {"half", "bfloat16", "float", "double", "int32", "uint8", "int64"};

    return names[dtype];
}

muvox_dtype wide(muvox_dtype dtype)
{
    return dtype == MUVOX_F64 ? MUVOX_F64 : MUVOX_F32;
}

int kinds(muvox_aggregates aggregates)
{
    return aggregates ? 1 + kinds(aggregates >> 4) : 0;
}

int winner_kinds(muvox_aggregates aggregates)
{
    const unsigned kind = aggregates & 15;

    return aggregates ? (kind == MUVOX_MAX || kind == MUVOX_ABSMAX) + winner_kinds(aggregates >> 4) : 0;
}

/* splitmix64: the same numbers on every machine */
static uint64_t next(problem *p)
{
    uint64_t x = p->random += 0x9e3779b97f4a7c15u;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

double random_between(problem *p, double low, double high)
{
    return low + (high - low) * (double)(next(p) >> 11) * 0x1p-53;
}

int64_t random_below(problem *p, int64_t n)
{
    return (int64_t)(next(p) >> 1) % n;
}

static bool is_ragged(layout layout)
{
    return layout == RAGGED || layout == RAGGED_STRIDED;
}

static int64_t row_gap(const problem *p)
{
    return p->layout == STRIDED || p->layout == RAGGED_STRIDED ? 3 : 0;
}

static unsigned char *block_make(problem *p, size_t bytes, int fill, bool is_output)
{
    unsigned char *data = memory_make(bytes, is_output);

    if (!data || p->blocks == COUNT(p->block)) ck_abort_msg("%s: the test needs more memory", current);
    memset(data, fill, bytes);
    p->block[p->blocks].data = data;
    p->block[p->blocks].bytes = bytes;
    p->block[p->blocks++].output = is_output;
    return data;
}

problem problem_make(layout layout, int64_t count, int64_t size, uint64_t seed)
{
    const int64_t sizes[] = {0, size, 0, (size + 1) / 2, 0};
    problem       p = {.layout = layout, .random = seed, .sets = {NULL, count, count * size, size}};
    int64_t      *splits;

    if (!is_ragged(layout)) return p;
    splits = (int64_t *)(void *)block_make(&p, (COUNT(sizes) + 1) * sizeof *splits, 0, false);
    for (int s = 0; s < COUNT(sizes); s++) splits[s + 1] = splits[s] + sizes[s];
    p.sets = (muvox_sets){splits, COUNT(sizes), splits[COUNT(sizes)], 0};
    return p;
}

problem problem_of(const int64_t *splits, int64_t count)
{
    problem        p = {.layout = RAGGED};
    const size_t   bytes = (size_t)(count + 1) * sizeof *splits;
    int64_t *const copy = (int64_t *)(void *)block_make(&p, bytes, 0, false);

    memcpy(copy, splits, bytes);
    p.sets = (muvox_sets){copy, count, splits[count], 0};
    return p;
}

muvox_sets other_sets(problem *p, int64_t size)
{
    const int64_t sizes[] = {1, 0, size, size, 2};
    int64_t      *splits;

    if (!is_ragged(p->layout)) return (muvox_sets){NULL, p->sets.count, p->sets.count * size, size};
    splits = (int64_t *)(void *)block_make(p, (COUNT(sizes) + 1) * sizeof *splits, 0, false);
    for (int s = 0; s < COUNT(sizes); s++) splits[s + 1] = splits[s] + sizes[s];
    return (muvox_sets){splits, COUNT(sizes), splits[COUNT(sizes)], 0};
}

void problem_free(problem *p)
{
    for (int b = 0; b < p->blocks; b++) memory_free(p->block[b].data);
    p->blocks = 0;
}

muvox_sets per_set(const muvox_sets *sets)
{
    return (muvox_sets){NULL, 1, sets->count, sets->count};
}

/* A block of exactly the elements that the matrix spans, so that a sanitizer sees the first one beside it. */
static muvox_output matrix_make(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols, bool is_output)
{
    const bool     spread = p->layout == STRIDED, shared = p->layout == SHARED && !is_output && sets == &p->sets;
    const int64_t  row_stride = cols + row_gap(p), set_rows = sets->splits ? sets->rows : sets->size;
    const int64_t  set_stride = shared ? 0 : set_rows * row_stride + (spread ? 5 : 0);
    const int64_t  count = sets->splits ? 1 : sets->count, offset = spread ? 1 : 0;
    const int64_t  span = sets->rows ? offset + (count - 1) * set_stride + (set_rows - 1) * row_stride + cols : 0;
    unsigned char *data = block_make(p, (size_t)span * dtype_size(dtype), is_output ? SENTINEL : POISON, is_output);

    if (span) data += (size_t)offset * dtype_size(dtype);
    return (muvox_output){data, dtype, sets->rows, cols, row_stride, sets->splits ? 0 : set_stride};
}

muvox_output output(problem *p, muvox_dtype dtype, int64_t cols)
{
    return matrix_make(p, &p->sets, dtype, cols, true);
}

muvox_output output_of(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols)
{
    return matrix_make(p, sets, dtype, cols, true);
}

muvox_output output_per_set(problem *p, muvox_dtype dtype, int64_t cols)
{
    const muvox_sets rows = per_set(&p->sets);

    return matrix_make(p, &rows, dtype, cols, true);
}

void freeze(problem *p)
{
    for (int b = 0; b < p->blocks; b++) {
        p->block[b].output = false;
        memory_freeze(p->block[b].data);
    }
}

muvox_matrix as_matrix(muvox_output m)
{
    return (muvox_matrix){m.data, m.dtype, m.rows, m.cols, m.row_stride, m.set_stride};
}

void set_value(const muvox_matrix *m, const muvox_sets *sets, int64_t s, int64_t i, int64_t c, double value)
{
    set_element((void *)(uintptr_t)m->data, m->dtype, ROW(m, sets, s, i) + c, value);
}

double value_at(const muvox_matrix *m, const muvox_sets *sets, int64_t s, int64_t i, int64_t c)
{
    return element(m->data, m->dtype, ROW(m, sets, s, i) + c);
}

double result_at(const muvox_output *m, const muvox_sets *sets, int64_t s, int64_t i, int64_t c)
{
    return element(m->data, m->dtype, ROW(m, sets, s, i) + c);
}

#define EACH_ROW(sets, s, i)                                                                                           \
    for (int64_t s = 0; s < (sets)->count; s++)                                                                        \
        for (int64_t i = 0; i < set_rows(sets, s); i++)

static muvox_matrix random_matrix(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols, double spread)
{
    const muvox_matrix m = as_matrix(matrix_make(p, sets, dtype, cols, false));

    EACH_ROW(sets, s, i)
    for (int64_t c = 0; c < cols; c++) set_value(&m, sets, s, i, c, random_between(p, -spread, spread));
    return m;
}

muvox_matrix random_input(problem *p, muvox_dtype dtype, int64_t cols, double spread)
{
    return random_matrix(p, &p->sets, dtype, cols, spread);
}

muvox_matrix random_input_of(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols, double spread)
{
    return random_matrix(p, sets, dtype, cols, spread);
}

muvox_matrix integer_input_of(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols, int64_t least,
                              int64_t most)
{
    const muvox_matrix m = as_matrix(matrix_make(p, sets, dtype, cols, false));

    EACH_ROW(sets, s, i)
    for (int64_t c = 0; c < cols; c++)
        set_value(&m, sets, s, i, c, (double)(least + random_below(p, most - least + 1)));
    return m;
}

muvox_matrix row_mask(problem *p)
{
    const muvox_matrix m = as_matrix(matrix_make(p, &p->sets, MUVOX_U8, 1, false));

    EACH_ROW(&p->sets, s, i) set_value(&m, &p->sets, s, i, 0, random_below(p, 3) > 0);
    return m;
}

void poison_masked(problem *p, const muvox_matrix *m, const muvox_matrix *mask)
{
    EACH_ROW(&p->sets, s, i)
    for (int64_t c = 0; c < m->cols && !value_at(mask, &p->sets, s, i, 0); c++) set_value(m, &p->sets, s, i, c, NAN);
}

muvox_sets one_set(int64_t rows)
{
    return (muvox_sets){NULL, 1, rows, rows};
}

muvox_matrix random_input_per_set(problem *p, muvox_dtype dtype, int64_t cols, double spread)
{
    const muvox_sets rows = per_set(&p->sets);

    return random_matrix(p, &rows, dtype, cols, spread);
}

muvox_matrix grid_input(problem *p, muvox_dtype dtype, int64_t cols, int levels)
{
    const muvox_matrix m = as_matrix(matrix_make(p, &p->sets, dtype, cols, false));

    EACH_ROW(&p->sets, s, i)
    for (int64_t c = 0; c < cols; c++) set_value(&m, &p->sets, s, i, c, (double)random_below(p, levels));
    return m;
}

static muvox_matrix given_matrix(problem *p, const muvox_sets *sets, muvox_dtype dtype, int64_t cols,
                                 const double *values)
{
    const muvox_matrix m = as_matrix(matrix_make(p, sets, dtype, cols, false));

    EACH_ROW(sets, s, i)
    for (int64_t c = 0; c < cols; c++) set_value(&m, sets, s, i, c, *values++);
    return m;
}

muvox_matrix given_input(problem *p, muvox_dtype dtype, int64_t cols, const double *values)
{
    return given_matrix(p, &p->sets, dtype, cols, values);
}

muvox_matrix given_input_per_set(problem *p, muvox_dtype dtype, int64_t cols, const double *values)
{
    const muvox_sets rows = per_set(&p->sets);

    return given_matrix(p, &rows, dtype, cols, values);
}

muvox_sets sets_alone(const muvox_sets *sets, int64_t s)
{
    const int64_t M = set_rows(sets, s);

    return (muvox_sets){NULL, 1, M, M};
}

static void *element_address(const void *data, muvox_dtype dtype, int64_t at)
{
    return (void *)((uintptr_t)data + (size_t)at * dtype_size(dtype));
}

muvox_output output_alone(muvox_output m, const muvox_sets *sets, int64_t s)
{
    m.data = element_address(m.data, m.dtype, ROW(&m, sets, s, 0));
    m.rows = set_rows(sets, s);
    return m;
}

muvox_matrix matrix_alone(muvox_matrix m, const muvox_sets *sets, int64_t s)
{
    m.data = element_address(m.data, m.dtype, ROW(&m, sets, s, 0));
    m.rows = set_rows(sets, s);
    return m;
}

muvox_output row_alone(muvox_output m, int64_t s)
{
    m.data = element_address(m.data, m.dtype, s * m.row_stride);
    m.rows = 1;
    return m;
}

muvox_matrix input_row_alone(muvox_matrix m, int64_t s)
{
    m.data = element_address(m.data, m.dtype, s * m.row_stride);
    m.rows = 1;
    return m;
}

muvox_context context(muvox_simd simd, int threads)
{
    return (muvox_context){.struct_size = sizeof(muvox_context), .simd = simd, .threads = threads};
}

bool wanted(void)
{
    static int        cases;
    const char *const every = getenv("MUVOX_TEST_EVERY");

    return !every || atoi(every) < 1 || cases++ % atoi(every) == 0;
}

int run_suite(Suite *suite)
{
    SRunner *const runner = srunner_create(suite);
    int            failed;

    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
