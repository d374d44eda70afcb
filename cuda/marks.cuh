/* Which of 32 points are within the reach of 32 queries, one for each lane, by tensor cores.
 *
 * With q, p and c counted from a middle,
 *
 *     |q − p|² <= limit              is   limit − |q|² − |p|² + 2 q · p >= 0                               for a point
 *     |q − c| <= √limit + radius     is   limit − |q|² − |c|² + radius² + 2 √limit radius + 2 q · c >= 0   for a ball
 *
 * Tensor cores take the products in bfloat16, whose range is that of float, each factor as the sum of two: x = high
 * + low with an error of 2^-18 |x|. The low parts' product is left out, sums are in float, cut off at worst:
 * altogether the left side moves by less than 2^-15 (|q|² + |p|² + radius² + limit), and by some 2^-126 where
 * products underflow. SLACK of that goes to the limit, so that a few points too many are within reach, and none too
 * few. NaN has no sign, and is within reach. */
#ifndef MUVOX_CUDA_MARKS_H
#define MUVOX_CUDA_MARKS_H

#include "device.cuh"

#include <math.h>

static constexpr float    SLACK = 0x1p-14f, SLACK_UNDERFLOW = 1e-35f;
static constexpr uint32_t ONES = 0x3f803f80u; /* two of them */

