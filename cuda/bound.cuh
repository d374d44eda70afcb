/* Lower bounds of distances from tensor cores: which rows may be nearer than a limit, 32 queries by 32 rows at once.
 *
 * With everything moved to the middle of the queries and scaled by a power of two, |q − c|² = |q|² + |c|² − 2 q·c is a product
 * of (q, |q|², 1) and (−2c, 1, |c|²). Rounding to TF32 costs at most 2⁻¹¹ of each factor, so at most 2⁻¹⁰ (|q|² + |c|²) of the
 * products with q and c, as 2 |q_i c_i| summed is no more than that; norms made smaller by SHRINK before they are rounded bring the
 * result below the true distance, with enough to spare for the roundings of float, of the move and of the distance itself.
 * Where numbers are too large or too small for that reasoning −inf takes their place, which marks everything: marks are always
 * enough, and what is marked is compared exactly.
 */
#ifndef MUVOX_CUDA_BOUND_H
#define MUVOX_CUDA_BOUND_H

#include "device.cuh"

#include <math.h>

constexpr float SHRINK = 1.f - 0x1p-9f - 0x1p-11f - 0x1p-14f;

__device__ __forceinline__ uint32_t to_tf32(float x)
{
    uint32_t rounded;

    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
}

/* d += a b for a 16 × 8 and an 8 × 8 matrix, in the layouts of mma.m16n8k8. */
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A row or query as a factor: moved, scaled and rounded, and its shrunk norm. */
template <int D> struct factor {
    uint32_t x[D], norm;
    __device__ __forceinline__ factor(const float *from, const float *middle, float scale, float times)
    {
        float n = 0, moved[D];

#pragma unroll
        for (int c = 0; c < D; c++) {
            moved[c] = (from[c] - middle[c]) * scale;
            n = fused(moved[c], moved[c], n);
        }
        const bool usable = n < 1e30f && (n > 1e-30f || n == 0.f);
#pragma unroll
        for (int c = 0; c < D; c++) x[c] = usable ? to_tf32(times * moved[c]) : 0;
        norm = usable ? to_tf32(n * SHRINK) : 0xff800000u;
    }
    /* A row that takes no part: far from everything. */
    __device__ __forceinline__ void drop()
    {
#pragma unroll
        for (int c = 0; c < D; c++) x[c] = 0;
        norm = to_tf32(1e30f);
    }
};

