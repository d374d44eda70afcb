/* muvox: mean of the features of the points in each voxel (torchsparse's spvoxelize).
 *
 *     out[s,c] = 1/counts[s] Σ_{n: index[n] = s} feats[n,c]
 *
 * It is the mean when counts is the histogram of index. Points with an index below 0 or past the last voxel are skipped, and
 * so are voxels with counts 0 or less: their row is 0. Sums are in float (double for double), points in ascending order,
 * rounded once: every run gives the same bits.
 *
 * Memory: out. Workspace: 8 (N + S + 1) bytes. Time: O(N C + S C).
 */
#ifndef MUVOX_VOXELIZE_H
#define MUVOX_VOXELIZE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t       struct_size;
    muvox_matrix feats;      /* (N, C) half, bfloat16, float or double */
    muvox_matrix index;      /* (N, 1) int32 or int64 */
    muvox_matrix counts;     /* (S, 1) int32 or int64; of forward with histogram only the number of rows */
    muvox_output out;        /* (S, C), dtype of feats */
    muvox_matrix grad_out;   /* (S, C), dtype of feats; into backward */
    muvox_output grad_feats; /* (N, C), dtype of feats; out of backward */
    muvox_output histogram;  /* (S, 1) int64; out of forward, only if wanted: points of each voxel, used as counts */
} muvox_voxelize;

/* Errors: MUVOX_BAD_ARGUMENT, MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_voxelize_forward(muvox_context *ctx, const muvox_voxelize *op);

/* grad_feats[n] = grad_out[index[n]] / counts[index[n]], 0 for a skipped point; feats and out are not read. */
MUVOX_API muvox_status muvox_voxelize_backward(muvox_context *ctx, const muvox_voxelize *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it. */
MUVOX_API muvox_status muvox_voxelize_forward_cuda(muvox_context *ctx, const muvox_voxelize *op);
MUVOX_API muvox_status muvox_voxelize_backward_cuda(muvox_context *ctx, const muvox_voxelize *op);

#ifdef __cplusplus
}
#endif
#endif