/* Two bfloat16 in a word, the first in the low half. */
__device__ __forceinline__ uint32_t bfloat_pair(float first, float second)
{
    uint32_t word;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
__device__ __forceinline__ float first_of_pair(uint32_t word)
{
    return __uint_as_float(word << 16);
}
__device__ __forceinline__ float second_of_pair(uint32_t word)
{
    return __uint_as_float(word & 0xffff0000u);
}
/* x as high + low. */
__device__ __forceinline__ uint32_t split_pair(float x)
{
    return bfloat_pair(x, x - first_of_pair(bfloat_pair(x, 0.f)));
}

/* A middle for one coordinate of the lanes' queries: about their median, NaN passed over, the median of three
 * medians of three. A few queries far out do not move it; or else all others would be far from it, and SLACK larger
 * than their limits. */
__device__ __forceinline__ float middle_of_lanes(float x)
{
    const int lane = (int)lane_id();

    for (int apart = 11; apart > 3; apart -= 7) {
        const float a = __shfl_sync(ALL_LANES, x, lane + apart), b = __shfl_sync(ALL_LANES, x, lane + 2 * apart);

        x = fmaxf(fminf(x, a), fminf(fmaxf(x, a), b));
    }
    return __shfl_sync(ALL_LANES, x, 0);
}

/* The 32 points. Products go over 16 numbers at a time, eight words of two; the factors are
 *
 *     D = 4   queries   high high  high high  low low    1,1   √limit      as words 0 to 7
 *             points    high high  low  low   high high  −|p|² radius
 *     D = 8   queries   high × 4   high × 4  |  low × 4   1,1   √limit 0 0
 *             points    high × 4   low × 4   |  high × 4  −|p|² radius 0 0
 *
 * and a lane reads words t and t + 4 of a point together, as they lie. */
template <int D> struct marked_points {
    static constexpr int BLOCKS = D / 4;
    uint2                words[BLOCKS][WARP][4];

    /* Sets this lane's point; one that is not there is beyond any limit. Counts p from the middle. */
    __device__ __forceinline__ void put(float (&p)[D], const float *middle, bool there, float radius)
    {
        /* Where the marks of point 8 t + 2 n + e come from: column 2 t + e of block n of eight. */
        const int lane = (int)lane_id(), slot = (lane / 2 % 4) * 8 + lane / 8 * 2 + lane % 2;
        float     norm = 0;
        uint32_t  high[D / 2], low[D / 2];

#pragma unroll
        for (int c = 0; c < D; c++) {
            p[c] = there ? p[c] - middle[c] : 0.f;
            norm = fused(p[c], p[c], norm);
        }
#pragma unroll
        for (int h = 0; h < D / 2; h++) {
            high[h] = bfloat_pair(p[2 * h], p[2 * h + 1]);
            low[h] = bfloat_pair(p[2 * h] - first_of_pair(high[h]), p[2 * h + 1] - second_of_pair(high[h]));
        }
        const float    rounded = first_of_pair(bfloat_pair(radius * 1.01f, 0.f)); /* not below the radius */
        const float    least = norm - SLACK * norm - rounded * rounded * (1 + SLACK);
        const uint32_t reach = bfloat_pair(rounded, rounded);
        /* A size that overflows says nothing. */
        const uint32_t size = there ? split_pair(isinf(norm) ? NAN : -least) : bfloat_pair(-INFINITY, 0.f);

        if constexpr (D == 4) {
            *reinterpret_cast<uint4 *>(&words[0][slot][0]) = make_uint4(high[0], high[0], high[1], high[1]);
            *reinterpret_cast<uint4 *>(&words[0][slot][2]) = make_uint4(low[0], size, low[1], reach);
        } else {
#pragma unroll
            for (int t = 0; t < 4; t += 2) {
                *reinterpret_cast<uint4 *>(&words[0][slot][t]) = make_uint4(high[t], low[t], high[t + 1], low[t + 1]);
                *reinterpret_cast<uint4 *>(&words[BLOCKS - 1][slot][t]) =
                    make_uint4(high[t], t ? 0 : size, high[t + 1], t ? 0 : reach);
            }
        }
    }
};

/* 16 × 8 numbers: d = c + a · b. */
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint2 b, const float (&c)[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* The queries of a warp, as the products need them. */
template <int D> struct marking_queries {
    uint32_t high[D / 2][WARP], low[D / 2][WARP]; /* of each lane */
    float    norms[WARP];                         /* |q|², NaN if it overflows */

    /* Sets this lane's query, which counts from the middle. */
    __device__ __forceinline__ void put(const float (&x)[D])
    {
        float norm = 0;

#pragma unroll
        for (int h = 0; h < D / 2; h++) {
            const float    a = 2 * x[2 * h], b = 2 * x[2 * h + 1];
            const uint32_t word = bfloat_pair(a, b);

            high[h][lane_id()] = word;
            low[h][lane_id()] = bfloat_pair(a - first_of_pair(word), b - second_of_pair(word));
        }
#pragma unroll
        for (int c = 0; c < D; c++) norm = fused(x[c], x[c], norm);
        norms[lane_id()] = isinf(norm) ? NAN : norm;
    }
};

/* What stays for a batch of points: words t and t + 4 of the query of lane j of four, and its share of the sum. */
template <bool BALLS, int D> struct marking {
    uint32_t first[4], low[D == 8 ? 4 : 1], tail[4];
    float    rooms[4];

    __device__ __forceinline__ marking(const marking_queries<D> &queries, float limit)
    {
        const int      lane = (int)lane_id(), t = lane % 4, quad = lane - t;
        const float    norm = queries.norms[lane];
        const float    room = limit + fused(SLACK, limit, SLACK_UNDERFLOW) - (norm - SLACK * norm);
        const uint32_t reach = BALLS ? split_pair(2 * sqrtf(limit)) : 0;

#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t other = BALLS ? __shfl_sync(ALL_LANES, reach, quad + j) : 0;

            rooms[j] = __shfl_sync(ALL_LANES, room, quad + j);
            first[j] = queries.high[t % (D / 2)][quad + j];
            if constexpr (D == 4)
                tail[j] = t < 2 ? queries.low[t % 2][quad + j] : t == 2 ? ONES : other;
            else {
                low[j] = queries.low[t][quad + j];
                tail[j] = t == 0 ? ONES : t == 1 ? other : 0;
            }
        }
    }

    /* Which of the points are within reach of this lane's query, the first at the top bit. */
    __device__ __forceinline__ unsigned within(const marked_points<D> &points) const
    {
        const int t = (int)lane_id() % 4;
        uint32_t  far[4] = {};

#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint2 b[marked_points<D>::BLOCKS];

#pragma unroll
            for (int block = 0; block < marked_points<D>::BLOCKS; block++)
                b[block] = points.words[block][n * 8 + lane_id() / 4][t];
#pragma unroll
            for (int m = 0; m < 4; m += 2) {
                const float room[4] = {rooms[m], rooms[m], rooms[m + 1], rooms[m + 1]};
                float       left[4];

                if constexpr (D == 4) {
                    const uint32_t words[4] = {first[m], first[m + 1], tail[m], tail[m + 1]};

                    multiply(left, words, b[0], room);
                } else {
                    const uint32_t highs[4] = {first[m], first[m + 1], first[m], first[m + 1]};
                    const uint32_t lows[4] = {low[m], low[m + 1], tail[m], tail[m + 1]};

                    multiply(left, highs, b[0], room);
                    multiply(left, lows, b[1], left);
                }
                far[m] = __funnelshift_l(__float_as_uint(left[0]), far[m], 1);
                far[m] = __funnelshift_l(__float_as_uint(left[1]), far[m], 1);
                far[m + 1] = __funnelshift_l(__float_as_uint(left[2]), far[m + 1], 1);
                far[m + 1] = __funnelshift_l(__float_as_uint(left[3]), far[m + 1], 1);
            }
        }
        /* Lane t of the four has a byte of marks for each query j; it gets those for its own query from all four. */
        uint32_t bytes = __byte_perm(__byte_perm(far[0], far[1], 0x4040), __byte_perm(far[2], far[3], 0x4040), 0x5410);
        bytes = __byte_perm(bytes, __shfl_xor_sync(ALL_LANES, bytes, 2), t < 2 ? 0x5410 : 0x3276);
        bytes = __byte_perm(bytes, __shfl_xor_sync(ALL_LANES, bytes, 1), t % 2 ? 0x5173 : 0x0426);
        return ~bytes;
    }
};

#endif
