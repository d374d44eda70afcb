/* muvox: the eight voxels around a point and their trilinear weights.
 *
 * Voxel (i, j, k) of an nx × ny × nz grid has its centre at origin + (i + ½, j + ½, k + ½) · voxel_size and number
 * (i ny + j) nz + k. With u = (point − origin) / voxel_size − ½ and t = u − ⌊u⌋, corner (a, b, c) ∈ {0, 1}³ is the voxel
 * ⌊u⌋ + (a, b, c), at place 4a + 2b + c, and weighs Π (t or 1 − t). A corner outside the grid has index −1 and weight 0; the
 * others are not rescaled, so what is read fades out over half a voxel. NaN or infinite points have index −1 throughout.
 *
 * Memory: outputs. Workspace: none. Time: O(N).
 */
#ifndef MUVOX_TRILINEAR_WEIGHTS_H
#define MUVOX_TRILINEAR_WEIGHTS_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    size_t       struct_size;
    double       origin[3], voxel_size[3]; /* finite; sizes > 0; in the unit of the points */
    int64_t      shape[3];                 /* nx, ny, nz, ≥ 0, with a product below 2^31 */
    muvox_matrix points;                   /* (N, 3) half, bfloat16, float or double */
    muvox_output index;                    /* (N, 8) int32 */
    muvox_output weights;                  /* (N, 8) float, double for double */
    muvox_matrix grad_weights;             /* (N, 8), dtype of weights; into backward */
    muvox_output grad_points;              /* (N, 3), dtype of points; out of backward */
} muvox_trilinear_weights;

/* Errors: MUVOX_BAD_ARGUMENT, MUVOX_BAD_SHAPE, MUVOX_BAD_DTYPE. */
MUVOX_API muvox_status muvox_trilinear_weights_forward(muvox_context *ctx, const muvox_trilinear_weights *op);

/* grad_points[n] = Σ_corners grad_weights ∂weight/∂point over the corners inside the grid. */
MUVOX_API muvox_status muvox_trilinear_weights_backward(muvox_context *ctx, const muvox_trilinear_weights *op);

/* The same on the context's device and stream, in libmuvox_cuda: all data lies there, and nothing waits for it. */
MUVOX_API muvox_status muvox_trilinear_weights_forward_cuda(muvox_context *ctx, const muvox_trilinear_weights *op);
MUVOX_API muvox_status muvox_trilinear_weights_backward_cuda(muvox_context *ctx, const muvox_trilinear_weights *op);

#ifdef __cplusplus
}
#endif
#endif
