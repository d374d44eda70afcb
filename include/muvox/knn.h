/* muvox: exact k nearest rows of the same set, the row itself included unless asked otherwise.
 *
 *     distance2[i,r] = Σ_c (x[i,c] − x[j,c])²,   j = neighbours[i,r] the r-th nearest row of i's set
 *
 * Order: by distance², ties to the lower row number, the same on every machine, for every kernel, run after run.
 * The sum is direct, in column order, with fused multiply-add, in float (double for double); half and bfloat16 are widened
 * first. Never |a|² + |b|² − 2ab, so the distance to itself is exactly 0 and no distance is negative.
 * A distance that overflows is +inf and ranks last but is not lost; a row with NaN is at distance NaN from all rows,
 * itself too, and NaN ranks after +inf (ties by row number). Within a radius, NaN is never found. Places past the last
 * neighbour hold −1 and +inf: counts decides, not the value.
 * A masked row is neither a neighbour nor looks for any (counts 0), and NaN in it has no effect.
 *
 * Time: O(Σ M² d). Workspace: O(threads · (M d + k)).
 */
#ifndef MUVOX_KNN_H
#define MUVOX_KNN_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t       struct_size;
    muvox_sets   sets;           /* S sets, N rows in all, M in one */
    muvox_sets   query_sets;     /* with MUVOX_QUERIES: as many sets, Q rows in all; else Q = N, the sets themselves */
    int64_t      k;              /* ≥ 1; may exceed M */
    unsigned     options;        /* MUVOX_EXCLUDE_SELF, MUVOX_WITHIN_RADIUS, MUVOX_QUERIES; the first and last exclude
                                    each other */
    double       max_radius;     /* ≥ 0, with MUVOX_WITHIN_RADIUS */
    muvox_matrix coords;         /* (N, d), d ≥ 1, half, bfloat16, float or double */
    muvox_matrix queries;        /* (Q, d), dtype of coords, with MUVOX_QUERIES */
    muvox_matrix mask;           /* (N, 1) uint8, 0 = the row of coords takes no part; data NULL = all do */
    muvox_output neighbours;     /* (Q, k) int32, row within the set, nearest first; read by backward */
    muvox_output distance2;      /* (Q, k) float, double for double coords; only if wanted */
    muvox_output counts;         /* (Q, 1) int32, valid places of each row; only if wanted */
    muvox_matrix grad_distance2; /* (Q, k), dtype of distance2; into backward */
    muvox_output grad_coords;    /* (N, d), dtype of coords; out of backward, only if wanted */
    muvox_output grad_queries;   /* (Q, d), dtype of coords; out of backward with MUVOX_QUERIES, only if wanted */
} muvox_knn;

/* Errors: MUVOX_BAD_ARGUMENT (k < 1, options, max_radius negative or NaN, splits that decrease or miss 0 or N),
 * MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_knn_forward(muvox_context *ctx, const muvox_knn *op);

/* grad_coords[i] = Σ_r 2 g[i,r] (x[i] − x[j]), and the opposite to x[j]; nothing through unfilled places. With queries the
 * first part goes to grad_queries[i].
 * Rows that picked j are summed in ascending order, so every run gives the same bits. */
MUVOX_API muvox_status muvox_knn_backward(muvox_context *ctx, const muvox_knn *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it.
 * Workspace: forward some 30 bytes a row up to d = 4, 50 up to 8 (d 32-bit numbers beyond, twice that in double; ragged
 * batches 16 to 24 more while they are sorted); backward 4 a place and 16 a row. */
MUVOX_API muvox_status muvox_knn_forward_cuda(muvox_context *ctx, const muvox_knn *op);
MUVOX_API muvox_status muvox_knn_backward_cuda(muvox_context *ctx, const muvox_knn *op);

#ifdef __cplusplus
}
#endif
#endif
