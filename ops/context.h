/* How a call runs: the one door of allocation, threads, and the kernels that fit this processor. */
#ifndef MUVOX_OPS_CONTEXT_H
#define MUVOX_OPS_CONTEXT_H

#include "kernels.h"
#include "muvox/types.h"

#include <stdbool.h>

/* Blocks of workspace begin at multiples of this, and so does each thread's part of one. */
#define WORKSPACE_ALIGNMENT 64

static inline size_t aligned_bytes(size_t bytes)
{
    return (bytes + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT;
}

/* One block for all threads, `each` bytes for every one (rounded up by aligned_bytes), or MUVOX_OUT_OF_MEMORY with a
 * message that names the operator. *block is NULL when nothing is needed. Give it back with workspace_free. */
muvox_status workspace_alloc(muvox_context *ctx, const char *op, size_t each, int threads, void **block);
void         workspace_free(muvox_context *ctx, void *block);

/* A part of a workspace. Layouts are also computed with base NULL, to count bytes, so this is not pointer arithmetic. */
static inline void *part_of(void *base, size_t offset)
{
    return (void *)((uintptr_t)base + offset);
}

/* How many threads share so many independent items, which take about `work` multiply-adds in all: what a thread would do in
 * less time than it takes to start is not worth one. */
int threads_for(const muvox_context *ctx, int64_t items, double work);

/* How many of them a thread takes at a time: few enough to balance, many enough not to queue for small ones. */
static inline int chunk_of(int64_t items, int threads)
{
    const int64_t chunk = items / ((int64_t)threads * 16);

    return (int)(chunk < 1 ? 1 : chunk > 16 ? 16 : chunk);
}

/* The kernels for dtype, as ctx->simd (and MUVOX_SIMD) ask; MUVOX_UNSUPPORTED where this processor or build lacks them. */
muvox_status kernels_for(muvox_context *ctx, const char *op, muvox_dtype dtype, const muvox_kernels **kernels);

#endif
