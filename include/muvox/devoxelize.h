/* muvox: features of voxels read at points, each a weighted sum over a few voxels (torchsparse's spdevoxelize).
 *
 *     out[n,c] = Σ_k weights[n,k] feats[index[n,k],c]
 *
 * Places with an index below 0 or past the last voxel are skipped. K = 8 with trilinear_weights.h. Sums are in float (double
 * for double) in the order of k.
 *
 * Memory: out. Workspace: none forward, 8 (N K + S + 1) bytes backward. Time: O(N K C).
 */
#ifndef MUVOX_DEVOXELIZE_H
#define MUVOX_DEVOXELIZE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t       struct_size;
    muvox_matrix feats;        /* (S, C) half, bfloat16, float or double */
    muvox_matrix index;        /* (N, K) int32 or int64, K ≥ 1 */
    muvox_matrix weights;      /* (N, K) half, bfloat16 or float; double exactly if feats is double */
    muvox_output out;          /* (N, C), dtype of feats */
    muvox_matrix grad_out;     /* (N, C), dtype of feats; into backward */
    muvox_output grad_feats;   /* (S, C), dtype of feats; out of backward, only if wanted */
    muvox_output grad_weights; /* (N, K), dtype of weights; out of backward, only if wanted */
} muvox_devoxelize;

/* Errors: MUVOX_BAD_ARGUMENT, MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_devoxelize_forward(muvox_context *ctx, const muvox_devoxelize *op);

/* grad_feats[s,c] = Σ weights[n,k] grad_out[n,c] over the places that read s, (n, k) ascending: the same bits every run;
 * grad_weights[n,k] = Σ_c grad_out[n,c] feats[index[n,k],c], 0 for a skipped place. */
MUVOX_API muvox_status muvox_devoxelize_backward(muvox_context *ctx, const muvox_devoxelize *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it. */
MUVOX_API muvox_status muvox_devoxelize_forward_cuda(muvox_context *ctx, const muvox_devoxelize *op);
MUVOX_API muvox_status muvox_devoxelize_backward_cuda(muvox_context *ctx, const muvox_devoxelize *op);

#ifdef __cplusplus
}
#endif
#endif