/* The queries of a warp, D of 4 or 8 columns. */
template <int D> struct bound {
    float    middle[D], scale;
    uint32_t a[2][4], norms[2][4]; /* left factors of 16 queries each; norms: with 8 columns they take a product of their own */

    /* around: corners of the box of the queries, NaN if there are none; x: this lane's query. */
    __device__ __forceinline__ void prepare(const float *around, const float (&x)[D])
    {
        const unsigned group = lane_id() / 4, t = lane_id() % 4;
        float          extent = 0;

#pragma unroll
        for (int c = 0; c < D; c++) {
            middle[c] = 0.5f * around[c] + 0.5f * around[D + c];
            extent = fmaxf(extent, around[D + c] - around[c]);
        }
        /* 2^−e for an extent from 2^e to 2^(e+1) */
        const uint32_t exponent = __float_as_uint(extent) >> 23;
        scale = extent > 0 && exponent < 253 ? __uint_as_float((254u - exponent - (exponent == 0)) << 23) : 1.f;
        const factor<D> mine(x, middle, scale, 1.f);

#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int      from = m * 16 + h * 8 + group;
                const uint32_t norm = __shfl_sync(ALL_LANES, mine.norm, from);
                const uint32_t beside = t == 0 ? norm : t == 1 ? to_tf32(1.f) : 0;

                a[m][h] = pick(mine.x, from, t);
                if constexpr (D == 4)
                    a[m][2 + h] = beside;
                else {
                    a[m][2 + h] = pick(mine.x + 4, from, t);
                    norms[m][h] = beside;
                    norms[m][2 + h] = 0;
                }
            }
    }

    /* Column t of another lane's factor. */
    static __device__ __forceinline__ uint32_t pick(const uint32_t *x, int from, unsigned t)
    {
        uint32_t picked = 0;

#pragma unroll
        for (unsigned c = 0; c < 4; c++) {
            const uint32_t there = __shfl_sync(ALL_LANES, x[c], from);

            picked = c == t ? there : picked;
        }
        return picked;
    }

    /* Right factors of 32 rows in shared memory. */
    struct __align__(16) right {
        uint32_t x[D / 4][WARP][4], norm[WARP];
    };

    /* This lane's row among the 32. */
    __device__ __forceinline__ void put(right &to, const float *row, bool there) const
    {
        factor<D> mine(row, middle, scale, -2.f);

        if (!there) mine.drop();
#pragma unroll
        for (int q = 0; q < D / 4; q++)
            *reinterpret_cast<uint4 *>(to.x[q][lane_id()]) =
                make_uint4(mine.x[4 * q], mine.x[4 * q + 1], mine.x[4 * q + 2], mine.x[4 * q + 3]);
        to.norm[lane_id()] = mine.norm;
    }

    /* A bit for each row that is not surely beyond this lane's limit; NaN is no limit. */
    __device__ __forceinline__ unsigned marks(const right &rows, float limit) const
    {
        const unsigned group = lane_id() / 4, t = lane_id() % 4;
        /* What a distance loses by underflow is added before scaling; the product starts at −limit, and is negative or not. */
        const float    scaled = fmaxf((limit + 0x1p-145f) * scale * scale, 1e-30f), mine = limit == limit ? -scaled : -HUGE_VALF;
        float          limits[4];
        unsigned       mask[4] = {};

#pragma unroll
        for (int n = 0; n < 4; n++) limits[n] = __shfl_sync(ALL_LANES, mine, n * 8 + group);
        /* From the last row to the first, as each sign shifts those before it up. */
#pragma unroll
        for (int n = 3; n >= 0; n--) {
            const uint32_t norm = rows.norm[n * 8 + group], beside = t == 1 ? norm : t == 0 ? to_tf32(1.f) : 0;

#pragma unroll
            for (int m = 0; m < 2; m++) {
                float d[4] = {limits[2 * m], limits[2 * m], limits[2 * m + 1], limits[2 * m + 1]};

                if constexpr (D == 4)
                    multiply(d, a[m], rows.x[0][n * 8 + group][t], beside);
                else {
                    multiply(d, a[m], rows.x[0][n * 8 + group][t], rows.x[1][n * 8 + group][t]);
                    multiply(d, norms[m], beside, 0);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if (n < 3) mask[2 * m + h] <<= 6;
                    mask[2 * m + h] = __funnelshift_l(__float_as_uint(d[2 * h + 1]), mask[2 * m + h], 1);
                    mask[2 * m + h] = __funnelshift_l(__float_as_uint(d[2 * h]), mask[2 * m + h], 1);
                }
            }
        }
        /* mask[h] of lane (group, t) has the rows 2t and 2t + 1 of every 8, for query 8 h + group. */
#pragma unroll
        for (int h = 0; h < 4; h++) mask[h] <<= 2 * t;
        const bool     upper = t & 2, odd = t & 1;
        const unsigned first = __shfl_xor_sync(ALL_LANES, upper ? mask[0] : mask[2], 2) | (upper ? mask[2] : mask[0]);
        const unsigned second = __shfl_xor_sync(ALL_LANES, upper ? mask[1] : mask[3], 2) | (upper ? mask[3] : mask[1]);
        const unsigned whole = __shfl_xor_sync(ALL_LANES, odd ? first : second, 1) | (odd ? second : first);

        return __shfl_sync(ALL_LANES, whole, lane_id() % 8 * 4 + lane_id() / 8);
    }
};

/* With any other number of columns every distance is computed. */
template <> struct bound<0> {
};

#endif
