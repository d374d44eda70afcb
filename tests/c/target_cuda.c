/* The tests on a device: see target.h. */
#define _POSIX_C_SOURCE 199309L /* nanosleep */

#include "problem.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_BLOCKS = 4096, GUARD = 0x5a, LATE = 0xff }; /* LATE: NaN, −1: what stands where data has not arrived */

/* A block of the tests and its copy, which is made when a call first needs it. */
static struct {
    unsigned char *host, *device, *staged; /* device: guard, block, guard; staged: the same, to arrive from */
    size_t         bytes, guard;
    bool           output, used; /* used: by the call that runs */
} block[MOST_BLOCKS];
static int          blocks, workspaces;
static size_t       guard;
static cudaStream_t late;

static void must(cudaError_t error, const char *call)
{
    if (error != cudaSuccess) ck_abort_msg("%s: %s: %s", done(), call, cudaGetErrorString(error));
}

#define MUST(call) must(call, #call)

void guard_blocks(size_t bytes)
{
    guard = (bytes + 255) / 256 * 256;
}

void *memory_make(size_t bytes, bool output)
{
    unsigned char *const data = malloc(bytes ? bytes : 1);

    if (!data || blocks == MOST_BLOCKS) return NULL;
    block[blocks].host = data;
    block[blocks].device = block[blocks].staged = NULL;
    block[blocks].bytes = bytes;
    block[blocks].guard = guard;
    block[blocks].used = false;
    block[blocks++].output = output;
    return data;
}

/* The block in which an address lies, −1 if in none. */
static int block_at(uintptr_t address)
{
    for (int b = 0; b < blocks; b++) {
        const uintptr_t begin = (uintptr_t)block[b].host;

        if (address == begin || (address > begin && address < begin + block[b].bytes)) return b;
    }
    return -1;
}

void memory_freeze(void *data)
{
    block[block_at((uintptr_t)data)].output = false;
}

void memory_free(void *data)
{
    const int b = block_at((uintptr_t)data);

    MUST(cudaFree(block[b].device));
    free(data);
    block[b] = block[--blocks];
}

void *workspace_make(size_t bytes)
{
    void *data;

    if (cudaMalloc(&data, bytes) != cudaSuccess) return NULL;
    workspaces++;
    return data;
}

void workspace_drop(void *data)
{
    MUST(cudaFree(data)); /* waits for the kernels that use it */
    workspaces--;
}

static void *exact_alloc(void *user, size_t bytes)
{
    (void)user;
    return workspace_make(bytes);
}

static void *filled_alloc(void *user, size_t bytes)
{
    void *const data = workspace_make(bytes);

    (void)user;
    if (data) MUST(cudaMemset(data, LATE, bytes));
    return data;
}

static void exact_free(void *user, void *data)
{
    (void)user;
    workspace_drop(data);
}

static void copy_in(int b, bool is_late)
{
    const size_t   all = block[b].bytes + 2 * block[b].guard;
    unsigned char *to;

    if (!block[b].device) MUST(cudaMalloc((void **)&block[b].device, all ? all : 1));
    if (is_late) {
        MUST(cudaMalloc((void **)&block[b].staged, all ? all : 1));
        MUST(cudaMemset(block[b].device, LATE, all));
    }
    to = is_late ? block[b].staged : block[b].device;
    MUST(cudaMemset(to, GUARD, block[b].guard));
    MUST(cudaMemset(to + block[b].guard + block[b].bytes, GUARD, block[b].guard));
    MUST(cudaMemcpy(to + block[b].guard, block[b].host, block[b].bytes, cudaMemcpyHostToDevice));
    block[b].used = true;
}

/* Every word of a descriptor that is an address in a block becomes one in its copy. */
static void move_in(void *descriptor, size_t bytes, bool is_late)
{
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
        unsigned char *const place = (unsigned char *)descriptor + at;
        uintptr_t            word;
        int                  b;

        memcpy(&word, place, sizeof word);
        b = block_at(word);
        if (b < 0) continue;
        if (!block[b].used) copy_in(b, is_late);
        word = (uintptr_t)block[b].device + block[b].guard + (word - (uintptr_t)block[b].host);
        memcpy(place, &word, sizeof word);
    }
}

static void CUDART_CB wait_a_little(void *unused)
{
    const struct timespec time = {0, 1000000};

    (void)unused;
    nanosleep(&time, NULL);
}

static void arrive_late(void)
{
    MUST(cudaLaunchHostFunc(late, wait_a_little, NULL));
    for (int b = 0; b < blocks; b++)
        if (block[b].used)
            MUST(cudaMemcpyAsync(block[b].device, block[b].staged, block[b].bytes + 2 * block[b].guard,
                                 cudaMemcpyDeviceToDevice, late));
}

