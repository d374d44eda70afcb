/* muvox: mean, max, absmax and sum over each set of rows.
 *
 *     mean[s,f] = Σ_i u_i x[i,f] / Σ_i u_i     max[s,f] = max_i x[i,f]     absmax[s,f] = max_i |x[i,f]|
 *     sum[s,f] = Σ_i u_i x[i,f]
 *
 * over the M rows i of set s; u is an optional weight of the rows, 1 without, and does not enter max and absmax. A mean whose
 * weights sum to 0 is 0 and takes no gradient. A masked row takes no part, and NaN in it has no effect. Ties of max and absmax go to the first row; NaN is never hidden: a set with a NaN has a NaN
 * maximum. An empty set gives 0 and takes no gradient. Sums are in float (double for double) in row order.
 *
 * Memory: out, and S · n_max · F winners of 4 bytes. Workspace: O(threads · F). Time: one read of x per aggregate.
 */
#ifndef MUVOX_POOL_H
#define MUVOX_POOL_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t           struct_size;
    muvox_sets       sets;        /* S sets, N rows in all */
    muvox_aggregates aggregates;  /* n of them; out holds n blocks of F columns in that order */
    muvox_matrix     x;           /* (N, F) half, bfloat16, float or double */
    muvox_matrix     mask;        /* (N, 1) uint8, 0 = the row takes no part; data NULL = all do */
    muvox_matrix     row_weights; /* (N, 1) u ≥ 0, float (double for double); data NULL = 1 */
    muvox_output     out;         /* (S, n · F), dtype of x */
    muvox_output
        winners; /* (S, n_max · F) int32, row within the set, −1 for an empty set; for backward of max and absmax */
    muvox_matrix grad_out;         /* (S, n · F), dtype of x; into backward */
    muvox_output grad_x;           /* (N, F), dtype of x; out of backward, only if wanted */
    muvox_output grad_row_weights; /* (N, 1), dtype of row_weights; out of backward, only if wanted */
} muvox_pool;

/* Errors: MUVOX_BAD_ARGUMENT (splits, aggregates), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_pool_forward(muvox_context *ctx, const muvox_pool *op);

/* grad_x[i,f] = u_i (g_mean[s,f] / Σ u + g_sum[s,f]) + g_max[s,f] [i won f] + g_absmax[s,f] [i won f] sign x[i,f]
 * grad_row_weights[i] = Σ_f g_mean[s,f] (x[i,f] − mean[s,f]) / Σ u + g_sum[s,f] x[i,f]
 * (x is read for absmax and for grad_row_weights only; the mean is computed again). */
MUVOX_API muvox_status muvox_pool_backward(muvox_context *ctx, const muvox_pool *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it. */
MUVOX_API muvox_status muvox_pool_forward_cuda(muvox_context *ctx, const muvox_pool *op);
MUVOX_API muvox_status muvox_pool_backward_cuda(muvox_context *ctx, const muvox_pool *op);

#ifdef __cplusplus
}
#endif
#endif
