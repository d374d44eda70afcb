/* Matrices that belong to no set, and the reverse list of an index into them. */
#ifndef MUVOX_CUDA_TABLE_H
#define MUVOX_CUDA_TABLE_H

#include "reverse.cuh"

/* The element at a place of an int32 or int64 matrix. */
__device__ __forceinline__ int64_t integer_at(const muvox_matrix &m, int64_t at)
{
    return m.dtype == MUVOX_I64 ? static_cast<const int64_t *>(m.data)[at] : static_cast<const int32_t *>(m.data)[at];
}

/* Those at several places, −1 where a place is below 0. The dtype is looked at once: all loads wait together. */
template <int N>
__device__ __forceinline__ void integers_at(const muvox_matrix &m, const int64_t (&at)[N], int64_t (&x)[N])
{
    const auto read_all = [&](auto *data) {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = at[j] < 0 ? -1 : (int64_t)data[at[j]];
    };

    if (m.dtype == MUVOX_I64)
        read_all(static_cast<const int64_t *>(m.data));
    else
        read_all(static_cast<const int32_t *>(m.data));
}

template <typename P>
static __global__ void read_index(muvox_matrix index, int64_t count, int64_t N, int bits, uint32_t *picks, P *places)
{
    const int64_t number = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = quotient(number, index.cols);

    if (number >= count) return;
    const int64_t k = number - n * index.cols, row = integer_at(index, n * index.row_stride + k);

    picks[number] = row >= 0 && row < N ? (uint32_t)row : ~0u;
    places[number] = (P)n << bits | (P)k;
}

/* Which places of an index hold each of N rows; what is below 0 or past the last row holds none. */
template <typename P>
muvox_status reverse_index(muvox_context *ctx, const char *op_name, int64_t N, const muvox_matrix &index,
                           workspace *hold, reverse_list<P> *list)
{
    const int64_t count = index.rows * index.cols, picks_bytes = rounded_bytes(count * 4);
    workspace     block(ctx);

    REQUIRE(N < INT64_C(0xffffffff), MUVOX_UNSUPPORTED, "%s: an index into %lld rows, at most 2^32 - 2 are supported",
            op_name, (long long)N);
    FORWARD(check_grid(ctx, op_name, count / 256 + 1));
    FORWARD(block.take(op_name, picks_bytes + count * (int64_t)sizeof(P)));
    uint32_t *const picks = block.as<uint32_t>();
    P *const        places = (P *)(block.as<char>() + picks_bytes);
    list->bits = bits_below(index.cols);
    if (count) {
        read_index<P><<<blocks_for(count, 256), 256, 0, stream_of(ctx)>>>(index, count, N, list->bits, picks, places);
        LAUNCHED();
    }
    return reverse_picks<P>(ctx, op_name, N, count, picks, places, hold, list);
}

#endif