static void copy_out(int b)
{
    const size_t         all = block[b].bytes + 2 * block[b].guard;
    unsigned char *const copy = malloc(all ? all : 1), *const data = copy + block[b].guard;

    if (!copy) ck_abort_msg("%s: the test needs more memory", done());
    MUST(cudaMemcpy(copy, block[b].device, all, cudaMemcpyDeviceToHost));
    for (size_t at = 0; at < block[b].guard; at++)
        if (copy[at] != GUARD || data[block[b].bytes + at] != GUARD)
            ck_abort_msg("%s: a byte beside block %d was written", done(), b);
    if (block[b].output)
        memcpy(block[b].host, data, block[b].bytes);
    else if (memcmp(block[b].host, data, block[b].bytes) != 0)
        ck_abort_msg("%s: block %d, an input, was written", done(), b);
    free(copy);
}

/* What a call left behind that ended in a failed assertion. */
static void clean_up(void)
{
    for (int b = 0; b < blocks; b++) {
        MUST(cudaFree(block[b].staged));
        block[b].staged = NULL;
        block[b].used = false;
    }
    workspaces = 0;
}

/* Data and workspace of a call, and what the context said before. */
static muvox_context start(muvox_context *ctx, void *descriptor, size_t bytes)
{
    const bool    is_late = ctx && ctx->threads == 3;
    muvox_context before = {0};

    clean_up();
    move_in(descriptor, bytes, is_late);
    MUST(cudaDeviceSynchronize());
    if (!ctx) return before;
    before = *ctx;
    if (is_late) {
        if (!late) MUST(cudaStreamCreateWithFlags(&late, cudaStreamNonBlocking));
        arrive_late();
        ctx->stream = late;
    }
    if ((ctx->threads == 1 || ctx->threads == 2) && !ctx->alloc && !ctx->free) {
        ctx->alloc = ctx->threads == 1 ? exact_alloc : filled_alloc;
        ctx->free = exact_free;
    }
    return before;
}

static void finish(muvox_context *ctx, const muvox_context *before)
{
    if (ctx) {
        ctx->alloc = before->alloc;
        ctx->free = before->free;
        ctx->stream = before->stream;
    }
    MUST(cudaGetLastError());
    MUST(cudaDeviceSynchronize());
    if (workspaces) ck_abort_msg("%s: %d blocks of workspace leaked", done(), workspaces);
    for (int b = 0; b < blocks; b++)
        if (block[b].used) copy_out(b);
    clean_up();
}

#define ON_TARGET(op, direction)                                                                                       \
    muvox_status op##_##direction##_on_target(muvox_context *ctx, const muvox_##op *given)                             \
    {                                                                                                                  \
        muvox_##op    copy = *given;                                                                                   \
        muvox_context before;                                                                                          \
        muvox_status  status;                                                                                          \
                                                                                                                       \
        if (ctx && ctx->simd == MUVOX_SIMD_REFERENCE) return (muvox_##op##_##direction)(ctx, given);                   \
        before = start(ctx, &copy, sizeof copy);                                                                       \
        status = muvox_##op##_##direction##_cuda(ctx, &copy);                                                          \
        finish(ctx, &before);                                                                                          \
        return status;                                                                                                 \
    }
ON_TARGET(knn, forward)
ON_TARGET(knn, backward)
ON_TARGET(aggregate, forward)
ON_TARGET(aggregate, backward)
ON_TARGET(gravnet, forward)
ON_TARGET(gravnet, backward)
ON_TARGET(pool, forward)
ON_TARGET(pool, backward)
ON_TARGET(voxelize, forward)
ON_TARGET(voxelize, backward)
ON_TARGET(devoxelize, forward)
ON_TARGET(devoxelize, backward)
ON_TARGET(trilinear_weights, forward)
ON_TARGET(trilinear_weights, backward)

int all_simds(muvox_simd simds[4])
{
    simds[0] = MUVOX_SIMD_REFERENCE;
    simds[1] = MUVOX_SIMD_AUTO;
    return 2;
}

bool runs_here(const char *op)
{
    static const char *const names[] = {"knn",      "aggregate",  "gravnet",          "pool",
                                        "voxelize", "devoxelize", "trilinear_weights"};

    for (int n = 0; n < COUNT(names); n++)
        if (!strcmp(op, names[n])) return true;
    return false;
}

void target_end(void)
{
    if (late) cudaStreamDestroy(late);
    cudaDeviceReset();
}
