/* muvox: weighted aggregation over given neighbours.
 *
 *     m[i,r,f] = weights[i,r] · feats[j,f],   j = neighbours[i,r]
 *     mean = Σ_r m / count_i     max = max_r m     absmax = max_r |m|     sum = Σ_r m
 *
 * count_i is the number of neighbours ≥ 0 of row i; places that hold −1 are skipped. A row without neighbours gives 0 and
 * no gradient. Ties of max and absmax go to the lowest rank r; both propagate NaN. Inside, everything is float (double for
 * double), sums run in rank order.
 *
 * Memory: out, and N · n_max · F winners of 1 byte while k ≤ 254, else 4 (n_max: how many of max and absmax are asked for).
 * Nothing of size N · k · F. Workspace: O(threads · M · F) in backward.
 */
#ifndef MUVOX_AGGREGATE_H
#define MUVOX_AGGREGATE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t           struct_size;
    muvox_sets       sets;         /* S sets, N rows in all */
    muvox_aggregates aggregates;   /* n of them; out holds n blocks of F columns in that order */
    muvox_matrix     feats;        /* (N, F) half, bfloat16, float or double */
    muvox_matrix     neighbours;   /* (N, k) int32, row within the set, −1 = none */
    muvox_matrix     weights;      /* (N, k) half, bfloat16 or float; double exactly if feats is double */
    muvox_output     out;          /* (N, n · F), dtype of feats */
    muvox_output     winners;      /* (N, n_max · F) uint8 while k ≤ 254 (255: none), else int32 (−1: none) */
    muvox_matrix     grad_out;     /* (N, n · F), dtype of feats; into backward */
    muvox_output     grad_feats;   /* (N, F), dtype of feats; out of backward, only if wanted */
    muvox_output     grad_weights; /* (N, k), dtype of weights; out of backward, only if wanted */
} muvox_aggregate;

/* Errors: MUVOX_BAD_ARGUMENT (splits, aggregates, a neighbour outside its set), MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_aggregate_forward(muvox_context *ctx, const muvox_aggregate *op);

/* dm[i,r,f] = g_mean[i,f] / count_i + g_sum[i,f] + g_max[i,f] [r won f] + g_absmax[i,f] [r won f] sign m[i,r,f]
 * grad_feats[j,f] = Σ w[i,r] dm[i,r,f] over all (i, r) that picked j, i ascending;   grad_weights[i,r] = Σ_f dm[i,r,f] feats[j,f] */
MUVOX_API muvox_status muvox_aggregate_backward(muvox_context *ctx, const muvox_aggregate *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it.
 * Workspace: backward 8 bytes for each of N · k places and 20 for each row; ragged batches and few or large sets take 16
 * more a place while they are sorted. */
MUVOX_API muvox_status muvox_aggregate_forward_cuda(muvox_context *ctx, const muvox_aggregate *op);
MUVOX_API muvox_status muvox_aggregate_backward_cuda(muvox_context *ctx, const muvox_aggregate *op);

#ifdef __cplusplus
}
#endif
#endif
