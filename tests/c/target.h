/* Where the tests run. On the CPU every call goes to libmuvox. With MUVOX_TEST_CUDA the same tests run on a device:
 * MUVOX_SIMD_REFERENCE is still libmuvox's plain kernel, any other choice is libmuvox_cuda, on copies of the blocks of
 * memory that the problems are made of. After such a call nothing but outputs may have changed, no error may be pending
 * and no workspace may be left. What threads are on the CPU is then where workspace and stream come from:
 *
 *     1       an allocation of exactly that size for each workspace, so that a sanitizer sees the first byte beside it
 *     2       the same, filled with NaN
 *     3       built-in allocator, and a stream of its own on which all data arrives late
 *     others  built-in allocator, default stream
 */
#ifndef MUVOX_TESTS_TARGET_H
#define MUVOX_TESTS_TARGET_H

#include "muvox/muvox.h"

#include <stdbool.h>

/* The blocks of a problem: memory that calls may be given. Frozen: an output that is an input from now on. */
void *memory_make(size_t bytes, bool output);
void  memory_freeze(void *block);
void  memory_free(void *block);

/* Workspace where the kernels run; NULL if there is none left. */
void *workspace_make(size_t bytes);
void  workspace_drop(void *block);

/* The choices of kernels that run here, the plain one first; returns how many. */
int all_simds(muvox_simd simds[4]);

/* Whether there are kernels of this operator to test. */
bool runs_here(const char *op);

#ifdef MUVOX_TEST_CUDA

/* Values of inputs (neighbours, row weights, splits unless MUVOX_CHECK=1) are checked on the CPU only. */
enum { ON_CPU = 0 };

/* From now on blocks are copied with so many bytes on both sides that must stay as they are; 0: none. */
void guard_blocks(size_t bytes);

/* Gives back what outlives the tests. */
void target_end(void);

#define ON_TARGET(op)                                                                                                  \
    muvox_status op##_forward_on_target(muvox_context *ctx, const muvox_##op *given);                                  \
    muvox_status op##_backward_on_target(muvox_context *ctx, const muvox_##op *given);
ON_TARGET(knn)
ON_TARGET(aggregate)
ON_TARGET(gravnet)
ON_TARGET(pool)
ON_TARGET(voxelize)
ON_TARGET(devoxelize)
ON_TARGET(trilinear_weights)
#undef ON_TARGET

#define muvox_knn_forward(ctx, op)                knn_forward_on_target(ctx, op)
#define muvox_knn_backward(ctx, op)               knn_backward_on_target(ctx, op)
#define muvox_aggregate_forward(ctx, op)          aggregate_forward_on_target(ctx, op)
#define muvox_aggregate_backward(ctx, op)         aggregate_backward_on_target(ctx, op)
#define muvox_gravnet_forward(ctx, op)            gravnet_forward_on_target(ctx, op)
#define muvox_gravnet_backward(ctx, op)           gravnet_backward_on_target(ctx, op)
#define muvox_pool_forward(ctx, op)               pool_forward_on_target(ctx, op)
#define muvox_pool_backward(ctx, op)              pool_backward_on_target(ctx, op)
#define muvox_voxelize_forward(ctx, op)           voxelize_forward_on_target(ctx, op)
#define muvox_voxelize_backward(ctx, op)          voxelize_backward_on_target(ctx, op)
#define muvox_devoxelize_forward(ctx, op)         devoxelize_forward_on_target(ctx, op)
#define muvox_devoxelize_backward(ctx, op)        devoxelize_backward_on_target(ctx, op)
#define muvox_trilinear_weights_forward(ctx, op)  trilinear_weights_forward_on_target(ctx, op)
#define muvox_trilinear_weights_backward(ctx, op) trilinear_weights_backward_on_target(ctx, op)

#else

enum { ON_CPU = 1 };

#endif
#endif
