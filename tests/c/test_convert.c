/* Half and bfloat16 against an independent arithmetic: values by ldexp, rounding by rint in double. */
#include "problem.h"

#include <fenv.h>
#include <math.h>

/* A 16-bit floating format: bits of its fraction, and the exponent of 1. */
typedef struct {
    const char *name;
    int         fraction, bias;
    float (*widen)(uint16_t);
    uint16_t (*narrow)(float);
} format;

static float widen_half(uint16_t h)
{
    return float_of_half(h);
}

static uint16_t narrow_half(float x)
{
    return half_of_float(x);
}

static float widen_bf16(uint16_t h)
{
    return float_of_bf16(h);
}

static uint16_t narrow_bf16(float x)
{
    return bf16_of_float(x);
}

static const format formats[] = {{"half", 10, 15, widen_half, narrow_half},
                                 {"bfloat16", 7, 127, widen_bf16, narrow_bf16}};

/* (−1)^s 2^(e − bias) 1.f, or 2^(1 − bias) 0.f; the highest e holds the infinities and NaN. */
static double value_of(const format *f, uint16_t bits)
{
    const int    highest = (1 << (15 - f->fraction)) - 1, e = bits >> f->fraction & highest;
    const int    fraction = bits & ((1 << f->fraction) - 1);
    const double sign = bits >> 15 ? -1 : 1;

    if (e == highest) return fraction ? NAN : sign * INFINITY;
    if (!e) return sign * ldexp(fraction, 1 - f->bias - f->fraction);
    return sign * ldexp(fraction + (1 << f->fraction), e - f->bias - f->fraction);
}

/* The nearest value of the format, ties to even: x is a multiple of its unit in the last place after rint. */
static double rounded(const format *f, double x)
{
    const int least = 1 - f->bias; /* exponent of the smallest normal number */
    int       e;
    double    unit, y;

    if (!isfinite(x) || x == 0) return x;
    e = ilogb(x);
    unit = ldexp(1, (e < least ? least : e) - f->fraction);
    y = rint(x / unit) * unit;
    return fabs(y) >= ldexp(1, f->bias + 1) ? copysign(INFINITY, x) : y;
}

static void assert_rounds(const format *f, float x)
{
    const double got = value_of(f, f->narrow(x)), expected = rounded(f, x);

    if (isnan(x) ? !isnan(got) : got != expected || signbit(got) != signbit(expected))
        ck_abort_msg("%s of %a is %a, expected %a", f->name, x, got, expected);
}

START_TEST(every_pattern_has_its_value)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const double got = formats[_i].widen((uint16_t)bits), expected = value_of(&formats[_i], (uint16_t)bits);

        if (isnan(expected) ? !isnan(got) : got != expected || signbit(got) != signbit(expected))
            ck_abort_msg("%s 0x%04x is %a, expected %a", formats[_i].name, bits, got, expected);
    }
}
END_TEST

/* NaN comes back as a NaN of the same sign. */
START_TEST(every_pattern_comes_back)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const uint16_t back = formats[_i].narrow(formats[_i].widen((uint16_t)bits));
        const bool     nan = isnan(value_of(&formats[_i], (uint16_t)bits));

        if (nan ? !isnan(value_of(&formats[_i], back)) || (back ^ bits) >> 15 : back != bits)
            ck_abort_msg("%s 0x%04x comes back as 0x%04x", formats[_i].name, bits, back);
    }
}
END_TEST

/* Half way between neighbours, and one float to either side of it: where rounding decides. */
START_TEST(ties_round_to_even)
{
    const format *const f = &formats[_i];

    ck_assert_int_eq(fegetround(), FE_TONEAREST);
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const float low = f->widen((uint16_t)bits), next = f->widen((uint16_t)(bits + 1));
        /* above the largest, half way to what would come next */
        const float high = isinf(next) ? (float)(2 * (double)low - f->widen((uint16_t)(bits - 1))) : next;
        const float half_way = isinf(high) ? (float)((double)low * (1 + ldexp(1, -f->fraction - 2)))
                                           : (float)(((double)low + (double)high) / 2);

        if (!isfinite(low) || isnan(high) || bits == 0x7fff) continue;
        assert_rounds(f, half_way);
        assert_rounds(f, nextafterf(half_way, INFINITY));
        assert_rounds(f, nextafterf(half_way, -INFINITY));
        assert_rounds(f, low);
        assert_rounds(f, nextafterf(low, INFINITY));
        assert_rounds(f, nextafterf(low, -INFINITY));
    }
}
END_TEST

