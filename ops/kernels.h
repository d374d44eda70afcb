/* The table of CPU kernels. Every implementation (reference, and one per instruction set) fills it with functions of the
 * same signatures; arguments were checked before, so a kernel fails only for lack of memory. */
#ifndef MUVOX_OPS_KERNELS_H
#define MUVOX_OPS_KERNELS_H

#include "muvox/muvox.h"

typedef struct {
    muvox_status (*knn_forward)(muvox_context *ctx, const muvox_knn *op);
    muvox_status (*knn_backward)(muvox_context *ctx, const muvox_knn *op);
    muvox_status (*aggregate_forward)(muvox_context *ctx, const muvox_aggregate *op);
    muvox_status (*aggregate_backward)(muvox_context *ctx, const muvox_aggregate *op);
    muvox_status (*gravnet_forward)(muvox_context *ctx, const muvox_gravnet *op);
    muvox_status (*gravnet_backward)(muvox_context *ctx, const muvox_gravnet *op);
    muvox_status (*attention_forward)(muvox_context *ctx, const muvox_attention *op);
    muvox_status (*attention_backward)(muvox_context *ctx, const muvox_attention *op);
    muvox_status (*offset_attention_forward)(muvox_context *ctx, const muvox_offset_attention *op);
    muvox_status (*offset_attention_backward)(muvox_context *ctx, const muvox_offset_attention *op);
    muvox_status (*neighbour_attention_forward)(muvox_context *ctx, const muvox_neighbour_attention *op);
    muvox_status (*neighbour_attention_backward)(muvox_context *ctx, const muvox_neighbour_attention *op);
    muvox_status (*pool_forward)(muvox_context *ctx, const muvox_pool *op);
    muvox_status (*pool_backward)(muvox_context *ctx, const muvox_pool *op);
    muvox_status (*voxelize_forward)(muvox_context *ctx, const muvox_voxelize *op);
    muvox_status (*voxelize_backward)(muvox_context *ctx, const muvox_voxelize *op);
    muvox_status (*devoxelize_forward)(muvox_context *ctx, const muvox_devoxelize *op);
    muvox_status (*devoxelize_backward)(muvox_context *ctx, const muvox_devoxelize *op);
    muvox_status (*trilinear_weights_forward)(muvox_context *ctx, const muvox_trilinear_weights *op);
    muvox_status (*trilinear_weights_backward)(muvox_context *ctx, const muvox_trilinear_weights *op);
} muvox_kernels;

/* Arithmetic in float (for half, bfloat16 and float) or in double. */
typedef struct {
    muvox_kernels in_float, in_double;
} muvox_kernel_set;

extern const muvox_kernel_set kernels_reference, kernels_portable;
#if MUVOX_X86
extern const muvox_kernel_set kernels_avx2, kernels_avx512;
#endif

#endif
