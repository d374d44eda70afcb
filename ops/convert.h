/* Half and bfloat16: 16-bit patterns to float and back, rounding to nearest even. Plain integer arithmetic that compilers
 * vectorise, so no instruction set is needed; infinities, NaN and denormals are kept. */
#ifndef MUVOX_OPS_CONVERT_H
#define MUVOX_OPS_CONVERT_H

#include "muvox/types.h"

#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_float(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of_bf16(uint16_t h)
{
    return float_of_bits((uint32_t)h << 16);
}

static inline uint16_t bf16_of_float(float x)
{
    const uint32_t bits = bits_of_float(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u); /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float float_of_half(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;

    if (rest >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    /* The exponent field sits 112 too low: one exact product corrects it, denormals included. */
    return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}

static inline uint16_t half_of_float(float x)
{
    const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;

    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (rest < 0x38800000u) /* below the smallest normal half: adding 1/2 leaves the rounded denormal in the low bits */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13));
}

static inline size_t dtype_size(muvox_dtype dtype)
{
    switch (dtype) {
    case MUVOX_F64:
    case MUVOX_I64: return 8;
    case MUVOX_F32:
    case MUVOX_I32: return 4;
    case MUVOX_F16:
    case MUVOX_BF16: return 2;
    case MUVOX_U8: return 1;
    }
    return 0;
}

/* One element of any dtype, for the reference kernels. */
static inline double element(const void *data, muvox_dtype dtype, int64_t at)
{
    switch (dtype) {
    case MUVOX_F16: return float_of_half(((const uint16_t *)data)[at]);
    case MUVOX_BF16: return float_of_bf16(((const uint16_t *)data)[at]);
    case MUVOX_F32: return ((const float *)data)[at];
    case MUVOX_F64: return ((const double *)data)[at];
    case MUVOX_I32: return ((const int32_t *)data)[at];
    case MUVOX_U8: return ((const uint8_t *)data)[at];
    case MUVOX_I64: return (double)((const int64_t *)data)[at];
    }
    return 0;
}

/* An element of an int32 or int64 matrix. */
static inline int64_t integer(const muvox_matrix *m, int64_t at)
{
    return m->dtype == MUVOX_I64 ? ((const int64_t *)m->data)[at] : ((const int32_t *)m->data)[at];
}

static inline void set_element(void *data, muvox_dtype dtype, int64_t at, double value)
{
    switch (dtype) {
    case MUVOX_F16: ((uint16_t *)data)[at] = half_of_float((float)value); break;
    case MUVOX_BF16: ((uint16_t *)data)[at] = bf16_of_float((float)value); break;
    case MUVOX_F32: ((float *)data)[at] = (float)value; break;
    case MUVOX_F64: ((double *)data)[at] = value; break;
    case MUVOX_I32: ((int32_t *)data)[at] = (int32_t)value; break;
    case MUVOX_U8: ((uint8_t *)data)[at] = (uint8_t)value; break;
    case MUVOX_I64: ((int64_t *)data)[at] = (int64_t)value; break;
    }
}

#endif