START_TEST(any_float_rounds_to_the_nearest)
{
    problem p = {.random = 99};

    for (int n = 0; n < 2000000; n++)
        assert_rounds(&formats[_i], float_of_bits((uint32_t)random_below(&p, (int64_t)1 << 32)));
}
END_TEST

START_TEST(known_patterns)
{
    ck_assert_int_eq(half_of_float(1), 0x3c00);
    ck_assert_int_eq(half_of_float(-2), 0xc000);
    ck_assert_int_eq(half_of_float(65504), 0x7bff);
    ck_assert_int_eq(half_of_float(65519.996f), 0x7bff);
    ck_assert_int_eq(half_of_float(65520), 0x7c00);
    ck_assert_int_eq(half_of_float(0x1p-24f), 0x0001);
    ck_assert_int_eq(half_of_float(0x1p-25f), 0x0000);
    ck_assert_int_eq(half_of_float(0x1.000002p-25f), 0x0001);
    ck_assert_int_eq(half_of_float(-0.0f), 0x8000);
    ck_assert_int_eq(half_of_float(-INFINITY), 0xfc00);
    ck_assert_int_eq(bf16_of_float(1), 0x3f80);
    ck_assert_int_eq(bf16_of_float(-INFINITY), 0xff80);
    ck_assert_int_eq(bf16_of_float(0x1.fep127f), 0x7f7f);
    ck_assert_int_eq(bf16_of_float(0x1.fffffep127f), 0x7f80);
    ck_assert_int_eq(bf16_of_float(0x1p-133f), 0x0001);
    ck_assert_int_eq(bf16_of_float(0x1.01p0f), 0x3f80);
    ck_assert_int_eq(bf16_of_float(0x1.03p0f), 0x3f82);
    ck_assert(isnan(float_of_bf16(bf16_of_float(float_of_bits(0x7f800001u)))));
    ck_assert(isnan(float_of_half(half_of_float(float_of_bits(0x7f800001u)))));
    ck_assert(isnan(float_of_half(half_of_float(float_of_bits(0xffffffffu)))));
}
END_TEST

START_TEST(elements_of_every_dtype)
{
    const muvox_dtype dtypes[] = {MUVOX_F16, MUVOX_BF16, MUVOX_F32, MUVOX_F64, MUVOX_I32, MUVOX_U8};
    const size_t      sizes[] = {2, 2, 4, 8, 4, 1};
    double            room[4];

    for (int t = 0; t < COUNT(dtypes); t++) {
        ck_assert_uint_eq(dtype_size(dtypes[t]), sizes[t]);
        for (int64_t at = 0; at < 4; at++) set_element(room, dtypes[t], at, (double)(3 + at));
        for (int64_t at = 0; at < 4; at++) ck_assert(element(room, dtypes[t], at) == (double)(3 + at));
    }
    ck_assert_uint_eq(dtype_size((muvox_dtype)77), 0);
}
END_TEST

Suite *convert_suite(void)
{
    Suite *const suite = suite_create("convert");
    TCase *const tests = tcase_create("convert");

    tcase_add_loop_test(tests, every_pattern_has_its_value, 0, COUNT(formats));
    tcase_add_loop_test(tests, every_pattern_comes_back, 0, COUNT(formats));
    tcase_add_loop_test(tests, ties_round_to_even, 0, COUNT(formats));
    tcase_add_loop_test(tests, any_float_rounds_to_the_nearest, 0, COUNT(formats));
    tcase_add_test(tests, known_patterns);
    tcase_add_test(tests, elements_of_every_dtype);
    suite_add_tcase(suite, tests);
    return suite;
}
