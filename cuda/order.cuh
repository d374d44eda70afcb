/* The rows of each set laid out for a search: coordinates widened and packed, rows that are near each other put near
 * each other, in tiles of 32 with the box around each.
 *
 * Rows of larger sets are sorted along a Hilbert curve of their coordinates' ranks among 32 rows of the set, so that
 * neither far rows nor a cluster spoil the curve. The order decides only how much is searched, never what is found. */
#ifndef MUVOX_CUDA_ORDER_H
#define MUVOX_CUDA_ORDER_H

#include "device.cuh"
#include "launch.cuh"

/* R is float or double. */
template <typename R> struct ordered_rows {
    R       *points; /* (N, width), columns past the coordinates 0; rows of a set at their set's place */
    int32_t *rows;   /* (N) number within the set, ~number of one that takes no part (its coordinates are +inf) */
    R       *boxes;  /* (tiles, 2, width) lower and upper corner around the rows without NaN that take part */
    int32_t *lowest; /* (tiles) lowest number of a row that takes part, INT32_MAX if there is none */
    int      width;
    /* Balls around every 8 rows, those without NaN that take part, four for each tile; only if asked for. */
    R       *centres;        /* (tiles, 4, width) */
    R       *radii;          /* (tiles, 4) rounded up; 0: all in one place, −1: there is no row */
    int32_t *lowest_in_ball; /* (tiles, 4) */
};

enum { BALL_ROWS = 8, BALLS = WARP / BALL_ROWS };

/* Points of 4 or 8 columns, 16 bytes at a time. */
template <int D> __device__ __forceinline__ void load_point(const float *from, float (&x)[D])
{
#pragma unroll
    for (int c = 0; c < D; c += 4) {
        const float4 part = *reinterpret_cast<const float4 *>(from + c);

        x[c] = part.x;
        x[c + 1] = part.y;
        x[c + 2] = part.z;
        x[c + 3] = part.w;
    }
}

template <int D> __device__ __forceinline__ void store_point(float *to, const float (&x)[D])
{
#pragma unroll
    for (int c = 0; c < D; c += 4)
        *reinterpret_cast<float4 *>(to + c) = make_float4(x[c], x[c + 1], x[c + 2], x[c + 3]);
}

/* Sets up to this size are not sorted: a search looks at all their rows. */
enum { UNSORTED_ROWS = 256 };

inline bool rows_sorted(const muvox_sets &sets)
{
    return sets.splits || sets.size > UNSORTED_ROWS;
}

/* The order alone, as in ordered_rows::rows but for masked rows, into hold; NULL where rows are not sorted. */
muvox_status order_only(muvox_context *ctx, const char *op, const muvox_sets &sets, const muvox_matrix &coords,
                        workspace *hold, const int32_t **order);

/* coords (N, d) with d <= width; what `rows` points to lives as long as `hold`. Memory: about N (1.2 width ·
 * sizeof(R) + 6) bytes; before that, while sorting, 24 N. */
template <typename R>
muvox_status order_rows(muvox_context *ctx, const char *op, const muvox_sets &sets, const muvox_matrix &coords,
                        const muvox_matrix &mask, int width, bool balls, workspace *hold, ordered_rows<R> *rows);

#endif
