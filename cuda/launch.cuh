/* The host side of a call on the device: device and stream, workspace, errors. */
#ifndef MUVOX_CUDA_LAUNCH_H
#define MUVOX_CUDA_LAUNCH_H

#include "../ops/check.h"

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

/* A failed CUDA call becomes a status and a message that names the operator. */
muvox_status device_status(muvox_context *ctx, const char *op, cudaError_t error);

#define CUDA(call) FORWARD(device_status(ctx, op_name, call))

/* After a launch: whether it started. */
#define LAUNCHED() CUDA(cudaGetLastError())

/* Makes the context's device the current one for the length of a call, under an NVTX range with the operator's name. */
class device_call
{
  public:
    device_call(muvox_context *ctx, const char *op)
    {
        nvtxRangePushA(op);
        status = device_status(ctx, op, cudaGetDevice(&before));
        if (status == MUVOX_OK && before != ctx->device) {
            status = device_status(ctx, op, cudaSetDevice(ctx->device));
            changed = status == MUVOX_OK;
        }
    }
    ~device_call()
    {
        if (changed) cudaSetDevice(before);
        nvtxRangePop();
    }
    muvox_status status;

  private:
    int  before = 0;
    bool changed = false;
};

/* A block of device memory, in stream order: what a later call allocates may lie in what this one has given back. */
class workspace
{
  public:
    workspace(muvox_context *ctx) : ctx(ctx)
    {
    }
    ~workspace()
    {
        give_back();
    }
    workspace(const workspace &) = delete;
    workspace               &operator=(const workspace &) = delete;
    muvox_status             take(const char *op, int64_t bytes); /* what it has stays if that is enough */
    void                     give_back();
    template <typename T> T *as() const
    {
        return static_cast<T *>(block);
    }

  private:
    muvox_context *ctx;
    void          *block = nullptr;
    int64_t        size = 0;
};

inline cudaStream_t stream_of(const muvox_context *ctx)
{
    return static_cast<cudaStream_t>(ctx->stream);
}

/* Parts of one workspace begin at multiples of 256 bytes. */
inline int64_t rounded_bytes(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

/* Bits that hold the numbers below count. */
inline int bits_below(int64_t count)
{
    int bits = 0;

    while (bits < 62 && INT64_C(1) << bits < count) bits++;
    return bits;
}

/* Blocks of `each` items; the grid is flat, as only its first dimension goes past 65,535. */
inline unsigned blocks_for(int64_t items, int64_t each)
{
    return static_cast<unsigned>((items + each - 1) / each);
}

/* With MUVOX_CHECK=1 in the environment: reads splits back and refuses wrong ones, as on the CPU. The call then
 * waits for the device. Without, wrong splits give wrong results, but no access outside the rows. */
muvox_status check_splits_on_device(muvox_context *ctx, const char *op, const char *name, const muvox_sets *sets);

/* Kernels count in 32 bits inside a set. */
muvox_status check_row_stride(muvox_context *ctx, const char *op, const char *name, int64_t row_stride);

/* Refuses what does not fit a grid: 2^31 − 1 blocks. */
muvox_status check_grid(muvox_context *ctx, const char *op, int64_t blocks);

#endif
