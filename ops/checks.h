/* The checks of every operator's descriptor, before anything is computed. They read no data behind it, so that the CPU and
 * CUDA share them. */
#ifndef MUVOX_OPS_CHECKS_H
#define MUVOX_OPS_CHECKS_H

#include "check.h"
#include "muvox/muvox.h"

#ifdef __cplusplus
extern "C" {
#endif

muvox_status check_knn_forward(muvox_context *ctx, const muvox_knn *op);
muvox_status check_knn_backward(muvox_context *ctx, const muvox_knn *op);
muvox_status check_aggregate_forward(muvox_context *ctx, const muvox_aggregate *op);
muvox_status check_aggregate_backward(muvox_context *ctx, const muvox_aggregate *op);
muvox_status check_gravnet_forward(muvox_context *ctx, const muvox_gravnet *op);
muvox_status check_gravnet_backward(muvox_context *ctx, const muvox_gravnet *op);
muvox_status check_attention_forward(muvox_context *ctx, const muvox_attention *op);
muvox_status check_attention_backward(muvox_context *ctx, const muvox_attention *op);
muvox_status check_offset_attention_forward(muvox_context *ctx, const muvox_offset_attention *op);
muvox_status check_offset_attention_backward(muvox_context *ctx, const muvox_offset_attention *op);
muvox_status check_neighbour_attention_forward(muvox_context *ctx, const muvox_neighbour_attention *op);
muvox_status check_neighbour_attention_backward(muvox_context *ctx, const muvox_neighbour_attention *op);
muvox_status check_pool_forward(muvox_context *ctx, const muvox_pool *op);
muvox_status check_pool_backward(muvox_context *ctx, const muvox_pool *op);
muvox_status check_voxelize_forward(muvox_context *ctx, const muvox_voxelize *op);
muvox_status check_voxelize_backward(muvox_context *ctx, const muvox_voxelize *op);
muvox_status check_devoxelize_forward(muvox_context *ctx, const muvox_devoxelize *op);
muvox_status check_devoxelize_backward(muvox_context *ctx, const muvox_devoxelize *op);
muvox_status check_trilinear_weights_forward(muvox_context *ctx, const muvox_trilinear_weights *op);
muvox_status check_trilinear_weights_backward(muvox_context *ctx, const muvox_trilinear_weights *op);

#ifdef __cplusplus
}
#endif
#endif
