#include "context.h"

#include "check.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

static void *builtin_alloc(void *user, size_t bytes)
{
    (void)user;
    return malloc(bytes);
}

static void builtin_free(void *user, void *block)
{
    (void)user;
    free(block);
}

muvox_status workspace_alloc(muvox_context *ctx, const char *op, size_t each, int threads, void **block)
{
    const size_t part = aligned_bytes(each), bytes = part * (size_t)threads;
    char        *raw;

    *block = NULL;
    if (!bytes) return MUVOX_OK;
    REQUIRE(part >= each && bytes / part == (size_t)threads, MUVOX_OUT_OF_MEMORY,
            "%s: out of memory, the workspace of %zu bytes for each of %d threads is too large", op, each, threads);
    /* A caller's allocator may return any alignment that malloc does: keep its pointer just below ours. */
    raw = (ctx->alloc ? ctx->alloc : builtin_alloc)(ctx->user, bytes + WORKSPACE_ALIGNMENT);
    REQUIRE(raw, MUVOX_OUT_OF_MEMORY, "%s: out of memory, no workspace of %zu bytes", op, bytes);
    *block = (void *)(((uintptr_t)raw + WORKSPACE_ALIGNMENT) & ~(uintptr_t)(WORKSPACE_ALIGNMENT - 1));
    memcpy((char *)*block - sizeof raw, &raw, sizeof raw);
    return MUVOX_OK;
}

void workspace_free(muvox_context *ctx, void *block)
{
    void *raw;

    if (!block) return;
    memcpy(&raw, (char *)block - sizeof raw, sizeof raw);
    (ctx->free ? ctx->free : builtin_free)(ctx->user, raw);
}

int threads_for(const muvox_context *ctx, int64_t items, double work)
{
    const int64_t threads = ctx->threads > 0 ? ctx->threads : omp_get_max_threads();
    const double  worth = 1 + work / 1e5;
    int64_t       most = items < threads ? items : threads;

    if (worth < (double)most) most = (int64_t)worth;
    return (int)(most < 1 ? 1 : most);
}

static const char *const simd_names[] = {"auto", "reference", "portable", "avx2", "avx512"};

/* NULL: not in this build, or not for this processor. */
static const muvox_kernel_set *kernel_set(muvox_simd simd)
{
    switch (simd) {
    case MUVOX_SIMD_REFERENCE: return &kernels_reference;
    case MUVOX_SIMD_PORTABLE: return &kernels_portable;
#if MUVOX_X86
    case MUVOX_SIMD_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
                   ? &kernels_avx2
                   : NULL;
    case MUVOX_SIMD_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                   ? &kernels_avx512
                   : NULL;
#endif
    default: return NULL;
    }
}

/* MUVOX_SIMD_AUTO resolved; an unknown name in the environment stays AUTO, which kernels_for refuses. */
static muvox_simd resolve(muvox_simd simd)
{
    const char *forced = getenv("MUVOX_SIMD");

    if (simd != MUVOX_SIMD_AUTO) return simd;
    if (forced && *forced && strcmp(forced, "auto") != 0) {
        for (int i = MUVOX_SIMD_REFERENCE; i <= MUVOX_SIMD_AVX512; i++)
            if (!strcmp(forced, simd_names[i])) return (muvox_simd)i;
        return MUVOX_SIMD_AUTO;
    }
    for (int i = MUVOX_SIMD_AVX512; i > MUVOX_SIMD_PORTABLE; i--)
        if (kernel_set((muvox_simd)i)) return (muvox_simd)i;
    return MUVOX_SIMD_PORTABLE;
}

muvox_status kernels_for(muvox_context *ctx, const char *op, muvox_dtype dtype, const muvox_kernels **kernels)
{
    const muvox_simd        simd = resolve(ctx->simd);
    const muvox_kernel_set *set = kernel_set(simd);

    REQUIRE(simd != MUVOX_SIMD_AUTO, MUVOX_BAD_ARGUMENT,
            "%s: MUVOX_SIMD is \"%s\", expected auto, reference, portable, avx2 or avx512", op, getenv("MUVOX_SIMD"));
    REQUIRE(set, MUVOX_UNSUPPORTED, "%s: this processor or build has no %s kernels", op, simd_names[simd]);
    *kernels = dtype == MUVOX_F64 ? &set->in_double : &set->in_float;
    return MUVOX_OK;
}

const char *muvox_simd_name(void)
{
    return simd_names[resolve(MUVOX_SIMD_AUTO)];
}

const char *muvox_version(void)
{
    return MUVOX_VERSION;
}

const char *muvox_status_name(muvox_status status)
{
    switch (status) {
    case MUVOX_OK: return "MUVOX_OK";
    case MUVOX_BAD_ARGUMENT: return "MUVOX_BAD_ARGUMENT";
    case MUVOX_BAD_SHAPE: return "MUVOX_BAD_SHAPE";
    case MUVOX_BAD_DTYPE: return "MUVOX_BAD_DTYPE";
    case MUVOX_OUT_OF_MEMORY: return "MUVOX_OUT_OF_MEMORY";
    case MUVOX_DEVICE_ERROR: return "MUVOX_DEVICE_ERROR";
    case MUVOX_UNSUPPORTED: return "MUVOX_UNSUPPORTED";
    }
    return "unknown";
}

const char *muvox_build_info(void)
{
#if MUVOX_X86
    return "C compiler " __VERSION__ "; CPU kernels: reference, portable, avx2, avx512";
#else
    return "C compiler " __VERSION__ "; CPU kernels: reference, portable";
#endif
}
