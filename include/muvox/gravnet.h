/* muvox: GravNet's layer between its linear layers: k nearest rows, distance weight and aggregation in one.
 *
 *     m[i,r,f] = exp(−scale · |x_i − x_j|²) · u_j · feats[j,f],   j the r-th nearest row of i's set (see knn.h)
 *
 * aggregated over r as in aggregate.h: GravNet, arXiv 1902.07987, with the potential exp(−10 d²) of its implementations.
 * u_j is the weight of row j, 1 without row_weights. A row without neighbours (excluded, out of the radius, masked) gives 0
 * and takes no gradient; NaN in a masked row has no effect.
 * The weight is computed from the squared distance, so its gradient is exactly 0 where two rows coincide.
 *
 * Memory beside inputs and output: neighbours N · k · 4 bytes and winners (aggregate.h). Nothing of size Σ M² or N · k · F.
 * Workspace: knn's forward; O(threads · M · (F + d)) backward. Time: knn's, and O(N k F).
 */
#ifndef MUVOX_GRAVNET_H
#define MUVOX_GRAVNET_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t           struct_size;
    muvox_sets       sets;             /* S sets, N rows in all, M in one */
    int64_t          k;                /* ≥ 1; may exceed M */
    double           scale;            /* finite; LUMIN and PyG use 10 */
    muvox_aggregates aggregates;       /* n of them */
    unsigned         options;          /* MUVOX_EXCLUDE_SELF, MUVOX_WITHIN_RADIUS, MUVOX_MEAN_BY_K */
    double           max_radius;       /* ≥ 0, with MUVOX_WITHIN_RADIUS */
    muvox_matrix     coords;           /* (N, d), half, bfloat16 or float; double exactly if feats is double */
    muvox_matrix     feats;            /* (N, F), half, bfloat16, float or double */
    muvox_matrix     mask;             /* (N, 1) uint8, 0 = the row takes no part; data NULL = all do */
    muvox_matrix     row_weights;      /* (N, 1) u ≥ 0, float (double for double); data NULL = 1 */
    muvox_output     out;              /* (N, n · F), dtype of feats */
    muvox_output     neighbours;       /* (N, k) int32; needed by backward */
    muvox_output     winners;          /* (N, n_max · F) as in aggregate.h; needed by backward of max and absmax */
    muvox_matrix     grad_out;         /* (N, n · F), dtype of feats; into backward */
    muvox_output     grad_coords;      /* (N, d), dtype of coords; out of backward, only if wanted */
    muvox_output     grad_feats;       /* (N, F), dtype of feats; out of backward, only if wanted */
    muvox_output     grad_row_weights; /* (N, 1), dtype of row_weights; out of backward, only if wanted */
} muvox_gravnet;

/* Errors: MUVOX_BAD_ARGUMENT (k < 1, scale not finite, options, max_radius, splits, aggregates), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_gravnet_forward(muvox_context *ctx, const muvox_gravnet *op);

/* With dm of aggregate.h, w = exp(−scale d²) and dw[i,r] = Σ_f dm[i,r,f] feats[j,f]:
 * grad_feats[j,f] = Σ w u_j dm;   grad_row_weights[j] = Σ w dw;
 * grad_coords[i] = Σ_r −2 scale w u_j dw (x_i − x_j), and the opposite to x_j. */
MUVOX_API muvox_status muvox_gravnet_backward(muvox_context *ctx, const muvox_gravnet *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it.
 * Workspace: knn's forward, and coords once more where their rows are no multiple of 4 floats (doubles); backward 8 bytes
 * for each of N · k places (16 in double) and some 30 for each row, but of a uniform batch for a part of about 32 MiB at
 * a time, at least 64 sets; ragged batches and few or large sets take 16 more a place while they are sorted. */
MUVOX_API muvox_status muvox_gravnet_forward_cuda(muvox_context *ctx, const muvox_gravnet *op);
MUVOX_API muvox_status muvox_gravnet_backward_cuda(muvox_context *ctx, const muvox_gravnet *op);

#ifdef __cplusplus
}
#endif
#endif
