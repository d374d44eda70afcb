/* The comparisons of problem.h. */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SENTINEL = 0xa5 };

#define EACH_ELEMENT(sets, m, s, i, c)                                                                                 \
    for (int64_t s = 0; s < (sets)->count; s++)                                                                        \
        for (int64_t i = 0; i < set_rows(sets, s); i++)                                                                \
            for (int64_t c = 0; c < (m)->cols; c++)

static void assert_alike(const char *name, const muvox_output *got, const muvox_output *expected)
{
    if (got->dtype != expected->dtype || got->cols != expected->cols)
        ck_abort_msg("%s: %s differ in shape", done(), name);
}

static bool same(double a, double b)
{
    return a == b ? signbit(a) == signbit(b) : isnan(a) && isnan(b);
}

void assert_same(const char *name, const muvox_sets *sets, const muvox_output *got, const muvox_output *expected)
{
    assert_alike(name, got, expected);
    EACH_ELEMENT(sets, got, s, i, c)
    {
        const double a = result_at(got, sets, s, i, c), b = result_at(expected, sets, s, i, c);

        if (!same(a, b))
            ck_abort_msg("%s: %s of set %d, row %d, column %d is %.17g, expected %.17g", done(), name, (int)s, (int)i,
                         (int)c, a, b);
    }
}

double tolerance_of(muvox_dtype dtype)
{
    switch (dtype) {
    case MUVOX_F16: return 0x1p-10; /* one unit in the last place of the largest */
    case MUVOX_BF16: return 0x1p-7;
    case MUVOX_F32: return 2e-6;
    default: return 1e-14;
    }
}

void assert_close(const char *name, const muvox_sets *sets, const muvox_output *got, const muvox_output *expected,
                  double tolerance, double least)
{
    double largest = least;

    assert_alike(name, got, expected);
    EACH_ELEMENT(sets, expected, s, i, c)
    {
        const double b = fabs(result_at(expected, sets, s, i, c));

        if (b > largest && !isinf(b)) largest = b;
    }
    EACH_ELEMENT(sets, got, s, i, c)
    {
        const double a = result_at(got, sets, s, i, c), b = result_at(expected, sets, s, i, c);

        if (!(fabs(a - b) <= tolerance * largest) && a != b && !(isnan(a) && isnan(b)))
            ck_abort_msg("%s: %s of set %d, row %d, column %d is %.9g, expected %.9g, off by %.2g of the largest",
                         done(), name, (int)s, (int)i, (int)c, a, b, fabs(a - b) / largest);
    }
}

void assert_winners(const muvox_sets *sets, const muvox_output *got, const muvox_output *expected,
                    muvox_aggregates aggregates, bool                                                          in_float,
                    double (*message)(const void *op, int64_t s, int64_t i, int64_t r, int64_t f), const void *op)
{
    const int64_t none = got->dtype == MUVOX_U8 ? 255 : -1, n = winner_kinds(aggregates), F = n ? got->cols / n : 1;
    bool          absolute[8];
    int           blocks = 0;

    for (; aggregates; aggregates >>= 4)
        if (winner_kinds(aggregates & 15)) absolute[blocks++] = (aggregates & 15) == MUVOX_ABSMAX;
    assert_alike("winners", got, expected);
    EACH_ELEMENT(sets, got, s, i, c)
    {
        const int64_t a = (int64_t)result_at(got, sets, s, i, c), b = (int64_t)result_at(expected, sets, s, i, c);
        double        x, y;

        if (a == b) continue;
        if (!in_float || a == none || b == none)
            ck_abort_msg("%s: winner of set %d, row %d, column %d is %d, expected %d", done(), (int)s, (int)i, (int)c,
                         (int)a, (int)b);
        x = message(op, s, i, a, c % F);
        y = message(op, s, i, b, c % F);
        if (absolute[c / F]) {
            x = fabs(x);
            y = fabs(y);
        }
        if (!(fabs(x - y) <= 0x1p-21 * fabs(y)))
            ck_abort_msg("%s: winner of set %d, row %d, column %d is %d of %.9g, expected %d of %.9g", done(), (int)s,
                         (int)i, (int)c, (int)a, x, (int)b, y);
    }
}

void assert_values(const char *name, const muvox_sets *sets, const muvox_output *got, const double *values)
{
    EACH_ELEMENT(sets, got, s, i, c)
    {
        const double a = result_at(got, sets, s, i, c), b = *values++;

        if (a != b && !(isnan(a) && isnan(b)))
            ck_abort_msg("%s: %s of set %d, row %d, column %d is %.17g, expected %.17g", done(), name, (int)s, (int)i,
                         (int)c, a, b);
    }
}

