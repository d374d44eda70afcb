#include "launch.cuh"

#include <stdlib.h>
#include <string.h>
#include <vector>

muvox_status device_status(muvox_context *ctx, const char *op, cudaError_t error)
{
    if (error == cudaSuccess) return MUVOX_OK;
    cudaGetLastError(); /* or the next call would report it again */
    REQUIRE(error != cudaErrorMemoryAllocation, MUVOX_OUT_OF_MEMORY, "%s: out of memory on device %d", op, ctx->device);
    REQUIRE(false, MUVOX_DEVICE_ERROR, "%s: device %d: %s", op, ctx->device, cudaGetErrorString(error));
}

muvox_status workspace::take(const char *op, int64_t bytes)
{
    if (bytes <= size) return MUVOX_OK;
    give_back();
    if (ctx->alloc)
        block = ctx->alloc(ctx->user, static_cast<size_t>(bytes));
    else {
        const cudaError_t error = cudaMallocAsync(&block, static_cast<size_t>(bytes), stream_of(ctx));

        if (error != cudaSuccess) block = nullptr;
        if (error != cudaErrorMemoryAllocation) FORWARD(device_status(ctx, op, error));
        cudaGetLastError();
    }
    REQUIRE(block, MUVOX_OUT_OF_MEMORY, "%s: out of memory, no workspace of %lld bytes on device %d", op,
            static_cast<long long>(bytes), ctx->device);
    size = bytes;
    return MUVOX_OK;
}

void workspace::give_back()
{
    if (!block) return;
    if (ctx->free)
        ctx->free(ctx->user, block);
    else
        cudaFreeAsync(block, stream_of(ctx));
    block = nullptr;
    size = 0;
}

muvox_status check_splits_on_device(muvox_context *ctx, const char *op_name, const char *name, const muvox_sets *sets)
{
    const char *const wanted = getenv("MUVOX_CHECK");

    if (!sets->splits || !wanted || strcmp(wanted, "1")) return MUVOX_OK;
    std::vector<int64_t> splits(static_cast<size_t>(sets->count) + 1);
    muvox_sets           here = *sets;

    CUDA(cudaMemcpyAsync(splits.data(), sets->splits, splits.size() * sizeof(int64_t), cudaMemcpyDeviceToHost,
                         stream_of(ctx)));
    CUDA(cudaStreamSynchronize(stream_of(ctx)));
    here.splits = splits.data();
    return check_splits(ctx, op_name, name, &here);
}

muvox_status check_row_stride(muvox_context *ctx, const char *op, const char *name, int64_t row_stride)
{
    REQUIRE(row_stride <= INT32_MAX, MUVOX_UNSUPPORTED,
            "%s: rows of %s lie %lld elements apart, at most %d are supported", op, name,
            static_cast<long long>(row_stride), INT32_MAX);
    return MUVOX_OK;
}

muvox_status check_grid(muvox_context *ctx, const char *op, int64_t blocks)
{
    REQUIRE(blocks <= INT32_MAX, MUVOX_UNSUPPORTED,
            "%s: the call needs %lld blocks of threads, at most %d are supported", op, static_cast<long long>(blocks),
            INT32_MAX);
    return MUVOX_OK;
}