void assert_gaps_untouched(const char *name, const problem *p, const muvox_sets *sets, const muvox_output *m)
{
    const size_t         width = (size_t)m->cols * dtype_size(m->dtype);
    size_t               bytes = 0;
    unsigned char       *written;
    const unsigned char *data = NULL;

    for (int b = 0; b < p->blocks; b++) {
        const uintptr_t at = (uintptr_t)m->data, begin = (uintptr_t)p->block[b].data;

        if (at < begin || at > begin + p->block[b].bytes || !p->block[b].output) continue;
        data = p->block[b].data;
        bytes = p->block[b].bytes;
    }
    written = calloc(bytes + 1, 1);
    if (!data || !written) ck_abort_msg("%s: %s is no output of the problem", done(), name);
    for (int64_t s = 0; s < sets->count; s++)
        for (int64_t i = 0; i < set_rows(sets, s); i++) {
            const size_t row = (size_t)ROW(m, sets, s, i) * dtype_size(m->dtype);

            memset(written + ((uintptr_t)m->data - (uintptr_t)data) + row, 1, width);
        }
    for (size_t at = 0; at < bytes; at++)
        if (!written[at] && data[at] != SENTINEL)
            ck_abort_msg("%s: %s wrote byte %d between its rows", done(), name, (int)at);
    free(written);
}

void assert_untouched(const problem *p)
{
    for (int b = 0; b < p->blocks; b++)
        for (size_t at = 0; p->block[b].output && at < p->block[b].bytes; at++)
            if (p->block[b].data[at] != SENTINEL)
                ck_abort_msg("%s: byte %d of output block %d was written", done(), (int)at, b);
}

void assert_same_outputs(const problem *got, const problem *expected)
{
    if (got->blocks != expected->blocks) ck_abort_msg("%s: the problems differ", done());
    for (int b = 0; b < got->blocks; b++) {
        if (got->block[b].bytes != expected->block[b].bytes) ck_abort_msg("%s: block %d differs in size", done(), b);
        if (got->block[b].output && memcmp(got->block[b].data, expected->block[b].data, got->block[b].bytes) != 0)
            ck_abort_msg("%s: output block %d differs", done(), b);
    }
}

void assert_refused(const problem *p, const muvox_context *ctx, muvox_status got, muvox_status expected, const char *op,
                    const char *argument)
{
    ck_assert_msg(got == expected, "%s: %s with a wrong %s: status %s, expected %s (message \"%s\")", done(), op,
                  argument, muvox_status_name(got), muvox_status_name(expected), ctx->message);
    ck_assert_msg(!strncmp(ctx->message, op, strlen(op)) && ctx->message[strlen(op)] == ':' &&
                      strstr(ctx->message + strlen(op), argument),
                  "%s: message \"%s\" does not name %s and %s", done(), ctx->message, op, argument);
    assert_untouched(p);
}

double dot(const muvox_sets *sets, const muvox_output *out, const muvox_matrix *g)
{
    double sum = 0;

    EACH_ELEMENT(sets, out, s, i, c) sum += result_at(out, sets, s, i, c) * value_at(g, sets, s, i, c);
    return sum;
}

/* (L(x + h) − L(x − h)) / 2h is off by h² L''' / 6, and by the rounding of L over h: 1e-7 of the largest leaves room. */
void assert_gradient(const char *name, const muvox_sets *sets, const muvox_matrix *x, const muvox_output *grad,
                     double (*loss)(const void *op, muvox_simd simd), const void *op, muvox_simd simd)
{
    const double h = 2e-6;
    double       largest = 1e-3;

    EACH_ELEMENT(sets, grad, s, i, c) largest = fmax(largest, fabs(result_at(grad, sets, s, i, c)));
    EACH_ELEMENT(sets, grad, s, i, c)
    {
        const double x0 = value_at(x, sets, s, i, c), analytic = result_at(grad, sets, s, i, c);
        double       numeric;

        set_value(x, sets, s, i, c, x0 + h);
        numeric = loss(op, simd);
        set_value(x, sets, s, i, c, x0 - h);
        numeric = (numeric - loss(op, simd)) / (2 * h);
        set_value(x, sets, s, i, c, x0);
        if (!(fabs(numeric - analytic) <= 1e-7 * largest))
            ck_abort_msg("%s: %s of set %d, row %d, column %d is %.9g, finite differences say %.9g", done(), name,
                         (int)s, (int)i, (int)c, analytic, numeric);
    }
}
